package unixsock

import (
	"context"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func shortDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "us")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

func TestListenModes(t *testing.T) {
	for _, mode := range []fs.FileMode{0o600, 0o660, 0o666} {
		path := filepath.Join(shortDir(t), "a", "b", "s")
		l, err := Listen(path, mode)
		require.NoError(t, err)
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, fs.ModeSocket|mode, info.Mode())
		dir, err := os.Stat(filepath.Dir(path))
		require.NoError(t, err)
		want := fs.FileMode(0o700)
		if os.Geteuid() == 0 {
			want = 0o755
		}
		require.Equal(t, want, dir.Mode().Perm())
		require.NoError(t, l.Close())
		require.NoFileExists(t, path)
	}
}

func TestStaleSocketIsReplaced(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	require.NoError(t, err)
	dead.SetUnlinkOnClose(false)
	require.NoError(t, dead.Close()) // as after SIGKILL
	l, err := Listen(path, 0o600)
	require.NoError(t, err)
	require.NoError(t, l.Close())
}

func TestSocketInUseIsLeftAlone(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	l, err := Listen(path, 0o600)
	require.NoError(t, err)
	defer l.Close()
	_, err = Listen(path, 0o600)
	require.ErrorIs(t, err, ErrInUse)
	conn, err := net.Dial("unix", path)
	require.NoError(t, err, "the first still listens")
	require.NoError(t, conn.Close())
}

// A daemon that is stopped accepts nothing, and its queue fills up. It is there all the same.
func TestFullQueueIsInUse(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	require.NoError(t, unix.Listen(fd, 0))
	conn, err := net.Dial("unix", path)
	require.NoError(t, err)
	defer conn.Close()
	_, err = Listen(path, 0o600)
	require.ErrorIs(t, err, ErrInUse)
}

func TestNonSocketIsNeverRemoved(t *testing.T) {
	dir := shortDir(t)
	live := filepath.Join(dir, "live")
	l, err := Listen(live, 0o600)
	require.NoError(t, err)
	defer l.Close()
	makers := map[string]func(path string) error{
		"file": func(path string) error {
			return os.WriteFile(path, []byte("precious"), 0o600)
		},
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"link":      func(path string) error { return os.Symlink(live, path) },
		"FIFO":      func(path string) error { return unix.Mkfifo(path, 0o600) },
	}
	for name, make := range makers {
		path := filepath.Join(dir, name)
		require.NoError(t, make(path))
		before, err := os.Lstat(path)
		require.NoError(t, err)
		_, err = Listen(path, 0o600)
		require.ErrorContains(t, err, "another file has this path", name)
		after, err := os.Lstat(path)
		require.NoError(t, err)
		require.True(t, os.SameFile(before, after))
		require.NoFileExists(t, path+".lock", "nothing is written beside it")
	}
}

// A killed daemon leaves a link to its socket, which may be in a directory that vanished meanwhile.
func TestALinkToNoDaemonIsReplaced(t *testing.T) {
	dir := shortDir(t)
	dead := filepath.Join(dir, "dead")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Bind(fd, &unix.SockaddrUnix{Name: dead}))
	require.NoError(t, unix.Close(fd))
	for _, target := range []string{dead, filepath.Join(dir, "missing")} {
		path := filepath.Join(dir, "s")
		require.NoError(t, os.Symlink(target, path))
		l, err := Listen(path, 0o600)
		require.NoError(t, err)
		info, err := os.Lstat(path)
		require.NoError(t, err)
		require.Equal(t, os.ModeSocket, info.Mode().Type())
		require.NoError(t, l.Close())
	}
	_, err = os.Lstat(dead)
	require.NoError(t, err, "the link was replaced, not its target")
}

func TestListenPathTooLong(t *testing.T) {
	_, err := Listen("/tmp/"+strings.Repeat("x", 120), 0o600)
	require.ErrorContains(t, err, "a socket's may have 107")
}

func TestCloseRemovesOnlyItsOwnSocket(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	l, err := Listen(path, 0o600)
	require.NoError(t, err)
	require.NoError(t, os.Remove(path))
	next, err := Listen(path, 0o600)
	require.NoError(t, err)
	defer next.Close()
	require.NoError(t, l.Close())
	require.FileExists(t, path)
}

func TestDialWithoutDaemon(t *testing.T) {
	dir := shortDir(t)
	synctest.Test(t, func(t *testing.T) { // where time passes only while all goroutines wait
		start := time.Now()
		_, err := Dialer{}.Dial(t.Context(), filepath.Join(dir, "own"),
			filepath.Join(dir, "system"))
		require.ErrorIs(t, err, ErrNoDaemon)
		require.ErrorContains(t, err, "own: no such file")
		require.ErrorContains(t, err, "system: no such file")
		require.Zero(t, time.Since(start))
	})
}

func TestDialPathThatIsTooLong(t *testing.T) {
	long := "/" + strings.Repeat("x", maxSocketPath)
	_, err := Dialer{}.Dial(t.Context(), long)
	require.ErrorIs(t, err, ErrNoDaemon)
	require.EqualError(t, err, "no daemon answers at "+long+
		": the path has 108 bytes, more than a socket's path may have")
}

func TestDialTakesTheFirstThatListens(t *testing.T) {
	s := serve(t, &standIn{}, limits{})
	c, err := Dialer{}.Dial(background(t), filepath.Join(shortDir(t), "none"), s.path)
	require.NoError(t, err)
	require.NoError(t, c.Close())
}

// Under sudo, HOME may be that of another user, and the system's daemon is asked all the same.
func TestDialPassesASocketThatIsDenied(t *testing.T) {
	s := serve(t, &standIn{}, limits{})
	require.NoError(t, os.Chmod(filepath.Dir(s.path), 0o755))
	require.NoError(t, os.Chmod(s.path, 0o666))
	closed := filepath.Join(shortDir(t), "closed")
	require.NoError(t, os.Mkdir(closed, 0))
	require.NoError(t, os.Chmod(filepath.Dir(closed), 0o755))
	denied, none := filepath.Join(closed, "s"), filepath.Join(shortDir(t), "none")
	asAnotherUser(t)
	c, err := Dialer{}.Dial(background(t), denied, s.path)
	require.NoError(t, err)
	require.NoError(t, c.Close())
	_, err = Dialer{}.Dial(background(t), denied, none)
	require.ErrorIs(t, err, fs.ErrPermission)
	require.NotErrorIs(t, err, ErrNoDaemon, "nothing is started for a directory of another user")
}

// asAnotherUser takes root's rights from this test's thread until the test ends.
func asAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		return // no rights that go beyond those of the files
	}
	runtime.LockOSThread()
	set := func(real, effective uintptr) {
		_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, real, effective, 0)
		require.Zero(t, errno)
	}
	set(65534, 65534)
	t.Cleanup(func() {
		set(0, 0)
		runtime.UnlockOSThread()
	})
}

func TestDialWaitsForAStartingDaemon(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	s := &Server{Backend: &standIn{}}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		time.Sleep(100 * time.Millisecond)
		l, err := Listen(path, 0o600)
		if err != nil {
			ended <- err
			return
		}
		ended <- s.Serve(ctx, l)
	}()
	c, err := Dialer{Wait: patience}.Dial(background(t), path)
	require.NoError(t, err)
	require.NoError(t, c.Close())
	cancel()
	require.NoError(t, <-ended)
}

// The socket that a killed daemon leaves behind takes connections, and drops them.
func TestDialWaitsForADaemonThatWasKilled(t *testing.T) {
	dropping := func(t *testing.T, times int) (path string, next chan net.Listener) {
		path, next = filepath.Join(shortDir(t), "s"), make(chan net.Listener, 1)
		l, err := Listen(path, 0o600)
		require.NoError(t, err)
		go func() {
			for range times {
				if conn, err := l.Accept(); err == nil {
					_ = conn.Close() // what the test is about
				}
			}
			next <- l
		}()
		return path, next
	}
	t.Run("patient", func(t *testing.T) {
		path, next := dropping(t, 3)
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- (&Server{Backend: &standIn{}}).Serve(ctx, <-next) }()
		c, err := Dialer{Wait: patience}.Dial(background(t), path)
		require.NoError(t, err)
		require.NoError(t, c.Close())
		cancel()
		require.NoError(t, <-ended)
	})
	t.Run("not waiting", func(t *testing.T) {
		path, next := dropping(t, 1)
		_, err := Dial(background(t), path)
		require.ErrorIs(t, err, ErrConnectionLost)
		require.NoError(t, (<-next).Close())
	})
}

func TestDialStoppedDaemon(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	l, err := Listen(path, 0o600) // which no goroutine serves
	require.NoError(t, err)
	defer l.Close()
	_, err = Dialer{HelloTimeout: 50 * time.Millisecond}.Dial(background(t), path)
	require.ErrorIs(t, err, ErrNoDaemon)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err = Dial(ctx, path)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestDefaultSocket(t *testing.T) {
	const inState = "/home/a/.local/state/epcached/epcached.sock"
	t.Setenv("XDG_RUNTIME_DIR", "/run/user/7")
	t.Setenv("XDG_STATE_HOME", "relative, so not valid")
	t.Setenv("HOME", "/home/a")
	t.Setenv(SocketVariable, "")
	require.Equal(t, []string{"/run/user/7/epcached/epcached.sock", inState, SystemSocket},
		DefaultSocket())
	t.Setenv("XDG_RUNTIME_DIR", "")
	require.Equal(t, []string{inState, SystemSocket}, DefaultSocket())
	t.Setenv("XDG_STATE_HOME", "/home/a/state")
	require.Equal(t, []string{"/home/a/state/epcached/epcached.sock", SystemSocket},
		DefaultSocket())
	t.Setenv(SocketVariable, "/elsewhere")
	require.Equal(t, []string{"/elsewhere"}, DefaultSocket())
}

// With sudo HOME is another user's, and so may be the daemon there.
func TestForeignDirectoriesAreNotOurs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can give a directory away")
	}
	dir := shortDir(t)
	t.Setenv("XDG_RUNTIME_DIR", dir)
	t.Setenv("XDG_STATE_HOME", "/nowhere")
	t.Setenv(SocketVariable, "")
	ours := filepath.Join(dir, "epcached")
	require.NoError(t, MakePrivateDir(ours))
	require.Contains(t, DefaultSocket(), filepath.Join(ours, "epcached.sock"))
	require.NoError(t, os.Chmod(ours, 0o770))
	require.ErrorContains(t, MakePrivateDir(ours), "other users may write")
	require.NoError(t, os.Chown(ours, 4711, 4711))
	require.NotContains(t, DefaultSocket(), filepath.Join(ours, "epcached.sock"))
	require.ErrorContains(t, MakePrivateDir(ours), "owned by user 4711")
	require.ErrorContains(t, MakePrivateDir(filepath.Join(ours, "state", "epcached")),
		"so no socket of user")
	require.NoDirExists(t, filepath.Join(ours, "state"))
}
