package certificate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/workerproto"
)

// ask has a worker do what is asked, within the time limit. Its home, temporary and working
// directories are below the request's directory; without one it gets one that is removed again. The
// answer of one that fails has the call that it reported last.
func (e *examination) ask(ctx context.Context, req workerproto.Guideline) (
	a workerproto.GuidelineAnswer, err error) {
	req.ORTLibrary = e.job.ORTLibrary
	if req.Dir == "" {
		if req.Dir, err = os.MkdirTemp("", "ep-conformance-"); err != nil {
			return a, err
		}
		defer os.RemoveAll(req.Dir) // what stays is in the temporary directory
	}
	memory, err := unix.MemfdCreate("answers", unix.MFD_CLOEXEC)
	if err != nil {
		return a, err
	}
	answers := os.NewFile(uintptr(memory), "answers")
	defer answers.Close() // only read here
	text, err := json.Marshal(req)
	if err != nil {
		return a, err
	}
	env := append(os.Environ(), "ORT_DISABLE_TELEMETRY=1")
	for variable, name := range map[string]string{"HOME": "home", "TMPDIR": "tmp", "PWD": "cwd",
		"XDG_CACHE_HOME": "cache"} {
		dir := filepath.Join(req.Dir, name)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return a, err
		}
		env = append(env, variable+"="+dir)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, e.job.Limit,
		fmt.Errorf("%w: %v", compilers.ErrTimeout, e.job.Limit))
	defer cancel()
	log := &compilers.Tail{Limit: 64 << 10}
	cmd := exec.CommandContext(ctx, e.job.Worker, "conformance")
	cmd.Dir, cmd.Env = filepath.Join(req.Dir, "cwd"), env
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(text), log, log
	cmd.ExtraFiles = []*os.File{answers}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second // where other processes keep its standard error open
	if err := cmd.Start(); err != nil {
		return a, fmt.Errorf("%w: %w", compilers.ErrStart, err)
	}
	_ = cmd.Wait() // its state says it all
	if _, err := answers.Seek(0, io.SeekStart); err != nil {
		return a, err
	}
	ended := false
	for lines := json.NewDecoder(answers); !ended; {
		next := workerproto.GuidelineAnswer{Call: a.Call}
		if err := lines.Decode(&next); err != nil {
			break // it ended while it worked
		}
		a, ended = next, next.Error != "" || next.Finding != nil || next.EP+next.Family != ""
	}
	switch {
	case ended && a.Error != "":
		return a, errors.New(a.Error)
	case ended && cmd.ProcessState.Success():
		return a, nil
	case ctx.Err() != nil:
		return a, context.Cause(ctx)
	}
	failed := &compilers.ExitError{Compiler: req.EP.Name, Code: cmd.ProcessState.ExitCode(),
		Stderr: log.String()}
	if s, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && s.Signaled() {
		failed.Signal, failed.Name = s.Signal().String(), unix.SignalName(s.Signal())
	}
	return a, failed
}
