package workspace

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/sparse"
	"github.com/epcached/epcached/store"
)

// OpenAgain opens an open file again, for reading only, if the daemon may. It does not wait for a
// lease that another process holds on the file.
func OpenAgain(f *os.File) (*os.File, error) {
	const flags = unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY
	path := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	again, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open again", Path: f.Name(), Err: err}
	}
	return again, nil
}

// CopyPrivate copies a client's file to a new file of ours, through the descriptor alone. Where the
// file system can, the bytes are cloned.
func CopyPrivate(from *os.File, path string) error {
	info, err := from.Stat()
	if err != nil {
		return err
	}
	err = sparse.Copy(from, from, path, info.Size())
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return nil // it changed meanwhile, as the copy's proof will say
	}
	return err
}

// Room fails if a private copy of the files does not fit into the directory's file system with
// something to spare. It counts blocks, because holes cost nothing.
func Room(folder string, files []*os.File) error {
	var need int64
	for _, f := range files {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			return err
		}
		need += st.Blocks * 512
	}
	free, err := cas.FreeBytes(folder)
	if err != nil {
		return err
	}
	return store.Fits("a copy of the model", need, free)
}
