package main

import (
	"os"
	"os/signal"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// passedOn lists the signals that the program gets when this process does. What was ignored when this process began stays
// so, in the program too: nohup means it.
func passedOn() []os.Signal {
	all := []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM, syscall.SIGCONT, syscall.SIGWINCH}
	return slices.DeleteFunc(all, signal.Ignored)
}

// sentToBoth tells whether the program has had the signal already: a terminal sends those of its keys to the whole
// foreground, and a second interrupt would be one too many.
func sentToBoth(s os.Signal) bool {
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

func childStatusOf(state *os.ProcessState) childStatus {
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return childStatus{128 + int(status.Signal()), status.Signal()}
	}
	return childStatus{code: state.ExitCode()}
}
