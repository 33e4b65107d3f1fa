//go:build linux && (amd64 || arm64)

package main

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
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/workerproto"
)

// childVariable is set in the environment of the processes that load the library.
const childVariable = "EP_CONFORMANCE_CHILD"

const answerFD = 3

// request is what a child reads from standard input.
type request struct {
	ORTLibrary string
	EP         workerproto.EP
	// "SECTION/NAME"; "": find out what the EP is called, and which models it takes
	Guideline string
	Family    string // of these models
}

// answer is what a child writes to descriptor 3, as lines: each call before it is made, then the
// rest.
type answer struct {
	Call    string   `json:",omitempty"`
	Error   string   `json:",omitempty"`
	Finding *Finding `json:",omitempty"`

	EP, ORTVersion, Family, Device string // of what was found out
}

// ask has a child do what is asked, within the time limit. The answer of one that fails has the
// call that it reported last.
func ask(ctx context.Context, limit time.Duration, req request) (a answer, err error) {
	dir, err := os.MkdirTemp("", "ep-conformance-")
	if err != nil {
		return a, err
	}
	defer os.RemoveAll(dir) // what stays is in the temporary directory
	answers, err := os.Create(filepath.Join(dir, "answers"))
	if err != nil {
		return a, err
	}
	defer answers.Close() // only read here
	text, err := json.Marshal(req)
	if err != nil {
		return a, err
	}
	self, err := os.Executable()
	if err != nil {
		return a, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit,
		fmt.Errorf("%w: %v", compilers.ErrTimeout, limit))
	defer cancel()
	log := &compilers.Tail{Limit: 64 << 10}
	cmd := exec.CommandContext(ctx, self)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), childVariable+"=1", "ORT_DISABLE_TELEMETRY=1")
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
		next := answer{Call: a.Call}
		if err := lines.Decode(&next); err != nil {
			break // it ended while it worked
		}
		a, ended = next, next.Error != "" || next.Finding != nil || next.EP != ""
	}
	switch {
	case ended && a.Error != "":
		return a, errors.New(a.Error)
	case ended && cmd.ProcessState.Success():
		return a, nil
	case ctx.Err() != nil:
		return a, context.Cause(ctx)
	}
	e := &compilers.ExitError{Compiler: req.EP.Name, Code: cmd.ProcessState.ExitCode(),
		Stderr: log.String()}
	if s, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && s.Signaled() {
		e.Signal, e.Name = s.Signal().String(), unix.SignalName(s.Signal())
	}
	return a, e
}

// child does what it is asked, and ends the process without destructors of C, because libraries
// crash in them.
func child() {
	runtime.LockOSThread() // some vendors' code keeps state per thread
	syscall.CloseOnExec(answerFD)
	defaultSignals()
	out := json.NewEncoder(os.NewFile(answerFD, "answers"))
	var req request
	err := json.NewDecoder(os.Stdin).Decode(&req)
	var a answer
	if err == nil {
		a, err = req.answer(func(call string) error { return out.Encode(answer{Call: call}) })
	}
	if err != nil {
		a = answer{Error: err.Error()}
	}
	if err := out.Encode(a); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// defaultSignals lets the kernel end the process on a crash, without a dump. Go's handlers would
// end it with a status that does not show the signal.
func defaultSignals() {
	var action [64]byte // struct sigaction of the kernel, all zero: SIG_DFL
	const sizeOfSigset = 8
	for _, s := range []syscall.Signal{unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL,
		unix.SIGABRT, unix.SIGTRAP, unix.SIGSYS} {
		_, _, _ = syscall.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(s),
			uintptr(unsafe.Pointer(&action)), 0, sizeOfSigset, 0, 0)
	}
	_ = syscall.Setrlimit(unix.RLIMIT_CORE, &syscall.Rlimit{Cur: 1, Max: 1})
}

func (r request) answer(report func(call string) error) (answer, error) {
	cwd, err := os.Getwd()
	if err != nil {
		return answer{}, err
	}
	s := subject{ep: r.EP, report: report, dir: filepath.Join(cwd, "case")}
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		return answer{}, err
	}
	api, err := ort.Open(r.ORTLibrary)
	if err != nil {
		return answer{}, err
	}
	var log logged
	env, err := api.NewEnv(os.Stderr, log.add)
	if err != nil {
		return answer{}, fmt.Errorf("start ONNX Runtime %s: %w", api.Version, err)
	}
	if r.Guideline != "" {
		finding, err := prove(env, s, r.Guideline, r.Family)
		return answer{Finding: &finding}, err
	}
	devices, family, err := discover(env, &s)
	if err != nil {
		return answer{}, fmt.Errorf("%w%s", err, log.text())
	}
	return answer{EP: s.ep.Name, ORTVersion: api.Version, Family: family,
		Device: workerproto.DeviceSelector{}.Listed(facts(devices))}, nil
}

// logged keeps what ONNX Runtime logs as errors: where an EP takes no node, nothing else says why.
type logged struct {
	mu     sync.Mutex
	errors []string // guarded by mu
}

func (l *logged) add(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	text = brief(strings.Join(strings.Fields(text), " "))
	if len(l.errors) < workerproto.MaxErrors && !slices.Contains(l.errors, text) {
		l.errors = append(l.errors, text)
	}
}

func (l *logged) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.errors) == 0 {
		return ""
	}
	return "; ONNX Runtime logged: " + strings.Join(l.errors, "; ")
}

// choose picks the devices that any of the selectors matches.
func choose(ep workerproto.EP, devices []ort.Device) ([]ort.Device, error) {
	if len(ep.Devices) == 0 {
		ep.Devices = []workerproto.DeviceSelector{{}}
	}
	var chosen []ort.Device
	for _, d := range devices {
		if slices.ContainsFunc(ep.Devices,
			func(s workerproto.DeviceSelector) bool { return s.Fits(d.DeviceFacts) }) {
			chosen = append(chosen, d)
		}
	}
	if len(chosen) == 0 {
		s := ep.Devices[0]
		return nil, fmt.Errorf("%s has no %s; it lists %s", ep.Name, s, s.Listed(facts(devices)))
	}
	return chosen, nil
}

func facts(devices []ort.Device) []workerproto.DeviceFacts {
	var list []workerproto.DeviceFacts
	for _, d := range devices {
		list = append(list, d.DeviceFacts)
	}
	return list
}
