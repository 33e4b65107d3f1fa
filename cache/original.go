package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
)

// original is a job's model in its owner's file. A worker may read it there, without a private copy,
// where the memo has the digest under the file's stamp. The output counts only if the file has the
// same stamp when the compile is over.
type original struct {
	file  *os.File  // open for reading only; no client shares the open file
	stamp cas.Stamp // that the memo has the digest under
}

// errOriginal says that the model has to be compiled from a private copy.
var errOriginal = errors.New("the model's file changed, or cannot be compiled where it lies")

// original returns the job's model in its owner's file. It returns nil where a private copy has to be
// made, because no stamp vouches for the file or the compiler needs a copy. Models of several files
// are copied, because execution providers refuse files that do not lie in one folder.
func (j *job) original(ctx context.Context, spec compilers.Job) *original {
	opener, ok := j.c.compiler.(compilers.Opener)
	if !ok || j.copied || j.Request.Models() > 1 || j.VerifyOutput != 0 {
		return nil
	}
	stamp, ok := j.c.models.Stamp(j.Peer.UID, j.Request.ModelFiles(0), j.Plan.Canonical.Model)
	if !ok {
		return nil
	}
	file, err := openAgain(j.Graph)
	if err != nil {
		return nil // others may not read it; its user sent it open
	}
	o := &original{file, stamp}
	spec.ModelFile = o.file
	m, err := identity.Files{Name: j.Request.Name, Graph: file}.Read(ctx)
	if err != nil || len(m.Locations()) > 0 || !opener.TakesOpen(spec) {
		o.close()
		return nil // what is wrong with the model its copy tells
	}
	j.copies, j.open, j.dimensions = []modelCopy{{path: spec.Model, original: o}}, nil, nil
	j.addDimensions(m)
	return o
}

// proof reports whether the file has the bytes that were keyed, and had them all the time. The memo's
// digest was taken after the file was written back, so every store since has moved its times.
func (o *original) proof() error {
	stamp, err := cas.StampOf(o.file)
	if err != nil || stamp != o.stamp {
		return errOriginal
	}
	return nil
}

func (o *original) close() {
	if o != nil {
		_ = o.file.Close() // opened for reading only: nothing can be lost
	}
}

// mayBeToBlame tells whether a compile may have failed because it was the original's and no copy's: a worker that died is replaced anyway, and what is
// refused with the name of the file may be the way to it.
func (o *original) mayBeToBlame(err error, path string) bool {
	var exit *compilers.ExitError
	var refused *compilers.RefusedError
	switch {
	case o == nil || errors.Is(err, compilers.ErrStart):
		return false
	case errors.As(err, &refused):
		return strings.Contains(refused.Text, filepath.Base(path))
	}
	return errors.As(err, &exit)
}
