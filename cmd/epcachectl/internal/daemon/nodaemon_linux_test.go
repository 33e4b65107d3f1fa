package daemon

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/unixsock"
)

func TestNoDaemonIsOneSentence(t *testing.T) {
	dir := t.TempDir()
	paths := []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
	_, err := unixsock.Dialer{}.Dial(t.Context(), paths...)
	err = noDaemon(paths, err)
	require.EqualError(t, err, "no daemon answers at "+paths[0]+" or "+paths[1]+
		": there is no such socket")
	require.Equal(t, exit.NoDaemon, exit.Code(err))
	require.Equal(t, []string{"start one with: epcached --runtime DIR, or name its socket with " +
		"--socket or EPCACHE_SOCKET"}, exit.Hints(err))
}

// One that is suspended, and one that was killed, are no daemon either, and not the same.
func TestDaemonThatDoesNotAnswer(t *testing.T) {
	dir, err := os.MkdirTemp("", "ectl") // short, for a socket
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	path := []string{filepath.Join(dir, "s")}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path[0], Net: "unix"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	_, err = unixsock.Dialer{HelloTimeout: time.Millisecond}.Dial(t.Context(), path...)
	silent := noDaemon(path, err)
	require.ErrorContains(t, silent,
		fmt.Sprintf("the daemon at %s, process %d, does not answer within", path[0], os.Getpid()))
	require.Equal(t, []string{"check its process, and its log, on the terminal where it was " +
		"started"},
		exit.Hints(silent))
	require.NoError(t, l.Close())
	_, err = unixsock.Dial(t.Context(), path[0])
	require.EqualError(t, noDaemon(path, err),
		"no daemon answers at "+path[0]+": its socket was left behind by a daemon that ended")
	file := filepath.Join(dir, "f")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err = unixsock.Dial(t.Context(), file)
	require.EqualError(t, noDaemon([]string{file}, err),
		"another file has the path of the socket "+file)
}

// A stopped daemon is named, with the place of its log, which depends on its user.
func TestADaemonThatIsStoppedIsNamed(t *testing.T) {
	dir, err := os.MkdirTemp("", "ectl") // short, for a socket
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	listener := exec.Command("python3", "-c", "import socket, sys, time; s = "+
		"socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print(flush=True); "+
		"time.sleep(60)", path)
	out, err := listener.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, listener.Start())
	defer func() { _ = listener.Process.Kill(); _ = listener.Wait() }() // which no stop outlives
	_, err = out.Read(make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, listener.Process.Signal(syscall.SIGSTOP))
	require.Eventually(t, func() bool { return stopped(listener.Process.Pid) }, 2*time.Minute,
		time.Millisecond)
	_, err = unixsock.Dialer{HelloTimeout: time.Millisecond}.Dial(t.Context(),
		filepath.Join(dir, "none"), path)
	err = noDaemon([]string{filepath.Join(dir, "none"), path}, err)
	require.ErrorContains(t, err,
		fmt.Sprintf("the daemon at %s, process %d, does not answer", path, listener.Process.Pid))
	require.ErrorContains(t, err, "it was stopped by a signal")
	require.Equal(t, []string{fmt.Sprintf("resume it: kill -CONT %d", listener.Process.Pid)},
		exit.Hints(err))
}

func TestWhereADaemonsLogIs(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	for _, name := range []string{unixsock.SocketVariable, "XDG_RUNTIME_DIR", "XDG_STATE_HOME"} {
		t.Setenv(name, "")
	}
	require.Equal(t, "its log: journalctl -u epcached", LogOf([]string{"/nowhere"}))
	own := unixsock.UserSockets()[0]
	require.NoError(t, os.MkdirAll(filepath.Dir(own), 0o700))
	require.NoError(t, os.WriteFile(own, nil, 0o600))
	require.Equal(t, "its log: journalctl --user -u epcached, or where it was started",
		LogOf([]string{"/nowhere", own}))
	log := filepath.Join(home, ".local", "state", "epcached", "epcached.log")
	require.NoError(t, os.WriteFile(log, nil, 0o600))
	require.Equal(t, "its log: "+log, LogOf([]string{own, "/run/epcached/epcached.sock"}))
}
