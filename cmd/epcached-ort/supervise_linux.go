//go:build linux && (amd64 || arm64)

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/dialogue"
)

// patience is how long killed processes may take to go away.
const patience = 2 * time.Second

// supervise starts the worker from this thread, whose limits it gets, with its model as dialogue.ModelFD, if it has one open, waits until it has ended, and ends whatever it left. It gives the exit
// status that tells how the worker ended.
//
// As the first process of a pid namespace it need only exit: the kernel kills the rest, and lets nobody see the exit before all are gone. Else
// it adopts processes that lose their parent, also those with sessions of their own, and kills them one by one.
func supervise(first bool, model int) (int, error) {
	if !first {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return 0, fmt.Errorf("subreaper: %w", err)
		}
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	// Not os.StartProcess, which starts another process to see how processes can be waited for.
	files := []uintptr{0, 1, 2, requestFD, answerFD} // and dialogue.ModelFD
	if model != noModel {
		files = append(files, uintptr(model))
	}
	worker, err := syscall.ForkExec("/proc/self/exe", []string{os.Args[0], "work"}, &syscall.ProcAttr{
		Env: os.Environ(), Files: files,
		Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL},
	})
	if err != nil {
		return 0, fmt.Errorf("start again: %w", err)
	}
	_ = unix.Close(requestFD) // the worker has its own; its end must be seen
	_ = unix.Close(answerFD)
	go func() {
		<-stop
		_ = unix.Kill(worker, unix.SIGKILL) // it has not been reaped: that ends this process
	}()
	status, err := await(worker)
	if err != nil {
		return 0, err
	}
	if !first {
		endChildren()
	}
	return exitStatus(status), nil
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
		return dialogue.ExitSignal + int(status.Signal())
	}
	if code := status.ExitStatus(); code < dialogue.ExitSignal {
		return code
	}
	fmt.Fprintf(os.Stderr, "epcached-ort: the worker left with exit status %d\n", status.ExitStatus())
	return dialogue.ExitSignal - 1
}

// endChildren kills and reaps until there is no child. Each that dies leaves its own children to this process.
func endChildren() {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		for _, pid := range children() {
			_ = unix.Kill(pid, unix.SIGKILL) // ESRCH: it has gone by itself
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
	stats, _ := filepath.Glob("/proc/[0-9]*/stat") // the pattern is one
	var found []int
	for _, path := range stats {
		stat, _ := os.ReadFile(path)                                              // nothing of one that ended meanwhile
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // the name before it may hold anything
		if len(fields) < 2 || fields[1] != strconv.Itoa(os.Getpid()) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			found = append(found, pid)
		}
	}
	return found
}
