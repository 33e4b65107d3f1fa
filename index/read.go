package index

import (
	"fmt"
	"io"
	"io/fs"

	"github.com/epcached/epcached/cas"
)

// readFile reads a whole file of at most limit bytes.
func readFile(fsys cas.FS, path string, limit int64) ([]byte, error) {
	f, err := fsys.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() // opened for reading
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, &DamageError{File: f.Name(),
			Reason: fmt.Sprintf("%s of %d bytes, not a file of at most %d",
				info.Mode().Type(), info.Size(), limit)}

	}
	b := make([]byte, info.Size())
	if n, err := fsys.ReadAt(f, b, 0); err != nil && (err != io.EOF || n < len(b)) {
		return nil, err
	}
	return b, nil
}

// remove removes a file, if it is there.
func remove(fsys cas.FS, path string) error {
	return cas.Ignore(fs.ErrNotExist, fsys.Remove(path))
}
