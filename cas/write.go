package cas

import (
	"errors"
	"io"
)

// WriteStep is how much of a large file one call writes. The file system takes memory for a call as
// a whole if it can: finding a MiB in one piece takes longer than copying it, when the memory is
// full of cached files, and it is more than stays in a core's cache.
const WriteStep = 256 << 10

// WriteInSteps writes p to w at off, WriteStep bytes at a time, and returns how many were written.
func WriteInSteps(w io.WriterAt, p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := w.WriteAt(p[done:min(done+WriteStep, len(p))], off+int64(done))
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// WriteFile makes a file with these bytes, and syncs it. After an error there is none.
func WriteFile(fsys FS, path string, b []byte) error {
	f, err := fsys.Create(path)
	if err != nil {
		return err
	}
	_, err = fsys.WriteAt(f, b, 0)
	if err == nil {
		err = fsys.Sync(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		err = errors.Join(err, fsys.Remove(path))
	}
	return err
}
