//go:build linux && (amd64 || arm64)

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/workerproto"
)

// prepare limits this process, starts the worker from it, waits until the worker and its
// descendants have ended, and returns the exit status.
func prepare(preparation string) (status int, err error) {
	var p workerproto.Preparation
	if err := json.Unmarshal([]byte(preparation), &p); err != nil {
		return 0, fmt.Errorf("limits: %w", err)
	}
	var thread sync.WaitGroup
	thread.Go(func() { status, err = prepareThread(p) })
	thread.Wait()
	return status, err
}

// prepareThread prepares the thread that it is called on. Niceness and confinement belong to the
// thread; processes that it starts inherit them. It must not be the main thread, because signals to
// the process are checked against the main thread's Landlock domain, and a worker in the same
// domain could kill it.
func prepareThread(p workerproto.Preparation) (int, error) {
	model := noModel
	if p.Model {
		model = workerproto.ModelFD
	}
	runtime.LockOSThread() // never unlocked, because the worker is killed when the thread ends
	if err := limit(p); err != nil {
		return 0, err
	}
	if p.Confine != nil {
		if err := confine(p.Confine, model); err != nil {
			return 0, err
		}
	}
	return supervise(p, model)
}

func limit(p workerproto.Preparation) error {
	if err := setLimits(p); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	raiseNiceness(p.Nice)
	// The daemon's time slices are short for its requests: reset this thread's to the default.
	if attr, err := unix.SchedGetAttr(0, 0); err == nil {
		attr.Runtime = 0
		_ = unix.SchedSetAttr(0, attr, 0) // only durations depend on it
	}
	if p.Idle { // the lowest I/O priority, if the kernel supports priorities
		const ownProcess, idleClass = 1, 3 << 13 // IOPRIO_WHO_PROCESS, IOPRIO_CLASS_IDLE
		_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, ownProcess, 0, idleClass)
	}
	// The kernel kills this process first when memory runs out, because a compile can be retried,
	// while all users need the daemon. Best effort: the kernel may forbid it in containers.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("500"), 0)
	syscall.Umask(map[bool]int{false: 0o077, true: 0o007}[p.Group])
	return nil
}

// raiseNiceness sets the niceness of this thread unless it is higher already, because lowering it
// needs a capability. With autogroups the kernel first shares the processor between sessions, so it
// also sets the niceness of the worker's session; otherwise each worker would get as much processor
// time as the daemon. Best effort: only the duration depends on it.
func raiseNiceness(nice int) {
	if left, err := unix.Getpriority(unix.PRIO_PROCESS, 0); err == nil {
		nice = max(nice, 20-left) // the system call returns 20 - nice
	}
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, nice)
	_ = os.WriteFile("/proc/self/autogroup", []byte(strconv.Itoa(nice)), 0)
}

// noModel is the descriptor of a worker without an open model.
const noModel = -1

// confine restricts this thread, and all that it starts, to a worker's needs. It may read model.
func confine(c *workerproto.Confinement, model int) error {
	if err := dropCapabilities(); err != nil {
		return err
	}
	if err := landlock(c, model); err != nil {
		return err
	}
	return filterCalls(c, model != noModel || c.Reads)
}

// keptCapabilities let root's worker use files of other users that Landlock permits.
const keptCapabilities = 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_DAC_READ_SEARCH

// dropCapabilities drops all other capabilities for the programs that root's thread starts. Those
// of other users have none.
func dropCapabilities() error {
	if os.Geteuid() != 0 {
		return nil
	}
	for c := uintptr(0); c < 64; c++ {
		if keptCapabilities&(1<<c) != 0 {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			return nil // no more capabilities exist
		}
		// an unprivileged root, as in some containers, has none to drop
		if err != nil && !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("capability %d: %w", c, err)
		}
	}
	return nil
}

// coreLimit is too small for a core dump, which would contain the user's model. It is not 0,
// because with 0 the kernel still starts the programs that handle dumps.
const coreLimit = 1

func setLimits(p workerproto.Preparation) error {
	for _, l := range []struct {
		name     string
		resource int
		value    uint64 // 0: no limit
	}{
		{"core dump", unix.RLIMIT_CORE, coreLimit},
		{"memory", unix.RLIMIT_DATA, p.Data},
		{"file size", unix.RLIMIT_FSIZE, p.FileSize},
		{"open files", unix.RLIMIT_NOFILE, p.OpenFiles},
		{"stack", unix.RLIMIT_STACK, p.Stack},
		{"processor time", unix.RLIMIT_CPU, p.CPU},
		{"processes", unix.RLIMIT_NPROC, p.Processes},
	} {
		if l.value == 0 {
			continue
		}
		if err := lowerLimit(l.resource, l.value); err != nil {
			return fmt.Errorf("%s limit %d: %w", l.name, l.value, err)
		}
	}
	return nil
}

// lowerLimit sets the soft and hard limit, but not above the inherited one. It uses syscall's
// function instead of x/sys's, because otherwise the Go runtime changes the limit of open files at
// exec.
func lowerLimit(resource int, value uint64) error {
	var old syscall.Rlimit
	if err := syscall.Getrlimit(resource, &old); err != nil {
		return err
	}
	value = min(value, old.Max, math.MaxInt64)
	hard := value
	if resource == unix.RLIMIT_CPU {
		hard = min(value+1, old.Max) // so that SIGXCPU at the soft limit shows the cause
	}
	return syscall.Setrlimit(resource, &syscall.Rlimit{Cur: value, Max: hard})
}

// reapTimeout is how long to wait for killed processes.
const reapTimeout = 2 * time.Second

// supervise starts the worker from this thread, whose limits it inherits, with its model, if one is
// open, as workerproto.ModelFD. It waits for the worker, ends the processes that it left, and
// returns the exit status that says how the worker ended.
//
// As the first process of a pid namespace it only exits: the kernel kills the rest before the
// parent sees the exit. Otherwise it adopts orphans, also those with own sessions, and kills them
// one by one.
func supervise(p workerproto.Preparation, model int) (int, error) {
	if !p.First {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return 0, fmt.Errorf("subreaper: %w", err)
		}
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	// Not os.StartProcess, which starts another process to test pidfd support.
	files := []uintptr{0, 1, 2, requestFD, answerFD} // and workerproto.ModelFD
	if model != noModel {
		files = append(files, uintptr(model))
	}
	worker, err := syscall.ForkExec("/proc/self/exe", []string{os.Args[0], "work"},
		&syscall.ProcAttr{
			Env: withLibraries(p.Libraries), Files: files,
			Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL},
		})
	if err != nil {
		return 0, fmt.Errorf("start again: %w", err)
	}
	_ = unix.Close(requestFD) // the worker has duplicates; their end must be noticed
	_ = unix.Close(answerFD)
	go func() {
		<-stop
		_ = unix.Kill(worker, unix.SIGKILL) // not reaped yet, so the pid is valid
	}()
	status, err := await(worker)
	if err != nil {
		return 0, err
	}
	if !p.First {
		endChildren()
	}
	return exitStatus(status), nil
}

// wait waits for the end of a child process.
func wait(pid int) (status unix.WaitStatus, usage unix.Rusage, err error) {
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		_, err = unix.Wait4(pid, &status, 0, &usage)
	}
	return status, usage, err
}

// await reaps processes until the worker is among them.
func await(worker int) (unix.WaitStatus, error) {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, fmt.Errorf("wait for the worker: %w", err)
		case pid == worker && (status.Exited() || status.Signaled()):
			return status, nil
		}
	}
}

func exitStatus(status unix.WaitStatus) int {
	if status.Signaled() {
		return workerproto.ExitSignal + int(status.Signal())
	}
	if code := status.ExitStatus(); code < workerproto.ExitSignal {
		return code
	}
	fmt.Fprintf(os.Stderr, "epcached-ort: the worker ended with exit status "+
		"%d\n", status.ExitStatus())
	return workerproto.ExitSignal - 1
}

// endChildren kills and reaps until there is no child. The children of each that dies become
// children of this process.
func endChildren() {
	for deadline := time.Now().Add(reapTimeout); time.Now().Before(deadline); {
		for _, pid := range children() {
			_ = unix.Kill(pid, unix.SIGKILL) // ESRCH: it has ended by itself
		}
		for {
			pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
			if errors.Is(err, unix.ECHILD) {
				return
			}
			if pid <= 0 {
				break
			}
		}
		time.Sleep(time.Millisecond)
	}
}

func children() []int {
	// an error is impossible, because the pattern is valid
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	var found []int
	for _, path := range stats {
		// empty if it ended in the meantime
		stat, _ := os.ReadFile(path)
		// the name before it may have any characters
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(fields) < 2 || fields[1] != strconv.Itoa(os.Getpid()) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			found = append(found, pid)
		}
	}
	return found
}
