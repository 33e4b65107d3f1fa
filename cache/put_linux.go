package cache

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/witness"
)

// unwritable refuses a file that whoever sent it could write through the very descriptor: it has to be opened for
// reading only, or be a memory file that is sealed.
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

// stagePut copies so many bytes of what a client sent, through from, into a new file of ours; without holes they are hashed on the way.
func (c *Cache) stagePut(ctx context.Context, from io.ReaderAt, file *os.File, path string, size int64) (cas.Hashed, error) {
	if begin, end, err := nextData(int(file.Fd()), 0, size); err != nil || begin > 0 || end < size {
		return cas.Hashed{}, copyExactly(from, file, path, size)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return cas.Hashed{}, err
	}
	return c.cas.CopyAhead(ctx, from, path, size)
}

// copyExactly copies so many bytes into a new file of ours, or clones them. Holes stay holes. A file that is shorter is
// io.ErrUnexpectedEOF.
func copyExactly(from io.ReaderAt, file *os.File, path string, size int64) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	to, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(fillExactly(from, file, to, size), to.Close())
}

func fillExactly(from io.ReaderAt, file, to *os.File, size int64) error {
	if unix.IoctlFileClone(int(to.Fd()), int(file.Fd())) == nil {
		info, err := to.Stat()
		if err == nil && info.Size() != size {
			err = io.ErrUnexpectedEOF // or longer by now: it changed
		}
		return err
	}
	if err := to.Truncate(size); err != nil {
		return err
	}
	for at := int64(0); at < size; {
		begin, end, err := nextData(int(file.Fd()), at, size)
		if err != nil {
			return &os.PathError{Op: "seek", Path: file.Name(), Err: err}
		}
		if begin >= size {
			return nil // it has grown, behind a hole: the stamps will tell
		}
		n, err := io.Copy(io.NewOffsetWriter(to, begin), io.NewSectionReader(from, begin, end-begin))
		if err == nil && n < end-begin {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		at = end
	}
	return nil
}
