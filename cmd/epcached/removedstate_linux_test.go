package main

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcached/internal/logs"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// begunAgain waits until the daemon has begun again so often.
func (d *epcached) begunAgain(times int) {
	d.Helper()
	require.Eventually(d,
		func() bool { return strings.Count(d.log.String(), "msg=ready") == 1+times }, patience,
		pollEvery)
	require.True(d, d.running())
}

// The state directory of a running daemon is removed, or replaced by another: the daemon recreates
// it, says so, and goes on.
func TestRemovedStateDirectoryIsRecreated(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	model := writeModel(t, t.TempDir(), 1)
	require.Equal(t, "compiled", get(t, d.dial(), model).Outcome)
	for i, remove := range []func() error{
		func() error { return os.RemoveAll(d.state) },
		func() error { return os.Rename(d.state, d.state+".away") },
	} {
		require.NoError(t, remove())
		a, err := tryGet(t, d.dial(), model)
		require.NoError(t, err, "whoever asks meanwhile is answered")
		require.Contains(t, []string{"compiled", "waited"}, a.Outcome)
		d.begunAgain(i + 1)
		c := d.dial()
		outcome := get(t, c, model).Outcome
		require.Contains(t, []string{"compiled", "hit"}, outcome,
			"what was compiled meanwhile may be kept already")
		require.Equal(t, "hit", get(t, c, model).Outcome)
		reply, err := unixsock.Ask[wire.DoctorReply](limited(t), c, &wire.Doctor{}, nil)
		require.NoError(t, err)
		said := ""
		for _, one := range reply.GetAdvice() {
			if one.GetSubject() == "state" {
				said = one.GetSeverity() + ": " + one.GetText()
			}
		}
		require.Regexp(t, "^warning: .* was deleted while the daemon ran", said)
	}
	require.Contains(t, d.log.String(), "the state directory or a part of it was removed")
}

// The socket that systemd passed is passed once.
func TestASocketOfSystemdOutlivesTheStateDirectory(t *testing.T) {
	s := newSite(t)
	path := filepath.Join(filepath.Dir(s.socket), "activated")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	defer l.Close()
	passed, err := l.File()
	require.NoError(t, err)
	defer passed.Close()
	s.under = []string{"sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"`, "sh"}
	d := &epcached{TB: t, site: s, cmd: s.command(t), log: &syncBuffer{}, done: make(chan struct{})}
	d.cmd.ExtraFiles = []*os.File{passed}
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	d.run(t)
	for i := range 2 {
		c, err := unixsock.Dial(limited(t), path)
		require.NoError(t, err)
		reply, err := unixsock.Ask[wire.StatusReply](limited(t), c, &wire.Status{}, nil)
		require.NoError(t, err)
		require.EqualValues(t, d.pid(), reply.GetPid())
		require.NoError(t, os.RemoveAll(d.state))
		// it may begin again before it has answered
		_, _ = unixsock.Ask[wire.DoctorReply](limited(t), c, &wire.Doctor{}, nil)
		_ = c.Close() // likewise
		d.begunAgain(i + 1)
	}
	d.stop()
}

// A daemon that a client started has its log in that directory, which is closed to others.
func TestAutostartedDaemonRecreatesDirectoryAndLog(t *testing.T) {
	t.Parallel()
	h := newHome(t)
	h.socket = filepath.Join(h.dir, "s")
	c := h.begin(t, "5s", "--socket", h.socket)
	before, err := unixsock.Ask[wire.StatusReply](limited(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
	require.NoError(t, os.RemoveAll(h.state))
	_, _ = unixsock.Ask[wire.DoctorReply](limited(t), c, &wire.Doctor{}, nil) // as above
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(logs.Path(h.state))
		return err == nil && strings.Contains(string(text), "msg=ready")
	}, patience, pollEvery)
	info, err := os.Stat(h.state)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
	c, err = unixsock.Dial(limited(t), h.socket)
	require.NoError(t, err)
	after, err := unixsock.Ask[wire.StatusReply](limited(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
	require.Equal(t, before.GetPid(), after.GetPid())
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { return strings.Contains(h.log(t), "idle for 5s") },
		patience, pollEvery)
}
