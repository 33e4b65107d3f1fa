package dedupe

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// Source is a blob whose bytes do not change while it is used: a File, a
// *bytes.Reader, or an Assembled blob. ReadAt is called from several
// goroutines.
//
// Files are read in windows and not mapped: a mapping of a file that a failing
// disk cannot read, or that somebody cut, kills the process or needs
// SetPanicOnFault in every goroutine, and its pages count as the daemon's memory.
type Source interface {
	io.ReaderAt
	Size() int64
}

// ReadFull fills p from off. The end before that is io.ErrUnexpectedEOF: a
// source has the size that it states.
func ReadFull(r io.ReaderAt, p []byte, off int64) error {
	n, err := r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("read at offset %d: %w", off+int64(n), err)
}

// File is an open file as a Source. It takes its size when it is made; store files do not change.
type File struct {
	file *os.File
	size int64
}

// NewFile returns f as a Source, which closes f when it is closed. It takes f over, also where it
// fails.
func NewFile(f *os.File) (*File, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &File{f, info.Size()}, nil
}

// ReadAt is io.ReaderAt.
func (f *File) ReadAt(p []byte, off int64) (int, error) { return f.file.ReadAt(p, off) }

// Size returns the length of the file in bytes.
func (f *File) Size() int64 { return f.size }

// Close closes the file.
func (f *File) Close() error { return f.file.Close() }
