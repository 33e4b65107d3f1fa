package cas

import "io"

// WriteStep is how much of a large file one call writes. The file system takes
// memory for a call as a whole if it can: finding a MiB in one piece takes
// longer than copying it, when the memory is full of cached files, and it is more
// than stays in a core's cache.
const WriteStep = 256 << 10

// WriteInSteps writes p to w at off, WriteStep bytes at a time, and returns how
// many were written.
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
