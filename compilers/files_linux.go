package compilers

import (
	"os"
	"syscall"
)

// linkCount tells how many names a file has.
func linkCount(info os.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink)
	}
	return 1
}

// openPlain opens a file for reading without following a link, and without waiting for somebody to write into a FIFO.
func openPlain(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
}

// ownerOf gives the user and the group that a file belongs to.
func ownerOf(info os.FileInfo) (uid, gid uint32, known bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, false
	}
	return st.Uid, st.Gid, true
}
