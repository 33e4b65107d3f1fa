//go:build linux && (amd64 || arm64)

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/workerproto"
)

// command runs a vendor's own compiler, which inherits this process's limits, and waits for it. If
// a signal ended it, this process ends by the same signal, so that the daemon sees a crashed
// worker.
func (j *job) command() error {
	if len(j.req.Args) == 0 || !filepath.IsAbs(j.req.Args[0]) {
		return errors.New("the request names no program")
	}
	if err := j.phase(workerproto.PhaseCompiling); err != nil {
		return err
	}
	name := filepath.Base(j.req.Args[0])
	first := make(chan string, 1)
	out := os.Stderr
	if j.req.CaptureOutput {
		printed, stdout, err := os.Pipe()
		if err != nil {
			return step(err, "start %s", name)
		}
		out = stdout
		go func() { first <- forwardOutput(printed) }()
	} else {
		first <- ""
	}
	start := time.Now()
	// Not os.StartProcess: see supervise.
	tool, err := syscall.ForkExec(j.req.Args[0], j.req.Args, &syscall.ProcAttr{
		Env: os.Environ(), Files: []uintptr{0, out.Fd(), 2},
		Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL},
	})
	if out != os.Stderr {
		_ = out.Close() // the tool has a duplicate
	}
	if err != nil {
		return step(err, "start %s", name)
	}
	status, usage, err := wait(tool)
	if err != nil {
		return step(err, "wait for %s", name)
	}
	if status.Signaled() {
		// the signal has its default action: see defaultSignals
		_ = unix.Kill(os.Getpid(), status.Signal())
		time.Sleep(reapTimeout) // until it arrives
	}
	if code := status.ExitStatus(); code != 0 {
		return step(fmt.Errorf("exit status %d", code), "run %s", name)
	}
	j.result.Seconds = time.Since(start).Seconds()
	select {
	case j.result.Printed = <-first:
	case <-time.After(reapTimeout): // a process that it left has the pipe open
	}
	j.result.PeakMemory = usage.Maxrss << 10
	return nil
}

// forwardOutput copies a tool's output to standard error, and returns the beginning of it.
func forwardOutput(from *os.File) string {
	var begin []byte
	buf := make([]byte, 4<<10)
	for {
		n, err := from.Read(buf)
		_, _ = os.Stderr.Write(buf[:n]) // best effort: the output is for people
		begin = append(begin, buf[:min(n, len(buf)-len(begin))]...)
		if err != nil {
			return strings.ToValidUTF8(string(begin), "\uFFFD") // at its end, or if reading fails
		}
	}
}
