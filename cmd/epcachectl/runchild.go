package main

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
)

// childStatus is how a program ended.
type childStatus struct {
	code   int       // what a shell would say: 128 and more after a signal
	signal os.Signal // what it died by, or nil
}

// runChild runs a program to its end, and passes the signals on to it that this process gets meanwhile.
func runChild(cmd *exec.Cmd) (childStatus, error) {
	caught := make(chan os.Signal, 16)
	signal.Notify(caught, passedOn()...)
	defer signal.Stop(caught)
	if err := cmd.Start(); err != nil {
		return childStatus{}, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-caught:
			if !sentToBoth(s) {
				cmd.Process.Signal(s) // it may have ended this moment, which Wait tells
			}
		case err := <-ended:
			var failed *exec.ExitError
			if err != nil && !errors.As(err, &failed) {
				return childStatus{}, err
			}
			return childStatusOf(cmd.ProcessState), nil
		}
	}
}
