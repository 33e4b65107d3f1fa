package main

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache"
	"github.com/epcached/epcached/cmd/epcached/internal/logs"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// home is a user's home directory, with no daemon. A daemon that is started there leaves by itself
// after a while.
type home struct {
	dir, state, socket string
	program            []string // that is to start the daemon; nil: none
}

func newHome(t *testing.T) *home {
	dir := shortDir(t)
	h := &home{dir: dir, state: filepath.Join(dir, "state", "epcached")}
	h.socket = filepath.Join(h.state, "epcached.sock")
	return h
}

func (h *home) run(t *testing.T, args ...string) (status int, stderr string) {
	t.Helper()
	env := []string{"HOME=" + h.dir, "XDG_STATE_HOME=" + filepath.Dir(h.state), "XDG_RUNTIME_DIR=",
		"XDG_CONFIG_HOME=" + filepath.Join(h.dir, "config")}
	status, _, stderr = runThrough(t, h.program, env,
		append([]string{"--autostart", "--log-level", "debug"}, args...)...)
	return status, stderr
}

func (h *home) log(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(logs.Path(h.state))
	require.NoError(t, err)
	return string(text)
}

// The program returns when the daemon answers. The daemon leaves when it has been idle, and not
// while it is in use.
func TestAutostartedDaemonComesAndLeaves(t *testing.T) {
	t.Parallel()
	h := newHome(t)
	c := h.begin(t, "300ms")
	reply, err := unixsock.Ask[wire.StatusReply](limited(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
	require.Equal(t, h.state, reply.GetStateDirectory())
	require.NotEqual(t, os.Getpid(), int(reply.GetPid()))
	require.Equal(t, "client", reply.GetStartedBy())
	info, err := os.Stat(h.state)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())

	// A connection that only is there counts.
	left := strings.Count(h.log(t), "leaving")
	require.Never(t, func() bool { return strings.Count(h.log(t), "leaving") > left }, stay,
		pollEvery)
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { return strings.Count(h.log(t), "idle for 300ms") > left },
		patience, pollEvery)
	require.Eventually(t, func() bool { _, err := os.Lstat(h.socket); return os.IsNotExist(err) },
		patience, pollEvery)

	status, errs := h.run(t, "--idle-exit", "300ms")
	require.Zero(t, status, errs)
	require.Eventually(t, func() bool { return strings.Count(h.log(t), "leaving") == left+2 },
		patience, pollEvery)
}

// begin starts a daemon and connects. Again, where this process was held up for so long that the
// daemon has left meanwhile.
func (h *home) begin(t *testing.T, idle string, more ...string) *unixsock.Client {
	t.Helper()
	for range 20 {
		status, errs := h.run(t, append(more, "--idle-exit", idle)...)
		require.Zero(t, status, errs)
		c, err := unixsock.Dial(limited(t), h.socket)
		if err == nil {
			return c
		}
		require.Truef(t, errors.Is(err, unixsock.ErrNoDaemon) ||
			errors.Is(err, unixsock.ErrConnectionLost), "%v", err)
	}
	t.Fatal("each of the daemons left at once")
	return nil
}

// The application that starts a daemon may be one of low priority, on one processor, or with little
// memory; the daemon is for all.
func TestAutostartedDaemonDropsInheritedLimits(t *testing.T) {
	h := newHome(t)
	done := make(chan *unixsock.Client, 1)
	const nice, oom, fileSize = 10, 500, 1 << 30
	go func() {
		defer close(done)
		// never unlocked: the thread with these limits ends with the goroutine
		runtime.LockOSThread()
		one := unix.CPUSet{}
		one.Set(firstProcessor(t))
		require.NoError(t, unix.SchedSetaffinity(0, &one))
		left, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
		require.NoError(t, err)
		low := &unix.SchedAttr{Policy: unix.SCHED_BATCH, Nice: int32(max(nice, 20-left))}
		require.NoError(t, unix.SchedSetAttr(0, low, 0))
		limits := `echo ` + strconv.Itoa(oom) + ` > /proc/$$/oom_score_adj; ulimit -S -f ` +
			strconv.Itoa(fileSize>>9) + `; exec "$0" "$@"`
		h.program = []string{"/bin/sh", "-c", limits}
		done <- h.begin(t, "1m")
	}()
	c := <-done
	require.NotNil(t, c)
	reply, err := unixsock.Ask[wire.StatusReply](limited(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
	pid := int(reply.GetPid())
	defer func() { require.NoError(t, unix.Kill(pid, unix.SIGTERM)) }()

	var all, own unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &own))
	require.NoError(t, unix.SchedGetaffinity(pid, &all))
	require.Equal(t, own.Count(), all.Count(), "processors")
	policy, err := unix.SchedGetAttr(pid, 0)
	require.NoError(t, err)
	require.EqualValues(t, unix.SCHED_NORMAL, policy.Policy)
	if os.Geteuid() == 0 { // with CAP_SYS_NICE
		require.EqualValues(t, 0, policy.Nice)
	}
	score, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "oom_score_adj"))
	require.NoError(t, err)
	require.Equal(t, "0\n", string(score))
	var limit unix.Rlimit
	require.NoError(t, unix.Prlimit(pid, unix.RLIMIT_FSIZE, nil, &limit))
	require.Equal(t, limit.Max, limit.Cur)
}

// A hard limit of the application that starts the daemon would bind all others. Root raises it, and
// for another user the reason names it.
func TestAutostartedDaemonHasNoHardLimits(t *testing.T) {
	t.Parallel()
	for what, limit := range map[string]string{"its address space (ulimit -v)": "-v 8000000",
		"its processor time (ulimit -t)":    "-t 1000",
		"the size of its files (ulimit -f)": "-f 1000000",
		"its open files (ulimit -n)":        "-n 16"} {
		program := []string{"/bin/sh", "-c", "ulimit " + limit + `; exec "$0" "$@"`}
		t.Run(limit, func(t *testing.T) {
			h := newHome(t)
			if os.Geteuid() == 0 {
				h.program = program
				status, errs := h.run(t, "--idle-exit", "300ms") // fails without CAP_SYS_RESOURCE
				require.True(t, status == 0 || strings.Contains(errs, what), errs)
				s := ofAnotherUser(t)
				h.dir = filepath.Dir(s.socket)
				h.state = filepath.Join(h.dir, "state", "epcached")
				program = append(s.under, program...)
			}
			h.program = program
			status, errs := h.run(t)
			require.Equal(t, exitFailure, status, errs)
			require.Contains(t, errs, "the program that starts it has a hard limit on "+what)
		})
	}
}

// The application's working directory may not exist any more.
func TestAutostartWithoutAWorkingDirectory(t *testing.T) {
	t.Parallel()
	h := newHome(t)
	h.program = []string{"/bin/sh", "-c", `mkdir "$HOME/gone" && cd "$HOME/gone" && ` +
		`rmdir "$HOME/gone" && exec "$0" "$@"`}
	require.NoError(t, h.begin(t, "1m").Stop(limited(t)))
}

// A user makes the configuration file while the daemon runs that a client has started.
func TestAutostartedDaemonNoticesANewConfiguration(t *testing.T) {
	t.Parallel()
	h := newHome(t)
	c := h.begin(t, "1m")
	defer func() { require.NoError(t, c.Stop(limited(t))) }()
	file := filepath.Join(h.dir, "config", "epcached", "epcached.toml")
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
	says := func(text, severity, words string) {
		t.Helper()
		replace(t, file, text)
		require.Eventually(t, func() bool {
			reply, err := unixsock.Ask[wire.DoctorReply](limited(t), c, &wire.Doctor{}, nil)
			require.NoError(t, err)
			return slices.ContainsFunc(reply.GetAdvice(), func(a *wire.Advice) bool {
				return a.GetSubject() == "configuration" && a.GetSeverity() == severity &&
					strings.Contains(a.GetText(), words)
			})
		}, patience, 10*pollEvery, "%s %s", severity, words)
	}
	says("nonsense = 1\n", "problem", file+":1:1: unknown field")
	says("jobs = 3\n", "warning", "takes effect after a restart: jobs")
	require.NoError(t, os.Remove(file))
	says("", "ok", "all of it is in effect")
}

func firstProcessor(t *testing.T) int {
	var own unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &own))
	for one := 0; ; one++ {
		if own.IsSet(one) {
			return one
		}
	}
}

// stay is longer than the time after which the daemons of these tests leave.
const stay = 600 * time.Millisecond

func TestAutostartRefusals(t *testing.T) {
	t.Parallel()
	t.Run("disabled", func(t *testing.T) {
		h := newHome(t)
		file := filepath.Join(h.dir, "config", "epcached", "epcached.toml")
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, []byte("autostart = false\n"), 0o600))
		status, errs := h.run(t)
		require.Equal(t, exitFailure, status)
		require.Contains(t, errs, "disabled in "+file)
		require.NoDirExists(t, h.state)
	})
	t.Run("state directory open to others", func(t *testing.T) {
		h := newHome(t)
		require.NoError(t, os.MkdirAll(h.state, 0o700))
		require.NoError(t, os.Chmod(h.state, 0o777))
		status, errs := h.run(t)
		require.Equal(t, exitFailure, status)
		require.Contains(t, errs, "other users may write")
	})
	t.Run("another daemon has the state", func(t *testing.T) {
		s := newSite(t)
		s.start(t)
		require.NoError(t, os.Chmod(s.state, 0o700))
		status, _, errs := runToEnd(t, nil, "--autostart", "--state", s.state, "--socket",
			s.socket+"2")
		require.Equal(t, exitFailure, status)
		require.Contains(t, errs, "in use by process", "the starter passes on what the daemon says")
	})
}

// A daemon leaves after its socket was removed, because no client can reach it.
func TestDaemonWithoutItsSocketLeaves(t *testing.T) {
	t.Parallel()
	h := newHome(t)
	// far more than this process may be held up for; it looks every tenth of that
	status, errs := h.run(t, "--idle-exit", "20s")
	require.Zero(t, status, errs)
	require.NoError(t, os.Remove(h.socket))
	require.Eventually(t,
		func() bool { return strings.Contains(h.log(t), "no longer exists") }, patience,
		pollEvery)
}

// That holds too if the socket is removed before the daemon first looks for it, right after its
// start.
func TestASocketThatIsRemovedAtOnceIsMissed(t *testing.T) {
	in := serveInside(t, t.TempDir(), cache.Options{})
	socket := filepath.Join(shortDir(t), "s")
	p := &process{idle: 10 * time.Second, ready: func() { require.NoError(t, os.Remove(socket)) }}
	var said strings.Builder
	nothing := func() func() { return func() {} }
	e := p.newEntrance(socket, slog.New(slog.NewTextHandler(&said, nil)))
	_, err := p.answer(limited(t), &config.Settings{Socket: socket}, in.cache, e, nothing)
	require.NoError(t, err)
	require.Contains(t, said.String(), "no longer exists")
}
