package crashfs

import (
	"errors"
	"io"
	"os"
	"syscall"
)

// content is a file's content: its size, and its bytes without holes, because a database has 16 MiB
// that are mostly holes.
type content struct {
	size int64
	runs []run // in order
}

type run struct {
	at    int64
	bytes []byte
}

// Linux's SEEK_DATA and SEEK_HOLE.
const seekData, seekHole = 3, 4

// contentOf reads a file. It moves the offset.
func contentOf(f *os.File) (c content, err error) {
	info, err := f.Stat()
	if err != nil {
		return content{}, err
	}
	c.size = info.Size()
	for at := int64(0); at < c.size; {
		// only a hole up to the end
		if at, err = f.Seek(at, seekData); errors.Is(err, syscall.ENXIO) {
			return c, nil
		} else if err != nil {
			return content{}, err
		}
		end, err := f.Seek(at, seekHole)
		if err != nil {
			return content{}, err
		}
		r := run{at, make([]byte, end-at)}
		n, err := f.ReadAt(r.bytes, at)
		if err != nil && err != io.EOF { // it was truncated just now
			return content{}, err
		}
		r.bytes = r.bytes[:n]
		c.runs = append(c.runs, r)
		at = end
	}
	return c, nil
}

// flat returns all bytes, with those of the holes.
func (c content) flat() []byte {
	b := make([]byte, c.size)
	for _, r := range c.runs {
		copy(b[r.at:], r.bytes)
	}
	return b
}

// write makes a file with this content.
func (c content) write(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = f.Truncate(c.size)
	for _, r := range c.runs {
		if err == nil {
			_, err = f.WriteAt(r.bytes, r.at)
		}
	}
	return errors.Join(err, f.Close())
}
