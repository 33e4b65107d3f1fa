package main

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/config"
	"github.com/epcached/epcached/unixsock"
)

// home is a user's, with no daemon. What is started there leaves after a while by itself.
type home struct{ dir, state, socket string }

func newHome(t *testing.T) *home {
	dir := shortFolder(t)
	h := &home{dir: dir, state: filepath.Join(dir, "state", "epcached")}
	h.socket = filepath.Join(h.state, "epcached.sock")
	return h
}

func (h *home) run(t *testing.T, args ...string) (status int, stderr string) {
	t.Helper()
	env := []string{"HOME=" + h.dir, "XDG_STATE_HOME=" + filepath.Dir(h.state), "XDG_RUNTIME_DIR=", "XDG_CONFIG_HOME=" + filepath.Join(h.dir, "config")}
	status, _, stderr = runToEnd(t, env, append([]string{"--autostart", "--log-level", "debug"}, args...)...)
	return status, stderr
}

func (h *home) log(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(logPath(h.state))
	require.NoError(t, err)
	return string(text)
}

// The program returns when the daemon answers; that leaves when nobody uses it, and not while somebody does.
func TestAutostartedDaemonComesAndLeaves(t *testing.T) {
	h := newHome(t)
	c := h.begin(t, "300ms")
	reply, err := c.Status(limited(t))
	require.NoError(t, err)
	require.Equal(t, h.state, reply.GetStateDirectory())
	require.NotEqual(t, os.Getpid(), int(reply.GetPid()))
	info, err := os.Stat(h.state)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())

	// A connection that only is there counts.
	left := strings.Count(h.log(t), "leaving")
	require.Never(t, func() bool { return strings.Count(h.log(t), "leaving") > left }, stay, pollEvery)
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { return strings.Count(h.log(t), "idle for 300ms") > left }, patience, pollEvery)
	require.Eventually(t, func() bool { _, err := os.Lstat(h.socket); return os.IsNotExist(err) }, patience, pollEvery)

	status, errs := h.run(t, "--idle-exit", "300ms")
	require.Zero(t, status, errs)
	require.Eventually(t, func() bool { return strings.Count(h.log(t), "leaving") == left+2 }, patience, pollEvery)
}

// begin starts a daemon and connects. Again, where this process was held up for so long that the daemon has left meanwhile.
func (h *home) begin(t *testing.T, idle string, more ...string) *unixsock.Client {
	t.Helper()
	for range 20 {
		status, errs := h.run(t, append(more, "--idle-exit", idle)...)
		require.Zero(t, status, errs)
		c, err := unixsock.Dial(limited(t), h.socket)
		if err == nil {
			return c
		}
		require.Truef(t, errors.Is(err, unixsock.ErrNoDaemon) || errors.Is(err, unixsock.ErrConnectionLost), "%v", err)
	}
	t.Fatal("each of the daemons left at once")
	return nil
}

// stay is longer than the time after which the daemons of these tests leave.
const stay = 600 * time.Millisecond

func TestAutostartRefusals(t *testing.T) {
	t.Run("switched off", func(t *testing.T) {
		h := newHome(t)
		file := filepath.Join(h.dir, "config", "epcached", "epcached.toml")
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, []byte("autostart = false\n"), 0o600))
		status, errs := h.run(t)
		require.Equal(t, exitFailure, status)
		require.Contains(t, errs, "switched off in "+file)
		require.NoDirExists(t, h.state)
	})
	t.Run("state folder open to others", func(t *testing.T) {
		h := newHome(t)
		require.NoError(t, os.MkdirAll(h.state, 0o700))
		require.NoError(t, os.Chmod(h.state, 0o777))
		status, errs := h.run(t)
		require.Equal(t, exitFailure, status)
		require.Contains(t, errs, "may be changed by other users")
	})
	t.Run("another daemon has the state", func(t *testing.T) {
		s := newSite(t)
		s.start(t)
		require.NoError(t, os.Chmod(s.state, 0o700))
		status, _, errs := runToEnd(t, nil, "--autostart", "--state", s.state, "--socket", s.socket+"2")
		require.Equal(t, exitFailure, status)
		require.Contains(t, errs, "in use by process", "the starter passes on what the daemon says")
	})
}

// A daemon whose socket is gone is of use to nobody.
func TestDaemonWithoutItsSocketLeaves(t *testing.T) {
	h := newHome(t)
	status, errs := h.run(t, "--idle-exit", "20s") // far more than this process may be held up for; it looks every tenth of that
	require.Zero(t, status, errs)
	require.NoError(t, os.Remove(h.socket))
	require.Eventually(t, func() bool { return strings.Contains(h.log(t), "is not there any more") }, patience, pollEvery)
}

// That holds too where the socket goes before the daemon first looks for it: who starts one may be quick.
func TestASocketThatIsRemovedAtOnceIsMissed(t *testing.T) {
	in := serveInside(t, t.TempDir(), cache.Options{})
	socket := filepath.Join(shortFolder(t), "s")
	p := &process{idle: 10 * time.Second, ready: func() { require.NoError(t, os.Remove(socket)) }}
	var said strings.Builder
	nothing := func() func() { return func() {} }
	_, err := p.answer(limited(t), &config.Settings{Socket: socket}, in.cache, slog.New(slog.NewTextHandler(&said, nil)), nothing)
	require.NoError(t, err)
	require.Contains(t, said.String(), "is not there any more")
}

func TestLogIsBounded(t *testing.T) {
	dir := t.TempDir()
	out, err := openLog(dir)
	require.NoError(t, err)
	require.NoError(t, out.Truncate(maxLog))
	require.NoError(t, out.Close())
	out, err = openLog(dir)
	require.NoError(t, err)
	require.NoError(t, out.Close())
	require.NoFileExists(t, logPath(dir)+".1", "it is full, and not over")
	require.NoError(t, os.Truncate(logPath(dir), maxLog+1))
	out, err = openLog(dir)
	require.NoError(t, err)
	defer out.Close()
	info, err := out.Stat()
	require.NoError(t, err)
	require.Zero(t, info.Size())
	require.FileExists(t, logPath(dir)+".1")
}
