package unixsock

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/internal/slowfile"
)

// checkFD reports whether a descriptor that a client sent may be read: a regular file (a sealed or
// plain memory file is one), opened for reading. O_PATH descriptors are refused first, because a
// privileged daemon that reopened one could read files that the sender may not. The error matches
// ErrBadRequest. O_NONBLOCK is cleared, because Go's runtime polls such files when they become an
// [os.File], and a file system of another user may never answer that, which would stop the whole
// process. slow reports that the file system may never answer.
func checkFD(fd int) (slow bool, err error) {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return slow, descriptorRefusal("cannot be inspected: %v", err)
	}
	if flags&unix.O_PATH != 0 {
		return slow, descriptorRefusal("was opened with O_PATH, not for reading")
	}
	st, slow, err := slowfile.Stat(fd)
	if err != nil {
		return slow, descriptorRefusal("cannot be inspected: %v", err)
	}
	if kind := kindOf(uint32(st.Mode)); kind != "" {
		return slow, descriptorRefusal("is %s, not a regular file", kind)
	}
	if flags&unix.O_ACCMODE == unix.O_WRONLY {
		return slow, descriptorRefusal("was opened for writing only, not for reading")
	}
	// It has no effect on a regular file, but Go's runtime would try to poll it.
	if flags&unix.O_NONBLOCK != 0 {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags&^unix.O_NONBLOCK); err != nil {
			return slow, descriptorRefusal("cannot be made blocking: %v", err)
		}
	}
	return slow, nil
}

func kindOf(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return ""
	case unix.S_IFDIR:
		return "a directory"
	case unix.S_IFIFO:
		return "a pipe or FIFO"
	case unix.S_IFSOCK:
		return "a socket"
	case unix.S_IFCHR:
		return "a character device"
	case unix.S_IFBLK:
		return "a block device"
	}
	return "a file of unknown type" // epoll, timers and similar
}

// peerOf asks the kernel for the process at the other end, as of connect: a process that has
// changed its uid since keeps the one that it connected with.
func peerOf(conn *net.UnixConn) (Peer, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return Peer{}, fmt.Errorf("peer: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err == nil {
		err = credErr
	}
	if err != nil {
		return Peer{}, fmt.Errorf("peer credentials: %w", err)
	}
	return Peer{UID: cred.Uid, GID: cred.Gid, PID: cred.Pid}, nil
}

// tryAgain reports whether an error of accept is temporary: the process or the machine lacks
// descriptors or memory, or the client disconnected while it waited.
func tryAgain(err error) bool {
	return isOneOf(err, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM,
		syscall.ECONNABORTED, syscall.EINTR)
}

// notConnected reports whether an error of connect may be temporary, because a daemon is starting,
// or is busy accepting.
func notConnected(err error) bool {
	return isOneOf(err, syscall.ENOENT, syscall.ECONNREFUSED, syscall.EAGAIN)
}

func isOneOf(err error, errnos ...error) bool {
	return slices.ContainsFunc(errnos, func(errno error) bool { return errors.Is(err, errno) })
}
