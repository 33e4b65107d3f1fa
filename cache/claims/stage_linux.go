package claims

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/sparse"
	"github.com/epcached/epcached/internal/witness"
)

// unwritable refuses a file that its sender could write through the very descriptor: it has to be
// opened for reading only, or be a memory file that is sealed.
func unwritable(f *os.File) error {
	fd := f.Fd()
	flags, err := unix.FcntlInt(fd, unix.F_GETFL, 0)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(fd), &st); err != nil {
		return err
	}
	switch {
	case flags&unix.O_PATH != 0 || flags&unix.O_ACCMODE == unix.O_WRONLY:
		return errors.New("not opened for reading")
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return errors.New("not a regular file")
	case flags&unix.O_ACCMODE == unix.O_RDONLY:
		return nil
	}
	const sealed = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	if seals, err := unix.FcntlInt(fd, unix.F_GET_SEALS, 0); err != nil || seals&sealed != sealed {
		return errors.New("opened for writing as well: open it for reading only, or seal it")
	}
	return nil
}

// stampSettled is the file's stamp after what was stored through mappings has been written back.
func stampSettled(f *os.File) (cas.Stamp, error) {
	if err := witness.Settle(f); err != nil {
		return cas.Stamp{}, &os.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
	}
	return cas.StampOf(f)
}

// stagePut copies so many bytes of what a client sent, through from, into a new file of ours.
// Without holes they are hashed on the way.
func stagePut(ctx context.Context, blobs *cas.Store, from io.ReaderAt, file *os.File, path string,
	size int64) (cas.Hashed, error) {
	if !sparse.Dense(file, size) {
		return cas.Hashed{}, sparse.Copy(from, file, path, size)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return cas.Hashed{}, err
	}
	return blobs.CopyAhead(ctx, from, path, size)
}
