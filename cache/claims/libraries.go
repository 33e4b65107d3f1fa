package claims

import (
	"cmp"
	"fmt"
	"os"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
)

// keepLibraries returns the reference with descriptors of its own: of each execution provider's
// library, and of no file beside them, because a claim may last.
func keepLibraries(ref *runtimes.Ref, open bool) (runtimes.Ref, error) {
	out := *ref
	out.EPLibraries = nil
	for _, l := range ref.EPLibraries {
		one := runtimes.LibraryRef{EP: l.EP, Path: l.Path}
		if open && l.File != nil {
			var err error
			if one.File, err = identity.Duplicate(l.File); err != nil {
				closeLibraries(&out)
				return runtimes.Ref{}, err
			}
		}
		out.EPLibraries = append(out.EPLibraries, one)
	}
	return out, nil
}

// closeLibraries closes what keepLibraries opened.
func closeLibraries(ref *runtimes.Ref) {
	for _, l := range ref.EPLibraries {
		if l.File != nil {
			_ = l.File.Close() // opened for reading only: nothing can be lost
		}
	}
}

// stillOpen fails if the libraries that the claim was given for are not in their places.
func (cl *claim) stillOpen() error {
	for _, l := range cl.Runtime.EPLibraries {
		if l.File == nil {
			continue
		}
		gone, err := runtimes.Unlinked(l.File)
		now, err2 := cas.StampOf(l.File)
		if err = cmp.Or(err, err2); err != nil {
			return &os.PathError{Op: "stat", Path: l.Path, Err: err}
		}
		if was := cl.Plan.Libraries[l.EP]; gone || now.Size != was.Size || now.Mtime != was.Mtime {
			return fmt.Errorf("library %q was replaced meanwhile", l.Path)
		}
	}
	return nil
}
