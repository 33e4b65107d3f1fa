//go:build linux && (amd64 || arm64)

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/dialogue"
)

// prepare limits this process, starts the worker from it, and waits until that has ended, with all that it started. It gives the exit status.
func prepare(preparation string) (status int, err error) {
	var p dialogue.Preparation
	if err := json.Unmarshal([]byte(preparation), &p); err != nil {
		return 0, fmt.Errorf("limits: %w", err)
	}
	var thread sync.WaitGroup
	thread.Go(func() { status, err = prepareThread(p) })
	thread.Wait()
	return status, err
}

// prepareThread prepares the thread that it is called on. Niceness and what a thread is kept from belong to the thread; what it starts inherits
// them. It must not be the main thread, for that stands for the process: in the same Landlock domain as the worker it could be killed by it.
func prepareThread(p dialogue.Preparation) (int, error) {
	model, group := noModel, answerFD+1
	if p.Model {
		model, group = group, group+1
	}
	if p.Cgroup {
		// Refused, the worker has fewer limits, which is what it says when it is asked to try.
		_, _ = unix.Write(group, []byte("0"))
		_ = unix.Close(group) // it was only for that
	}
	runtime.LockOSThread() // never unlocked: the worker lives only as long as the thread
	if err := limit(p); err != nil {
		return 0, err
	}
	if p.Confine != nil {
		if err := confine(p.Confine, model); err != nil {
			return 0, err
		}
	}
	return supervise(p.First, model)
}

func limit(p dialogue.Preparation) error {
	if err := setLimits(p); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	raiseNiceness(p.Nice)
	if p.Idle {
		beIdle()
	}
	preferToDie()
	syscall.Umask(0o077)
	return nil
}

// raiseNiceness sets the niceness of this thread unless what it inherited is as high: to lower it
// takes a capability. What the system refuses is left as it is, because only the duration depends on it.
func raiseNiceness(nice int) {
	const kernels = 20 // the system call returns 20 less the niceness
	if inherited, err := unix.Getpriority(unix.PRIO_PROCESS, 0); err != nil || kernels-inherited < nice {
		_ = unix.Setpriority(unix.PRIO_PROCESS, 0, nice)
	}
}

// noModel stands for the descriptor of a worker's model where it has none.
const noModel = -1

// confine keeps this thread, and all that it starts, from what a worker has no use for. It may read what is open as model.
func confine(c *dialogue.Confinement, model int) error {
	if err := dropCapabilities(); err != nil {
		return err
	}
	if err := landlock(c, model); err != nil {
		return err
	}
	return filterCalls(c.Network, model != noModel)
}

// keptCapabilities let root's worker use files of other users, as far as Landlock lets it.
const keptCapabilities = 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_DAC_READ_SEARCH

// dropCapabilities takes the others from the programs that root's thread starts. Another user's have none.
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
			return nil // there are no more
		}
		if err != nil && !errors.Is(err, unix.EPERM) { // a root without privileges, as in some containers, has none to drop
			return fmt.Errorf("capability %d: %w", c, err)
		}
	}
	return nil
}

// noDump is too small for a dump, which would hold the user's model. It is not 0, with which the kernel still starts programs that take dumps.
const noDump = 1

func setLimits(p dialogue.Preparation) error {
	for _, l := range []struct {
		name     string
		resource int
		value    uint64 // 0: no limit
	}{
		{"core dump", unix.RLIMIT_CORE, noDump},
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
		if err := lower(l.resource, l.value); err != nil {
			return fmt.Errorf("%s limit %d: %w", l.name, l.value, err)
		}
	}
	return nil
}

// lower sets a limit for good, but not above what was inherited. syscall's function is used, not x/sys's: only it tells the Go runtime to leave
// the number of open files alone at exec.
func lower(resource int, value uint64) error {
	var old syscall.Rlimit
	if err := syscall.Getrlimit(resource, &old); err != nil {
		return err
	}
	value = min(value, old.Max, math.MaxInt64)
	hard := value
	if resource == unix.RLIMIT_CPU {
		hard = min(value+1, old.Max) // SIGXCPU at the soft limit tells what happened, which SIGKILL at the hard one does not
	}
	return syscall.Setrlimit(resource, &syscall.Rlimit{Cur: value, Max: hard})
}

// beIdle takes the last place at the disk and, where the kernel shares the processor between sessions first and counts niceness only within
// one, as desktops' kernels do, for this session, which is the worker's own. A kernel without either has neither to give.
func beIdle() {
	const ownProcess, idleClass = 1, 3 << 13 // IOPRIO_WHO_PROCESS, IOPRIO_CLASS_IDLE
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, ownProcess, 0, idleClass)
	_ = os.WriteFile("/proc/self/autogroup", []byte("19"), 0)
}

// preferToDie makes this process the first to go when memory runs out: a compile can be made again, and the daemon serves everyone. The
// kernel may forbid it in containers, which changes nothing but that preference.
func preferToDie() {
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("500"), 0)
}
