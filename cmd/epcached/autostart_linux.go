package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cmd/epcached/internal/logs"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/config"
	"github.com/epcached/epcached/unixsock"
)

// A client that finds no daemon runs `epcached --autostart --socket PATH`, and holds the lock
// PATH.start meanwhile, so that only one client does it. This process checks whether autostart is
// enabled, starts the daemon in the background, waits until that is ready or fails, and ends, so
// that the application is left without a child process.

// startLimit bounds the wait for a daemon that is neither ready nor fails.
const startLimit = 30 * time.Second

const isReady = "ready"

// addOwnRuntime registers the environment that this program was installed into, if it has ONNX
// Runtime, so that epcachectl needs no other; EPs may be installed later. Applications name their
// own libraries in any case.
func addOwnRuntime(s *config.Settings) {
	self, err := os.Executable()
	if err == nil {
		self, err = filepath.EvalSymlinks(self)
	}
	prefix := filepath.Dir(filepath.Dir(self))
	if err != nil || filepath.Base(filepath.Dir(self)) != "bin" {
		return
	}
	if _, err := compilers.FindORT(prefix); err != nil {
		return // no runtime there, which is no error
	}
	s.Runtimes = append(s.Runtimes, config.Runtime{Directory: prefix})
}

func autostartOff(s *config.Settings) error {
	if !s.Autostart {
		return fmt.Errorf("autostart is disabled in %s", s.File)
	}
	system, err := config.Load(config.DefaultFile)
	// Errors are ignored, because the file belongs to the system's daemon.
	if err == nil && !system.Autostart {
		return fmt.Errorf("autostart is disabled in %s", config.DefaultFile)
	}
	return nil
}

func (c *call) launch(ctx context.Context, s *config.Settings) error {
	if err := autostartOff(s); err != nil {
		return err
	}
	answers, err := c.start(s)
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) {
		err = fmt.Errorf("%w; set XDG_STATE_HOME to a directory of this user", err)
	}
	if err != nil {
		return fmt.Errorf("autostart: %w", err)
	}
	defer answers.Close() // opened for reading
	return awaitAnswer(ctx, answers, s)
}

// start starts the background process, and returns the pipe on which it reports.
func (c *call) start(s *config.Settings) (answers *os.File, err error) {
	err = cmp.Or(unixsock.MakePrivateDir(s.State), unixsock.MakePrivateDir(filepath.Dir(s.Socket)))
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	log, err := logs.Open(s.State)
	if err != nil {
		return nil, err
	}
	defer log.Close() // this process has not written to it
	answers, starter, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	if err = errors.Join(detach(self, c.arguments(s), log, starter), starter.Close()); err != nil {
		return nil, errors.Join(err, answers.Close())
	}
	return answers, nil
}

func awaitAnswer(ctx context.Context, answers *os.File, s *config.Settings) error {
	// SetReadDeadline fails only if the pipe is closed.
	defer context.AfterFunc(ctx, func() { _ = answers.SetReadDeadline(time.Unix(1, 0)) })()
	if err := answers.SetReadDeadline(time.Now().Add(startLimit)); err != nil {
		return fmt.Errorf("autostart: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(answers, 4096))
	switch said := strings.TrimSpace(string(text)); {
	case said == isReady:
		return nil
	case said != "":
		return errors.New(said)
	case err != nil:
		return fmt.Errorf("the started daemon does not answer: %w", err)
	}
	return fmt.Errorf("the started daemon ended at once: see %s", logs.Path(s.State))
}

// arguments returns the arguments of the background process. Paths are absolute, because it runs in
// another directory.
func (c *call) arguments(s *config.Settings) []string {
	args := []string{"--autostart", "--detached", "--state", s.State, "--socket", s.Socket}
	if c.config != "" {
		// Fails only without a working directory.
		if abs, err := filepath.Abs(c.config); err == nil {
			args = append(args, "--config", abs)
		}
	}
	if c.idleExit != "" {
		args = append(args, "--idle-exit", c.idleExit)
	}
	if c.logLevel != "" {
		args = append(args, "--log-level", c.logLevel)
	}
	for _, rt := range s.Runtimes[:len(c.runtimes)] {
		args = append(args, "--runtime", rt.Directory)
	}
	return args
}

// environment returns the variables that the background process inherits: no secrets, and none that
// change how programs are loaded.
func environment() []string {
	kept := []string{"PATH", "HOME", "USER", "LOGNAME", "TZ", "LANG", "TMPDIR"}
	return slices.DeleteFunc(os.Environ(), func(one string) bool {
		name, _, _ := strings.Cut(one, "=")
		return !slices.Contains(kept, name) && !strings.HasPrefix(name, "LC_") &&
			!strings.HasPrefix(name, "XDG_")
	})
}

// detached runs the background process. It reports to the process that started it that it is ready,
// or its error.
func (p *process) detached(ctx context.Context, s *config.Settings, set *rules.Set) error {
	starter, err := starterPipe()
	if err != nil {
		return err
	}
	log := &logs.File{Path: logs.Path(s.State), Out: os.Stderr}
	p.stderr = log
	var link string
	p.ready = func() {
		link = linkSocket(s)
		_, _ = starter.WriteString(isReady) // best effort: the starter may have ended
		_ = starter.Close()
	}
	p.recreate = func() error {
		if err := unixsock.MakePrivateDir(s.State); err != nil {
			return err
		}
		return log.Begin() // the old file was removed with the directory
	}
	err = p.serve(ctx, s, set)
	if link != "" {
		_ = os.Remove(link) // best effort: without the socket it is useless
	}
	if err != nil {
		_, _ = starter.WriteString(err.Error()) // fails if it was ready before, which is harmless
		_ = starter.Close()
	}
	return err
}

// linkSocket links the socket into the state directory for clients without a runtime directory,
// such as cron jobs.
func linkSocket(s *config.Settings) string {
	link := filepath.Join(s.State, filepath.Base(s.Socket))
	info, err := os.Lstat(link)
	switch {
	case link == s.Socket:
		return ""
	case err == nil && info.Mode().Type()&(fs.ModeSymlink|fs.ModeSocket) == 0:
		return "" // not a link of epcached
	case err == nil:
		// left by an earlier daemon, because this one holds the state directory's lock
		_ = os.Remove(link)
	}
	if os.Symlink(s.Socket, link) != nil {
		return "" // such clients run without a daemon then
	}
	return link
}

// detach starts the program in a session of its own, with no open files but the log and the pipe on
// which it reports.
func detach(program string, args []string, log, answerPipe *os.File) error {
	cmd := exec.Command(program, args...)
	cmd.Env = environment()
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{answerPipe}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// Priorities and CPU affinity are inherited from the thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := resetLimits(); err != nil {
		return err
	}
	// The application's descriptors that its client could not close. Best effort: Linux before 5.11
	// lacks the call.
	_ = unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC)
	if err := cmd.Start(); err != nil {
		return err
	}
	return cmd.Process.Release()
}

// resetLimits resets the limits of the application that happened to start the daemon, because the
// daemon serves other applications as well. It fails if one is a hard limit that this user may not
// raise. Priorities are best effort: an ordinary user may not lower a niceness.
func resetLimits() error {
	usual := &unix.SchedAttr{Policy: unix.SCHED_NORMAL}
	if unix.SchedSetAttr(0, usual, 0) != nil {
		if left, err := unix.Getpriority(unix.PRIO_PROCESS, 0); err == nil {
			usual.Nice = int32(20 - left) // the system call returns 20 - nice
			_ = unix.SchedSetAttr(0, usual, 0)
		}
	}
	const thread = 1 // IOPRIO_WHO_PROCESS, which means a thread
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, thread, 0, 0)
	var all unix.CPUSet
	all.Fill()
	_ = unix.SchedSetaffinity(0, &all) // the kernel reduces them to those of the cgroup
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0)
	for _, h := range runtimes.HardLimits {
		_, binds := h.Bound()
		none := &unix.Rlimit{Cur: h.Least, Max: h.Least}
		if (binds || h.Least == unix.RLIM_INFINITY) && unix.Setrlimit(h.Resource, none) != nil {
			// Clients look for the first words, and do not refuse the next program because of it.
			return fmt.Errorf("the program that starts it has a hard limit on %s, which the "+
				"daemon would keep for all programs; start it from one without: epcached "+
				"--autostart", h.What)
		}
	}
	return nil
}

// starterPipe returns the pipe to the process that started this one. Workers do not inherit it.
func starterPipe() (*os.File, error) {
	const number = 3
	unix.CloseOnExec(number)
	unix.Umask(0o022) // because the application's umask may let other users write files
	if _, err := unix.FcntlInt(number, unix.F_GETFD, 0); err != nil {
		return nil, errors.New("--detached is only for the process that --autostart starts")
	}
	return os.NewFile(number, "starter"), nil
}
