// Package sparse copies files with their holes, so that a hole takes no space in the copy.
package sparse

import (
	"errors"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Copy makes the file at path, and its directory, from the first size bytes of a file. It clones
// them if the file system can, and otherwise reads them through from and keeps holes. It fails with
// io.ErrUnexpectedEOF if the file is shorter.
func Copy(from io.ReaderAt, file *os.File, path string, size int64) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	to, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(fill(from, file, to, size), to.Close())
}

func fill(from io.ReaderAt, file, to *os.File, size int64) error {
	if unix.IoctlFileClone(int(to.Fd()), int(file.Fd())) == nil {
		info, err := to.Stat()
		if err == nil && info.Size() != size {
			err = io.ErrUnexpectedEOF // or longer, so it changed
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
			return nil // it has grown after a hole, so the stamps will differ
		}
		n, err := io.Copy(io.NewOffsetWriter(to, begin),
			io.NewSectionReader(from, begin, end-begin))
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

// Dense reports whether the first size bytes have no hole that the file system reports.
func Dense(f *os.File, size int64) bool {
	begin, end, err := nextData(int(f.Fd()), 0, size)
	return err == nil && begin == 0 && end >= size
}

// nextData finds the next run of data from an offset. It moves the file's offset, which clients
// must not rely on; they use pread or mappings.
func nextData(fd int, at, size int64) (begin, end int64, err error) {
	begin, err = unix.Seek(fd, at, unix.SEEK_DATA)
	switch {
	case err == unix.ENXIO:
		return size, size, nil // only a hole is left
	case err == unix.EINVAL:
		return at, size, nil // a file system without SEEK_DATA
	case err != nil:
		return 0, 0, err
	}
	end, err = unix.Seek(fd, begin, unix.SEEK_HOLE)
	if err != nil {
		return 0, 0, err
	}
	return begin, min(end, size), nil
}
