package epmodel

import (
	"fmt"
	"io"
	"os"
)

// Source is a file of known size. *bytes.Reader and *io.SectionReader are Sources; [FileSource] makes one of a file.
type Source interface {
	io.ReaderAt
	Size() int64
}

// FileSource gives f with the size it has now. Reads go through the descriptor at explicit offsets: its position is neither
// used nor moved. f stays the caller's to close. Only regular files are taken: a FIFO or device has no size to trust and can
// block for ever.
func FileSource(f *os.File) (Source, error) {
	fi, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("size of %s: %w", f.Name(), err)
	}
	if !fi.Mode().IsRegular() {
		return nil, &FormatError{File: f.Name(), Offset: -1, Reason: "not a regular file (" + fi.Mode().Type().String() + ")"}
	}
	return io.NewSectionReader(f, 0, fi.Size()), nil
}

// Within gives a range of a source as a source of its own. A range that reaches beyond it ends with it.
func Within(s Source, r Range) Source { return io.NewSectionReader(s, r.Offset, r.Length) }
