package store

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/internal/bytesize"
)

// diskSpace is the size of a file system, and its free space for the daemon, in bytes.
type diskSpace struct{ size, free int64 }

func diskOf(path string) (diskSpace, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return diskSpace{}, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return diskSpace{size: int64(st.Blocks) * st.Bsize, free: int64(st.Bavail) * st.Bsize}, nil
}

// Fits fails if need bytes do not fit into free beside CopyReserve. The error names their use,
// what.
func Fits(what string, need, free int64) error { return fitsLeaving(what, need, free, CopyReserve) }

// fitsLeaving is Fits with another number of bytes that must stay free.
func fitsLeaving(what string, need, free, leave int64) error {
	if need > free-leave {
		return fmt.Errorf("%w: %s needs %s, and %s are free, of which %s are reserved for the "+
			"store's own files", unix.ENOSPC, what, bytesize.Text(need), bytesize.Text(free),
			bytesize.Text(leave))
	}
	return nil
}

// The space that a copy leaves free for the store's own files, and for packing on a full disk.
const (
	CopyReserve        = 16 << 20
	copyReserveOfSmall = 1 << 20
)

// FileOnDisk returns the identity of the file at a path, its number of links, and its bytes on disk
// in whole blocks.
func FileOnDisk(path string) (id FileID, names uint64, disk int64, ok bool) {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return FileID{}, 0, 0, false
	}
	return FileID{st.Dev, st.Ino}, uint64(st.Nlink), st.Blocks * 512, true
}

// FileID identifies a file.
type FileID struct{ dev, ino uint64 }

// idleIO gives the calling thread's reads the lowest I/O priority until undo is called.
func idleIO() (undo func()) {
	// IOPRIO_WHO_PROCESS, IOPRIO_CLASS_IDLE
	const thread, idle = 1, 3 << 13
	// Best effort: the priority is only a hint.
	set := func(class uintptr) { _, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, thread, 0, class) }
	set(idle)
	return func() { set(0) }
}
