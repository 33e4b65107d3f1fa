package cas

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// FreeBytes returns what an ordinary user may still write into the folder's
// file system.
func FreeBytes(folder string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(folder, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: folder, Err: err}
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}

// OwnedBy tells whether a file is the user's.
func OwnedBy(info os.FileInfo, uid uint32) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && st.Uid == uid
}
