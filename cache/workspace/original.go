package workspace

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
)

// Original is a job's model in its owner's file. A worker may read it there, without a private
// copy, where the memo has the digest under the file's stamp. The output counts only if the file
// has the same stamp when the compile is over.
type Original struct {
	File  *os.File  // open for reading only; no client shares the open file
	Stamp cas.Stamp // that the memo has the digest under
}

// ErrOriginal says that the model has to be compiled from a private copy.
var ErrOriginal = errors.New("the model's file changed, or cannot be compiled where it lies")

// Proof reports whether the file has the bytes that were keyed, and had them all the time. The
// memo's digest was taken after the file was written back, so every store since has moved its
// times.
func (o *Original) Proof() error {
	stamp, err := cas.StampOf(o.File)
	if err != nil || stamp != o.Stamp {
		return ErrOriginal
	}
	return nil
}

// Close closes the file. It does nothing for nil.
func (o *Original) Close() {
	if o != nil {
		_ = o.File.Close() // opened for reading only: nothing can be lost
	}
}

// MayBeToBlame reports whether a compile may have failed because it read the original and not a
// copy: a worker that died is replaced anyway, and a refusal that names the file may be about its
// path.
func (o *Original) MayBeToBlame(err error, path string) bool {
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
