package cache

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/bytesize"
)

// openAgain opens an open file again, for reading only, if the daemon may. It does not wait for a
// lease that another process holds on the file.
func openAgain(f *os.File) (*os.File, error) {
	const flags = unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY
	path := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	again, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open again", Path: f.Name(), Err: err}
	}
	return again, nil
}

// copyPrivate copies a client's file to a new file of ours, through the descriptor alone. Where the file system can,
// the bytes are cloned.
func copyPrivate(from *os.File, path string) error {
	info, err := from.Stat()
	if err != nil {
		return err
	}
	err = copyExactly(from, from, path, info.Size())
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return nil // it changed meanwhile: whoever compares the copy with what was hashed will tell
	}
	return err
}

// nextData finds the next run of data from an offset. It moves the offset that the client shares, which nobody may
// rely on: clients use pread or mappings.
func nextData(fd int, at, size int64) (begin, end int64, err error) {
	begin, err = unix.Seek(fd, at, unix.SEEK_DATA)
	switch {
	case err == unix.ENXIO:
		return size, size, nil // only a hole is left
	case err == unix.EINVAL:
		return at, size, nil // a file system that knows of no holes
	case err != nil:
		return 0, 0, err
	}
	end, err = unix.Seek(fd, begin, unix.SEEK_HOLE)
	if err != nil {
		return 0, 0, err
	}
	return begin, min(end, size), nil
}

// room says whether a private copy of the files fits into the folder's file system with something to spare: by
// their blocks, for holes cost nothing.
func room(folder string, files []*os.File) error {
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
	return fits("a copy of the model", need, free)
}

// fits says that there is no room for what is named and takes so many bytes, if there is none.
func fits(what string, need, free int64) error { return fitsBeside(what, need, free, spare) }

// fitsBeside is fits where so much has to stay free.
func fitsBeside(what string, need, free, leave int64) error {
	if need > free-leave {
		return fmt.Errorf("%w: %s takes %s, and %s are free, of which %s stay for the store's own files", unix.ENOSPC, what, bytesize.Text(need), bytesize.Text(free), bytesize.Text(leave))
	}
	return nil
}

// What a copy leaves free: the store's own files have to fit as well. Where a disk is nearly full, what makes something smaller has to be possible still.
const (
	spare       = 16 << 20
	spareOfLess = 1 << 20
)

// fileOnDisk tells which file a path leads to, how many names it has, and what it takes on the disk in whole blocks.
func fileOnDisk(path string) (id fileID, names uint64, disk int64, ok bool) {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return fileID{}, 0, 0, false
	}
	return fileID{st.Dev, st.Ino}, uint64(st.Nlink), st.Blocks * 512, true
}
