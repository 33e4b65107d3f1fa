package program

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Status is how a program ended.
type Status struct {
	Code   int            // what a shell would say: 128 and more after a signal
	signal syscall.Signal // what it died by, or 0
}

// Run runs a program to its end, and passes the signals on to it that this process gets meanwhile.
func Run(cmd *exec.Cmd) (Status, error) {
	caught := make(chan os.Signal, 16)
	// Signals that were ignored at the start stay ignored in the program too, as nohup intends.
	signal.Notify(caught, slices.DeleteFunc([]os.Signal{syscall.SIGHUP, syscall.SIGINT,
		syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM,
		syscall.SIGCONT, syscall.SIGWINCH},
		signal.Ignored)...)
	defer signal.Stop(caught)
	if err := cmd.Start(); err != nil {
		return Status{}, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-caught:
			if !reachedProgram(s) {
				cmd.Process.Signal(s) // it may have ended this moment, which Wait reports
			}
		case err := <-ended:
			if _, is := errors.AsType[*exec.ExitError](err); err != nil && !is {
				return Status{}, err
			}
			if s := cmd.ProcessState.Sys().(syscall.WaitStatus); s.Signaled() {
				return Status{128 + int(s.Signal()), s.Signal()}, nil
			}
			return Status{Code: cmd.ProcessState.ExitCode()}, nil
		}
	}
}

// reachedProgram reports whether the program has had the signal already: a terminal sends those of
// its keys to the whole foreground, and a second interrupt would be one too many.
func reachedProgram(s os.Signal) bool {
	if s != syscall.SIGINT && s != syscall.SIGQUIT && s != syscall.SIGWINCH {
		return false
	}
	terminal, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer terminal.Close() // only asked
	foreground, err := unix.IoctlGetInt(int(terminal.Fd()), unix.TIOCGPGRP)
	return err == nil && foreground == unix.Getpgrp()
}

// Repeat ends this process by the signal that ended the program, so that the parent sees the same.
// It returns if there was none.
func (s Status) Repeat() {
	// The program has left a core where one was wanted.
	if s.signal == 0 || unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) != nil {
		return
	}
	// Go's own handlers print goroutines, and do not end by the signal. This is the kernel's
	// struct, all zero: the default.
	var plain [4]uint64
	unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(s.signal),
		uintptr(unsafe.Pointer(&plain)), 0, 8, 0, 0)
	// Should it not end by it, the exit status does.
	unix.Kill(unix.Getpid(), s.signal)
}
