package dedupe

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/epcached/epcached/cas"
)

func readRecipe(fsys cas.FS, path string, d cas.Digest) (r *Recipe, stamp cas.Stamp, err error) {
	f, err := fsys.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, stamp, cas.ErrNotFound
	}
	if err != nil {
		return nil, stamp, err
	}
	defer f.Close() // only read from
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, stamp, err
	case !info.Mode().IsRegular():
		return nil, stamp, &FormatError{-1, "", "not a regular file"}
	}
	if stamp, err = cas.StampOf(f); err != nil { // before it is read: who changes it meanwhile changes its times
		return nil, stamp, err
	}
	b, err := readHead(fsys, f, info.Size())
	if err != nil {
		return nil, stamp, err
	}
	r, head, err := decodeRecipe(b, info.Size())
	if err != nil {
		return nil, stamp, err
	}
	if r.Frames != nil {
		r.Frames.file = &framedFile{fs: fsys, path: path, head: head, sum: [sumSize]byte(b[head-sumSize:])}
	}
	if r.Blob != d {
		return nil, stamp, &FormatError{headerSize, "blob", fmt.Sprintf("it is the recipe of %s", r.Blob)}
	}
	return r, stamp, nil
}

// readHead reads what stands before the frames of a recipe's file of so many
// bytes, at least its header.
func readHead(fsys cas.FS, f *os.File, size int64) ([]byte, error) {
	b := make([]byte, min(size, headerSize))
	if err := readAll(fsys, f, b); err != nil || len(b) < headerSize {
		return b, err
	}
	n := headerSize + int64(binary.LittleEndian.Uint32(b[12:])) + sumSize
	if n > min(size, headerSize+maxBody+sumSize) {
		return b, nil // refused when it is decoded
	}
	b = make([]byte, n)
	return b, readAll(fsys, f, b)
}

func readAll(fsys cas.FS, f *os.File, b []byte) error {
	n, err := fsys.ReadAt(f, b, 0)
	switch {
	case n == len(b):
		return nil
	case err == io.EOF:
		return &FormatError{int64(n), "length", fmt.Sprintf("the file ends, and had %d bytes", len(b))} // it was cut off meanwhile
	}
	return err
}
