package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// patience bounds every wait of these tests: far more than anything takes on a busy machine, and no
// hang.
const patience = time.Minute

// site is where a daemon lives: its state and its socket, which outlast it.
type site struct {
	state, socket string
	runtimes      []string
	config        string   // text of the configuration file, may be empty
	under         []string // a command that runs the daemon, such as strace
	environment   []string
}

func newSite(t testing.TB, runtimes ...string) *site {
	dir := shortDir(t)
	return &site{state: filepath.Join(dir, "state"), socket: filepath.Join(dir, "s"),
		runtimes: runtimes, config: unmeasured}
}

// unmeasured keeps the daemon from loading source models after its answers, and from having a
// worker stand by: most tests look at its files and processes.
const unmeasured = "[policy]\nmeasure_gain = false\n"

// epcached is a running daemon.
type epcached struct {
	testing.TB
	*site
	cmd  *exec.Cmd
	log  *syncBuffer
	done chan struct{} // closed when it has ended
	err  error         // how; valid after done is closed
}

// syncBuffer is a buffer that a process writes and a test reads.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// command is the daemon's, not started.
func (s *site) command(t testing.TB, more ...string) *exec.Cmd {
	args := append(slices.Clone(s.under), filepath.Join(programs, "epcached"), "--state", s.state,
		"--socket", s.socket)
	for _, dir := range s.runtimes {
		args = append(args, "--runtime", dir)
	}
	if s.config != "" {
		path := filepath.Join(filepath.Dir(s.socket), "epcached.toml")
		require.NoError(t, os.WriteFile(path, []byte(s.config), 0o644))
		args = append(args, "--config", path)
	}
	args = append(args, more...)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), s.environment...)
	return cmd
}

// launch starts a daemon and does not wait for it. At the end of the test it is stopped, if it
// still runs, and what its store holds must then be sound.
func (s *site) launch(t testing.TB, more ...string) *epcached {
	t.Helper()
	d := &epcached{TB: t, site: s, cmd: s.command(t, more...), log: &syncBuffer{},
		done: make(chan struct{})}
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	d.run(t)
	return d
}

func (d *epcached) run(t testing.TB) {
	t.Helper()
	require.NoError(t, d.cmd.Start())
	go func() {
		d.err = d.cmd.Wait()
		close(d.done)
	}()
	t.Cleanup(func() {
		if d.running() {
			if !t.Failed() {
				d.requireSound()
			}
			d.stop()
		}
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", d.log)
		}
	})
}

// start starts a daemon and waits until it answers.
func (s *site) start(t testing.TB, more ...string) *epcached {
	t.Helper()
	d := s.launch(t, more...)
	d.dial().Close()
	return d
}

func (d *epcached) running() bool {
	select {
	case <-d.done:
		return false
	default:
		return true
	}
}

func (d *epcached) pid() int { return d.cmd.Process.Pid }

// stop ends the daemon as systemd would, and requires that it ends well.
func (d *epcached) stop() {
	d.Helper()
	require.NoError(d, d.cmd.Process.Signal(syscall.SIGTERM))
	d.wait()
	require.NoError(d, d.err, "exit status after SIGTERM")
}

// kill ends the daemon in the middle of whatever it does.
func (d *epcached) kill() {
	d.Helper()
	require.NoError(d, d.cmd.Process.Kill())
	d.wait()
}

func (d *epcached) wait() {
	d.Helper()
	select {
	case <-d.done:
	case <-time.After(patience):
		_ = d.cmd.Process.Kill() // the test has failed; its process must not stay
		<-d.done
		require.Fail(d, "the daemon does not end", "its log:\n%s", d.log)
	}
}

// dial connects; the connection closes with the test at the latest.
func (d *epcached) dial() *unixsock.Client {
	d.Helper()
	c, err := d.tryDial()
	require.NoError(d, err, "the daemon's log:\n%s", d.log)
	// the test may have closed it already, or killed the other end
	d.Cleanup(func() { _ = c.Close() })
	return c
}

func (d *epcached) tryDial() (*unixsock.Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	go func() {
		select {
		case <-d.done: // it will never answer
			cancel()
		case <-ctx.Done():
		}
	}()
	return unixsock.Dialer{Name: "test", Wait: patience}.Dial(ctx, d.socket)
}

// limited is a context for one request of a test.
func limited(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// requireSound has the daemon read every byte of its store.
func (d *epcached) requireSound() {
	d.Helper()
	c, err := d.tryDial()
	require.NoError(d, err)
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	reply, err := unixsock.Ask[wire.CheckReply](ctx, c, &wire.Check{Deep: true}, nil)
	require.NoError(d, err)
	for _, f := range reply.Findings {
		// A blob or view that nothing refers to any more waits for the next sweep.
		require.Contains(d, []string{"leftover", "stale view"}, f.Kind, "%v", f)
	}
}

func (d *epcached) list() []*wire.Build {
	d.Helper()
	c, err := d.tryDial()
	require.NoError(d, err)
	defer c.Close()
	builds, err := listAll(limited(d), c)
	require.NoError(d, err)
	return builds
}

func listAll(ctx context.Context, c *unixsock.Client) (all []*wire.Build, err error) {
	err = c.ListPages(ctx, &wire.List{}, nil, func(page []*wire.Build) error {
		all = append(all, page...)
		return nil
	})
	return all, err
}

func (d *epcached) status() *wire.StatusReply {
	d.Helper()
	c, err := d.tryDial()
	require.NoError(d, err)
	defer c.Close()
	reply, err := unixsock.Ask[wire.StatusReply](limited(d), c, &wire.Status{}, nil)
	require.NoError(d, err)
	return reply
}

// workersOf lists the workers that work for the process.
func workersOf(daemon int) []int {
	var found []int
	for _, keeper := range keepersOf(daemon) {
		found = append(found, childrenOf(keeper)...)
	}
	return found
}

// keepersOf lists the processes that look after a worker each. One is there before its worker, and
// after it.
func keepersOf(daemon int) []int { return childrenOf(daemon) }

// childrenOf lists the children of a process that run the worker program.
func childrenOf(parent int) []int {
	var found []int
	// only a malformed pattern fails
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", parent))
	for _, path := range tasks {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		for _, word := range strings.Fields(string(text)) {
			pid, err := strconv.Atoi(word)
			if err != nil {
				continue
			}
			// its name may be a thread's of the vendor
			program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
			if err == nil && filepath.Base(program) == "epcached-ort" {
				found = append(found, pid)
			}
		}
	}
	return found
}

// freeze waits for a worker that has stopped itself in the middle of its compile, as that of a
// stoppingSite does, and returns the function that lets it go on. A test could not reliably stop a
// small compile from outside before it is done.
func (d *epcached) freeze() (resume func()) {
	d.Helper()
	var pid int
	require.Eventually(d, func() bool {
		for _, worker := range workersOf(d.pid()) {
			if stopped(worker) {
				pid = worker
				return true
			}
		}
		return false
	}, patience, time.Millisecond, "no worker has stopped")
	// gone if its daemon was killed
	resume = sync.OnceFunc(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
	d.Cleanup(resume)
	return resume
}

// stopped reports whether a process is stopped by a signal.
func stopped(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false // it has ended
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	return strings.HasPrefix(rest, "T")
}

// pollEvery is how often a test looks whether something has happened.
const pollEvery = 10 * time.Millisecond

// entriesOf lists a directory of the state directory.
func entriesOf(t testing.TB, state string, name ...string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(append([]string{state}, name...)...))
	require.NoError(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
