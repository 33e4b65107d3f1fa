package identity

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// pathOf gives the path that leads to an open file, if there is one: a file may be unlinked, renamed meanwhile, or
// of another mount namespace, where the same spelling means something else here.
func pathOf(f *os.File) (string, error) {
	path, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
	if err != nil {
		return "", err
	}
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("%q is no path", path)
	}
	var opened, named unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &opened); err != nil {
		return "", &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if err := unix.Lstat(path, &named); err != nil {
		return "", &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if opened.Dev != named.Dev || opened.Ino != named.Ino {
		return "", fmt.Errorf("%q is another file", path)
	}
	return path, nil
}

// openKept opens a file by a remembered path. Anything may be there by now: a link, which is not
// followed, or a pipe, which must not block. own: the path was remembered for a request of this
// user, the daemon's; then the file has to be this user's or root's, or one that all may read.
// Otherwise it has to be one that all may read, and not on a file system that another user serves.
func openKept(path string, uid uint32, own bool) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	var st unix.Stat_t
	var on unix.Statfs_t
	if err = unix.SetNonblock(fd, false); err == nil { // or Go's runtime tries to poll it
		err = unix.Fstat(fd, &st)
	}
	if err == nil {
		err = unix.Fstatfs(fd, &on)
	}
	switch {
	case err != nil:
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		err = errors.New("not a regular file")
	case own && (st.Uid == uid || st.Uid == 0):
		return os.NewFile(uintptr(fd), path), nil
	case st.Mode&0o004 == 0:
		err = fmt.Errorf("it belongs to user %d: %w", st.Uid, ErrPrivate)
	case on.Type == unix.FUSE_SUPER_MAGIC:
		err = fmt.Errorf("it is on FUSE: %w", ErrUnanswered)
	default:
		return os.NewFile(uintptr(fd), path), nil
	}
	_ = unix.Close(fd) // opened for reading only: nothing can be lost
	return nil, &os.PathError{Op: "open", Path: path, Err: err}
}

// Duplicate returns another descriptor of the open file.
func Duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, &os.PathError{Op: "dup", Path: f.Name(), Err: err}
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
