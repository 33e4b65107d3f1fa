package unixsock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxSocketPath is the longest path in sockaddr_un, without the final zero.
const maxSocketPath = 107

// ErrInUse says that a daemon answers at a socket, or is starting there.
var ErrInUse = errors.New("another daemon answers there")

// DefaultSocketMode is 0666 for root's socket, which every user may connect to, and 0600 for a
// user's own.
func DefaultSocketMode() os.FileMode {
	if os.Geteuid() == 0 {
		return 0o666
	}
	return 0o600
}

// Listen creates the socket at path with exactly that mode, and its missing directories (0755 for
// root, 0700 for a user). It replaces a socket file, or a link to one, only if no process answers
// behind it (ErrInUse). Another kind of file at that path is an error, and is not removed. Closing
// the listener removes the socket file.
func Listen(path string, mode os.FileMode) (net.Listener, error) {
	l, err := listen(path, mode)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return l, nil
}

func listen(path string, mode os.FileMode) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("the path has %d bytes, a socket's may have %d", len(path),
			maxSocketPath)
	}
	dirMode := os.FileMode(0o700)
	if os.Geteuid() == 0 {
		dirMode = 0o755
	}
	if err := os.MkdirAll(filepath.Dir(path), dirMode); err != nil {
		return nil, err
	}
	if info, err := os.Lstat(path); err == nil && !replaceable(path, info) {
		return nil, noSocket(info) // before the lock file is written beside a foreign file
	}
	unlock, err := lockSocket(path)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := removeStale(path); err != nil {
		return nil, err
	}
	return bind(path, mode)
}

// lockSocket prevents two daemons that start at the same time from removing each other's socket.
// The lock file is never removed, because then a third daemon could lock a new one.
func lockSocket(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(2 * time.Second)
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil // closing releases the lock
		}
		if (err != unix.EWOULDBLOCK && err != unix.EINTR) || time.Now().After(deadline) {
			if err == unix.EWOULDBLOCK {
				err = ErrInUse
			}
			return nil, errors.Join(err, f.Close())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// replaceable reports whether the file is a socket, or a link that leads nowhere or to a socket
// that no process has. A killed daemon leaves such a link in its state directory.
func replaceable(path string, info fs.FileInfo) bool {
	if info.Mode().Type() != fs.ModeSymlink {
		return info.Mode().Type() == fs.ModeSocket
	}
	info, err := os.Stat(path)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	return info.Mode().Type() == fs.ModeSocket && errors.Is(answers(path), syscall.ECONNREFUSED)
}

// answers returns nil if a process accepts connections at the socket. Only ECONNREFUSED proves that
// no process has it. A full queue, a timeout or missing permissions do not.
func answers(path string) error {
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return err
	}
	return conn.Close()
}

func noSocket(info fs.FileInfo) error {
	return fmt.Errorf("another file has this path (%s), and is not replaced", info.Mode())
}

func removeStale(path string) error {
	switch info, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !replaceable(path, info):
		return noSocket(info)
	case info.Mode().Type() == fs.ModeSocket:
		if err := answers(path); !errors.Is(err, syscall.ECONNREFUSED) {
			return errors.Join(ErrInUse, err)
		}
	}
	return os.Remove(path)
}

// bind sets the mode on the socket before it has a name, so that it is never too permissive. It
// sets it again after that, because of the umask.
func bind(path string, mode os.FileMode) (net.Listener, error) {
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		controlErr := raw.Control(func(fd uintptr) {
			err = unix.Fchmod(int(fd), uint32(mode.Perm()))
		})
		return errors.Join(controlErr, err)
	}}
	l, err := config.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	own := &listener{UnixListener: l.(*net.UnixListener), path: path}
	own.SetUnlinkOnClose(false)
	if err = os.Chmod(path, mode.Perm()); err == nil {
		own.info, err = os.Lstat(path)
	}
	if err != nil {
		return nil, errors.Join(err, own.Close())
	}
	return own, nil
}

// listener removes its socket file when it closes, unless another daemon has replaced it.
type listener struct {
	*net.UnixListener
	path string
	info os.FileInfo
}

// Close stops listening and removes the socket file.
func (l *listener) Close() error {
	var removeErr error
	if now, err := os.Lstat(l.path); err == nil && os.SameFile(now, l.info) {
		removeErr = os.Remove(l.path)
	}
	return errors.Join(l.UnixListener.Close(), removeErr)
}

// MakePrivateDir creates a directory for this user alone, with its parents, or refuses an existing
// one that other users may change: clients load files that the daemon at the socket sends, and the
// directory's owner could run another daemon there. It creates no directory inside another user's,
// as it would with sudo, which keeps HOME.
func MakePrivateDir(dir string) error {
	switch info, err := os.Stat(dir); {
	case err == nil:
		return checkPrivate(dir, info)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	for above := filepath.Dir(dir); ; above = filepath.Dir(above) {
		info, err := os.Stat(above)
		if errors.Is(err, fs.ErrNotExist) && above != filepath.Dir(above) {
			continue
		}
		if err != nil {
			return err
		}
		if owner := ownerOf(info); owner != os.Geteuid() && owner != 0 {
			return fmt.Errorf("%s is owned by user %d, so no socket of user %d is made in "+
				"it", above, owner, os.Geteuid())
		}
		break
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	info, err := os.Stat(dir) // another process may have created it
	if err != nil {
		return err
	}
	return checkPrivate(dir, info)
}

func checkPrivate(dir string, info fs.FileInfo) error {
	switch owner := ownerOf(info); {
	case !info.IsDir():
		return fmt.Errorf("%s is not a directory", dir)
	case owner != os.Geteuid():
		return fmt.Errorf("%s is owned by user %d, and this is user %d", dir, owner, os.Geteuid())
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("other users may write to %s: its mode is %04o", dir, info.Mode().Perm())
	}
	return nil
}

func ownerOf(info fs.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Uid) }
