//go:build linux && (amd64 || arm64)

package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"runtime"
	"syscall"

	"github.com/epcached/epcached/compilers/dialogue"
	"golang.org/x/sys/unix"
)

// prepare limits this process and starts the worker in it. It returns only on failure.
func prepare(limits string) error {
	var p dialogue.Preparation
	if err := json.Unmarshal([]byte(limits), &p); err != nil {
		return fmt.Errorf("limits: %w", err)
	}
	// Niceness and no_new_privs belong to the thread; the thread that calls exec is the one that goes on.
	runtime.LockOSThread()
	if err := setLimits(p); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	if p.Nice > 0 {
		if err := unix.Setpriority(unix.PRIO_PROCESS, 0, p.Nice); err != nil {
			return fmt.Errorf("niceness: %w", err)
		}
	}
	if p.Idle {
		beIdle()
	}
	preferToDie()
	syscall.Umask(0o077)
	err := syscall.Exec("/proc/self/exe", []string{os.Args[0], "work"}, os.Environ())
	return fmt.Errorf("start again: %w", err)
}

func setLimits(p dialogue.Preparation) error {
	for _, l := range []struct {
		name     string
		resource int
		value    uint64
		set      bool
	}{
		{"core dump", unix.RLIMIT_CORE, 0, true}, // a dump would hold the user's model
		{"memory", unix.RLIMIT_DATA, p.Data, p.Data > 0},
		{"file size", unix.RLIMIT_FSIZE, p.FileSize, p.FileSize > 0},
		{"open files", unix.RLIMIT_NOFILE, p.OpenFiles, p.OpenFiles > 0},
		{"stack", unix.RLIMIT_STACK, p.Stack, p.Stack > 0},
	} {
		if !l.set {
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
	return syscall.Setrlimit(resource, &syscall.Rlimit{Cur: value, Max: value})
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
	f, err := os.OpenFile("/proc/self/oom_score_adj", os.O_WRONLY, 0)
	if err != nil {
		return
	}
	defer f.Close()             // a failed write is accepted, as said above
	_, _ = f.WriteString("500") // likewise
}
