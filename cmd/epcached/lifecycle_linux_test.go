package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/internal/flock"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestSecondDaemonOnTheSameStore(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	first := s.start(t)
	second := &site{state: s.state, socket: s.socket + "2"}
	status, _, errs := runToEnd(t, nil, "--state", second.state, "--socket", second.socket)
	require.Equal(t, exitFailure, status)
	require.Contains(t, errs, fmt.Sprintf("in use by process %d", first.pid()))
	require.Contains(t, errs, s.state)
	require.NoFileExists(t, second.socket)
	first.status()

	first.kill()
	second.start(t).status() // the lock went with its holder
}

func TestSecondDaemonOnTheSameSocket(t *testing.T) {
	s := newSite(t)
	first := s.start(t)
	status, _, errs := runToEnd(t, nil, "--state", s.state+"2", "--socket", s.socket)
	require.Equal(t, exitFailure, status)
	require.Contains(t, errs, s.socket)
	require.Contains(t, errs, unixsock.ErrInUse.Error())
	require.EqualValues(t, first.pid(), first.status().Pid, "the first one goes on")
	removeAll(t, s.state+"2")
}

// The owner of a store removes it as any other directory, also after the daemon was killed.
func TestStoreThatNoDaemonHasIsRemovedByItsOwner(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*epcached){"stopped": (*epcached).stop,
		"killed": (*epcached).kill} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t, runtimeDir(t, openVINO))
			d := s.start(t)
			c := d.dial()
			model := writeModel(t, t.TempDir(), 1)
			get(t, c, model)
			get(t, c, model)
			end(d)
			rm := exec.Command("rm", "-rf", s.state)
			if os.Geteuid() == 0 { // root may do everything, so the store becomes another user's
				const nobody = 65534
				require.NoError(t,
					filepath.WalkDir(filepath.Dir(s.state),
						func(path string, _ os.DirEntry, err error) error {
							return errors.Join(err, os.Lchown(path, nobody, nobody))
						}))
				rm.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody,
					Gid: nobody}}
			}
			out, err := rm.CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.NoDirExists(t, s.state)
		})
	}
}

func TestStaleSocketIsReplaced(t *testing.T) {
	s := newSite(t)
	s.start(t).kill()
	info, err := os.Lstat(s.socket)
	require.NoError(t, err, "a daemon that was killed leaves its socket")
	require.Equal(t, os.ModeSocket, info.Mode().Type())
	d := s.start(t)
	require.EqualValues(t, d.pid(), d.status().Pid)
	d.stop()
	require.NoFileExists(t, s.socket)
}

func TestNonSocketAtTheSocketPathIsKept(t *testing.T) {
	s := newSite(t)
	require.NoError(t, os.WriteFile(s.socket, []byte("precious"), 0o600))
	status, _, errs := runToEnd(t, nil, "--state", s.state, "--socket", s.socket)
	require.Equal(t, exitFailure, status)
	require.Contains(t, errs, s.socket)
	text, err := os.ReadFile(s.socket)
	require.NoError(t, err)
	require.Equal(t, "precious", string(text))
}

func TestStateDirectoryThatIsAFileIsRefused(t *testing.T) {
	dir := shortDir(t)
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	status, _, errs := runToEnd(t, nil, "--state", file, "--socket", filepath.Join(dir, "s"))
	require.Equal(t, exitFailure, status)
	require.Contains(t, errs, file)
	require.NoFileExists(t, filepath.Join(dir, "s"))
}

// A lock that is no file is named, with the way to continue.
func TestALockThatIsAFIFO(t *testing.T) {
	dir := shortDir(t)
	state := filepath.Join(dir, "state")
	require.NoError(t, os.Mkdir(state, 0o711))
	require.NoError(t, syscall.Mkfifo(filepath.Join(state, "lock"), 0o600))
	status, _, errs := runToEnd(t, nil, "--state", state, "--socket", filepath.Join(dir, "s"))
	require.Equal(t, exitFailure, status)
	require.Contains(t, errs, filepath.Join(state, "lock")+" is not a regular file")
	require.Contains(t, errs, "\nepcached: hint: remove it: rm ")
}

// Root would write through a link that another user puts into the state directory: it starts on
// none that another user owns or may write to.
func TestRootRefusesAStateDirectoryThatAnotherUserCouldChange(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root has files of another user")
	}
	const other = 65534
	link := func(name string) func(t *testing.T, state, victim string) {
		return func(t *testing.T, state, victim string) {
			require.NoError(t, os.Symlink(victim, filepath.Join(state, name)))
		}
	}
	for name, c := range map[string]struct {
		prepare func(t *testing.T, state, victim string)
		at, why string
	}{
		"owned by another": {func(t *testing.T, state, victim string) {
			link("lock")(t, state, victim)
			require.NoError(t, os.Chown(state, other, other))
		}, "", "belongs to uid 65534"},
		"writable by others": {func(t *testing.T, state, victim string) {
			link("lock")(t, state, victim)
			require.NoError(t, os.Chmod(state, 0o777))
		}, "", "may be written by other users (mode 0777)"},
		"a link for a file":      {link("lock"), "lock", "is a symbolic link"},
		"a link for a directory": {link("staging"), "staging", "is a symbolic link"},
		"a directory of another": {func(t *testing.T, state, _ string) {
			require.NoError(t, os.Mkdir(filepath.Join(state, "views"), 0o711))
			require.NoError(t, os.Chown(filepath.Join(state, "views"), other, other))
		}, "views", "belongs to uid 65534"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			state, victim := filepath.Join(dir, "state"), filepath.Join(dir, "victim")
			require.NoError(t, os.Mkdir(state, 0o711))
			require.NoError(t, os.WriteFile(victim, []byte("precious"), 0o644))
			c.prepare(t, state, victim)
			status, _, errs := runToEnd(t, nil, "--state", state, "--socket",
				filepath.Join(dir, "s"))
			require.Equal(t, exitFailure, status)
			require.Contains(t, errs, filepath.Join(state, c.at)+" "+c.why)
			require.Contains(t, errs, "\nepcached: hint: ")
			text, err := os.ReadFile(victim)
			require.NoError(t, err)
			require.Equal(t, "precious", string(text))
			require.NoFileExists(t, filepath.Join(state, "README"), "nothing was written")
		})
	}
}

// A user who owns a directory above, or a link to it, can put another directory in place of root's
// while the daemon runs.
func TestRootRefusesAStateDirectoryBelowAnotherUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root has files of another user")
	}
	const other = 65534
	for name, prepare := range map[string]func(t *testing.T, dir, theirs string) (state string){
		"directory": func(_ *testing.T, _, theirs string) string { return theirs + "/a/state" },
		"link": func(t *testing.T, dir, theirs string) string {
			require.NoError(t, os.Symlink(dir, filepath.Join(theirs, "link")))
			return theirs + "/link/state"
		},
		"link to a link": func(t *testing.T, dir, theirs string) string {
			require.NoError(t, os.Symlink(dir, filepath.Join(theirs, "link")))
			require.NoError(t, os.Symlink(theirs+"/link", filepath.Join(dir, "way")))
			return filepath.Join(dir, "way", "state")
		},
		"writable": func(t *testing.T, _, theirs string) string {
			require.NoError(t, os.Chown(theirs, 0, 0))
			require.NoError(t, os.Chmod(theirs, 0o777))
			return theirs + "/state"
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			theirs := filepath.Join(dir, "theirs")
			require.NoError(t, os.Mkdir(theirs, 0o755))
			require.NoError(t, os.Chown(theirs, other, other))
			state := prepare(t, dir, theirs)
			status, _, errs := runToEnd(t, nil, "--state", state, "--socket",
				filepath.Join(dir, "s"))
			require.Equal(t, exitFailure, status)
			require.Contains(t, errs, "another user can replace "+state+": "+theirs)
			require.Contains(t, errs, "\nepcached: hint: ")
			require.NoDirExists(t, state)
		})
	}
}

// A store that was restored, or that another user could once write to, may have links. The daemon
// never enters one: it starts and leaves it alone, or names it and does not start.
func TestNoLinkBelowTheStateDirectoryIsFollowed(t *testing.T) {
	t.Parallel()
	sites := map[string]func(testing.TB, ...string) *site{"this user": newSite}
	if os.Geteuid() == 0 {
		sites["another user"] = ofAnotherUser
	}
	id, blob := strings.Repeat("ab", 12), strings.Repeat("ab", 32)
	for user, make := range sites {
		for link, starts := range map[string]bool{
			"views/NAME": true, "views/shared/" + id: true, "recipes/NAME": true,
			"manifests/NAME": true, "objects/NAME": true, "quarantine/NAME": true,
			"staging/NAME": true, "NAME": true, "staging/x": true, "s": true,
			"recipes/ab": false, "manifests/ab": false, "objects/ab": false,
			"manifests/incoming": false, "objects/incoming": false, "recipes/incoming": false,
			"views/shared": false, "views/uid-7": false, "unpacked": false,
			"unpacked/objects": false, "unpacked/objects/ab": false,
			"staging": false, "quarantine": false, "views": false, "objects": false,
			"manifests": false, "recipes": false,
		} {
			t.Run(user+", "+link, func(t *testing.T) {
				t.Parallel()
				s := make(t)
				victim := filepath.Join(filepath.Dir(s.state), "victim")
				path := filepath.Join(s.state, link)
				for _, name := range []string{blob, id + "/" + id + "/x", "ab/" + blob, "x/y"} {
					file := filepath.Join(victim, name)
					require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
					require.NoError(t, os.WriteFile(file, []byte("precious"), 0o644))
				}
				for i := range 70 {
					file := filepath.Join(victim, fmt.Sprint(i))
					require.NoError(t, os.WriteFile(file, nil, 0o644))
				}
				require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o711))
				require.NoError(t, os.MkdirAll(filepath.Join(s.state, "manifests"), 0o700))
				if filepath.Base(link) == "manifests" {
					require.NoError(t, os.Remove(path))
				}
				require.NoError(t, os.Symlink(victim, path))
				if user != "this user" {
					out, err := exec.Command("chown", "-hR", otherUID, victim,
						s.state).CombinedOutput()
					require.NoError(t, err, "%s", out)
				}
				before := treeOf(t, victim)
				d := s.launch(t)
				if c, err := d.tryDial(); err == nil {
					_, err = unixsock.Ask[wire.CheckReply](limited(t), c, &wire.Check{}, nil)
					require.NoError(t, err)
					require.True(t, starts)
					d.stop()
				} else {
					d.wait()
					require.False(t, starts, "%s", d.log)
					require.Contains(t, d.log.String(), path+" is a symbolic link")
				}
				require.Equal(t, before, treeOf(t, victim))
				if !strings.HasPrefix(link, "staging/") { // where the store empties all
					_, err := os.Lstat(path)
					require.NoError(t, err)
				}
			})
		}
	}
}

// treeOf lists all below a directory, with modes and times of change.
func treeOf(t *testing.T, dir string) (all []string) {
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		require.NoError(t, err)
		info, err := e.Info()
		require.NoError(t, err)
		all = append(all, fmt.Sprint(path, info.Mode(), info.Size(), info.ModTime()))
		return nil
	}))
	return all
}

// A lock of another user on the store's lock file would keep the daemon from starting.
func TestOtherUsersCannotLockTheStore(t *testing.T) {
	s := newSite(t)
	require.NoError(t, os.Mkdir(s.state, 0o711))
	require.NoError(t,
		os.WriteFile(filepath.Join(s.state, "lock"), []byte("process 4194304\n"), 0o644))
	d := s.start(t)
	info, err := os.Stat(filepath.Join(s.state, "lock"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())
	text, err := os.ReadFile(filepath.Join(s.state, "lock"))
	require.NoError(t, err)
	require.Equal(t, []string{"process", strconv.Itoa(d.pid())}, strings.Fields(string(text)))
}

// Without runtimes, and without one that works, the daemon serves what it can and says what is
// missing.
func TestWithoutRuntime(t *testing.T) {
	s := newSite(t)
	s.runtimes = []string{filepath.Join(t.TempDir(), "gone")}
	d := s.start(t)
	_, err := tryGet(t, d.dial(), writeModel(t, t.TempDir(), 1))
	require.ErrorIs(t, err, unixsock.ErrUnavailable)
	require.ErrorContains(t, err, s.runtimes[0])

	plain := newSite(t).start(t)
	_, err = tryGet(t, plain.dial(), writeModel(t, t.TempDir(), 1))
	require.ErrorIs(t, err, unixsock.ErrUnavailable)
	var e *unixsock.Error
	require.ErrorAs(t, err, &e)
	require.Contains(t, e.Hint, "--runtime")
}

func TestStopLetsRequestsFinish(t *testing.T) {
	t.Parallel()
	d := stoppingSite(t).start(t)
	dir := t.TempDir()
	c := d.dial()
	get(t, c, writeModel(t, dir, 2)) // so that the next worker is the compile's
	a := d.asker(writeStopping(t, dir, 1))
	a.begin()
	a.until("phase compiling")
	resume := d.freeze()
	require.NoError(t, d.cmd.Process.Signal(syscall.SIGTERM))
	require.Eventually(t, func() bool { return strings.Contains(d.log.String(), "stopping") },
		patience, pollEvery)
	require.Eventually(t, func() bool {
		conn, err := net.Dial("unix", d.socket)
		if err == nil {
			conn.Close()
		}
		return err != nil
	}, patience, pollEvery, "nobody new is let in")
	require.True(t, d.running(), "a request is under way")
	resume()
	got := a.got()
	require.Empty(t, got.Error)
	require.Equal(t, "compiled", got.Outcome)
	d.wait()
	require.NoError(t, d.err)
	require.NoFileExists(t, d.socket)

	again := d.site.start(t)
	require.Equal(t, "hit", get(t, again.dial(), filepath.Join(dir, "model1.onnx"), onMissFail).
		Outcome, "what was finished is kept")
}

// A client that stops the daemon hears when the process has ended, and no sooner.
func TestStopByAClientLetsRequestsFinish(t *testing.T) {
	t.Parallel()
	d := stoppingSite(t).start(t)
	dir := t.TempDir()
	c := d.dial()
	get(t, c, writeModel(t, dir, 2)) // so that the next worker is the compile's
	a := d.asker(writeStopping(t, dir, 1))
	a.begin()
	a.until("phase compiling")
	resume := d.freeze()
	stopped := make(chan error, 1)
	go func() { stopped <- c.Stop(limited(t)) }()
	require.Eventually(t, func() bool { return strings.Contains(d.log.String(), "stopping") },
		patience, pollEvery)
	select {
	case err := <-stopped:
		require.Fail(t, "a request is under way", "%v", err)
	default:
	}
	resume()
	got := a.got()
	require.Empty(t, got.Error)
	require.Equal(t, "compiled", got.Outcome)
	require.NoError(t, <-stopped)
	lock, err := os.Open(filepath.Join(d.state, "lock"))
	require.NoError(t, err)
	defer lock.Close()
	free, err := flock.TryLock(lock)
	require.NoError(t, err)
	require.True(t, free, "another daemon may have the store")
	d.wait()
	require.NoError(t, d.err)
	require.NoFileExists(t, d.socket)
}

// systemd may end all processes of a service at once. A compile that was ended so is not begun
// again while the daemon stops, and counts as no failure of its model.
func TestStopEndsNoCompileTwice(t *testing.T) {
	t.Parallel()
	d := stoppingSite(t).start(t)
	dir := t.TempDir()
	get(t, d.dial(), writeModel(t, dir, 2))
	a := d.asker(writeStopping(t, dir, 1))
	a.begin()
	a.until("phase compiling")
	d.freeze()
	workers := slices.DeleteFunc(workersOf(d.pid()), func(pid int) bool { return !stopped(pid) })
	require.Len(t, workers, 1)
	require.NoError(t, d.cmd.Process.Signal(syscall.SIGTERM))
	require.Eventually(t, func() bool { return strings.Contains(d.log.String(), "stopping") },
		patience, pollEvery)
	require.NoError(t, syscall.Kill(workers[0], syscall.SIGKILL))
	require.Contains(t, a.got().Error, "the daemon is stopping")
	d.wait()
	require.NoError(t, d.err)
	require.NotContains(t, d.log.String(), "its compile is retried once")
	require.Empty(t, d.site.start(t).failures())
}

// A client that does nothing does not hold up the end.
func TestStopWithIdleClients(t *testing.T) {
	d := newSite(t).start(t)
	c := d.dial()
	silent, err := net.Dial("unix", d.socket) // has not even said hello
	require.NoError(t, err)
	defer silent.Close()
	begin := time.Now()
	d.stop()
	require.Less(t, time.Since(begin), stopGrace)
	_, err = unixsock.Ask[wire.ListReply](limited(t), c, &wire.List{}, nil)
	require.ErrorIs(t, err, unixsock.ErrConnectionLost)
}

// A daemon under systemd gets its socket, reports when it is ready and when it stops, and that it
// is alive.
func TestUnderSystemd(t *testing.T) {
	s := newSite(t)
	dir := filepath.Dir(s.socket)
	l, err := net.ListenUnix("unix",
		&net.UnixAddr{Name: filepath.Join(dir, "activated"), Net: "unix"})
	require.NoError(t, err)
	defer l.Close()
	passed, err := l.File()
	require.NoError(t, err)
	defer passed.Close()
	told, err := net.ListenUnixgram("unixgram",
		&net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	require.NoError(t, err)
	defer told.Close()
	// the kernel buffers ten, and a sender of more blocks: systemd reads at once
	words := make(chan string, 1000)
	go func() {
		for buffer := make([]byte, 4096); ; {
			n, err := told.Read(buffer)
			if err != nil {
				return // the test is over
			}
			words <- string(buffer[:n])
		}
	}()
	said := func(want string) {
		t.Helper()
		for late := time.After(patience); ; {
			select {
			case word := <-words:
				if word == want {
					return
				}
			case <-late:
				require.Fail(t, "it does not say "+want)
			}
		}
	}
	// LISTEN_PID is the daemon's own number, which only its parent at exec knows.
	s.under = []string{"sh", "-c",
		`LISTEN_PID=$$ LISTEN_FDS=1 WATCHDOG_PID=$$ WATCHDOG_USEC=200000 exec "$@"`, "sh"}
	s.environment = []string{"NOTIFY_SOCKET=" + filepath.Join(dir, "notify")}
	d := &epcached{TB: t, site: s, cmd: s.command(t), log: &syncBuffer{}, done: make(chan struct{})}
	d.cmd.ExtraFiles = []*os.File{passed}
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	d.run(t)
	said("READY=1")
	said("WATCHDOG=1")
	require.NoFileExists(t, s.socket)
	c, err := unixsock.Dial(limited(t), filepath.Join(dir, "activated"))
	require.NoError(t, err)
	defer c.Close()
	reply, err := unixsock.Ask[wire.StatusReply](limited(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
	require.EqualValues(t, d.pid(), reply.Pid)
	require.Equal(t, filepath.Join(dir, "activated"), reply.Socket)
	require.Equal(t, "socket", reply.StartedBy)
	d.stop()
	said("STOPPING=1")
	require.FileExists(t, filepath.Join(dir, "activated"),
		"the socket is systemd's: the next start finds it")
}

// A wrong worker program is reported at the start, not to the first client that requests a model.
func TestWorkerThatIsNotThere(t *testing.T) {
	s := newSite(t)
	s.config = "worker = \"/no/such/epcached-ort\"\n"
	out, err := s.command(t).CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Contains(t, string(out), "/no/such/epcached-ort")
}
