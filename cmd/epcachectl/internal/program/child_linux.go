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

// Status says how a program ended.
type Status struct {
	Code   int            // as in a shell: 128 plus the number after a signal
	signal syscall.Signal // the signal that ended it, or 0
}

// Run runs a program, forwards signals to it, and returns when it has ended.
func Run(cmd *exec.Cmd) (Status, error) {
	caught := make(chan os.Signal, 16)
	// Signals that are ignored at the start stay ignored in the program too, for nohup.
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
				cmd.Process.Signal(s) // it may have ended just now, which Wait reports
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

// reachedProgram reports whether the program got the signal already, because a terminal sends
// signals of its keys to the whole foreground process group. Such a signal must not be forwarded,
// because the program would get it twice.
func reachedProgram(s os.Signal) bool {
	if s != syscall.SIGINT && s != syscall.SIGQUIT && s != syscall.SIGWINCH {
		return false
	}
	terminal, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer terminal.Close()
	foreground, err := unix.IoctlGetInt(int(terminal.Fd()), unix.TIOCGPGRP)
	return err == nil && foreground == unix.Getpgrp()
}

// Repeat ends this process by the signal that ended the program, so that its parent sees the same
// status. It returns if no signal ended the program.
func (s Status) Repeat() {
	// This process must dump no core, because the program may have left its own.
	if s.signal == 0 || unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) != nil {
		return
	}
	// Go's handlers would print goroutines, and would not end the process by the signal. Therefore
	// set the default action: a kernel's struct sigaction with zeros only.
	var plain [4]uint64
	unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(s.signal),
		uintptr(unsafe.Pointer(&plain)), 0, 8, 0, 0)
	// If the signal does not end this process, the exit status still says which it was.
	unix.Kill(unix.Getpid(), s.signal)
}
