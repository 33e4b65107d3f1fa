//go:build linux && (amd64 || arm64)

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/workerproto"
	"github.com/epcached/epcached/internal/printable"
)

const requestFD, answerFD = 3, 4

func work() int {
	runtime.LockOSThread() // some vendors' code keeps state per thread
	if err := prepareProcess(); err != nil {
		return failed(workerproto.ExitSetup, err)
	}
	in, out := os.NewFile(requestFD, "request"), os.NewFile(answerFD, "answer")
	lines := bufio.NewReader(in)
	req, err := workerproto.ReadRequest(lines)
	if err != nil {
		return failed(workerproto.ExitProtocol, err)
	}
	j := &job{req: req, in: lines, report: func(e workerproto.Event) error {
		return workerproto.WriteEvent(out, e)
	}}
	event, status := j.answer()
	if err := workerproto.WriteEvent(out, event); err != nil {
		return failed(workerproto.ExitProtocol, err)
	}
	// The caller exits without running C destructors, because some libraries crash in them.
	return status
}

// prepareProcess makes the process fit for vendor code, before any is loaded.
func prepareProcess() error {
	// Standard output goes to standard error, because some EPs print to it.
	if err := unix.Dup3(2, 1, 0); err != nil {
		return fmt.Errorf("standard output: %w", err)
	}
	for _, fd := range []int{requestFD, answerFD} {
		// Children that vendor code starts must not keep the dialogue open.
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return fmt.Errorf("descriptor %d: %w", fd, err)
		}
	}
	return nil
}

// defaultSignals lets the kernel end the process on a crash. Go's handlers would print the
// registers of every thread and end it with another signal, or with status 2, which says less. Go
// code that dereferences nil dies the same way, which is what a worker should do. The supervising
// process does the same, because its end counts as the worker's.
func defaultSignals() error {
	var action [64]byte // struct sigaction of the kernel, all zero: SIG_DFL
	const sizeOfSigset = 8
	for _, sig := range []syscall.Signal{unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL,
		unix.SIGABRT, unix.SIGTRAP, unix.SIGSYS, unix.SIGXFSZ, unix.SIGXCPU, unix.SIGPIPE,
		unix.SIGQUIT, unix.SIGSTKFLT, unix.SIGHUP, unix.SIGINT} {
		_, _, errno := syscall.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig),
			uintptr(unsafe.Pointer(&action)), 0, sizeOfSigset, 0, 0)
		if errno != 0 {
			return fmt.Errorf("signal %v: %w", sig, errno)
		}
	}
	return nil
}

func (j *job) answer() (workerproto.Event, int) {
	if err := j.run(); err != nil {
		return workerproto.Event{Refusal: refusal(j.req.Do, err)}, workerproto.ExitRefused
	}
	j.mu.Lock()
	j.result.Errors = slices.Clone(j.errors)
	j.mu.Unlock()
	j.result.PeakMemory = max(j.result.PeakMemory, peakMemory())
	return workerproto.Event{Result: &j.result}, workerproto.ExitDone
}

// peakMemory reads the high-water mark of resident memory, because the kernel's account for a
// parent (rusage) also counts this process before its exec. It returns 0 without /proc.
func peakMemory() int64 {
	status, _ := os.ReadFile("/proc/self/status")
	_, after, _ := bytes.Cut(status, []byte("VmHWM:"))
	var kilobytes int64
	_, _ = fmt.Sscan(string(after), &kilobytes)
	return kilobytes << 10
}

func refusal(doing string, err error) *workerproto.Refusal {
	r := &workerproto.Refusal{Doing: doing, Code: -1, Text: err.Error()}
	if at, is := errors.AsType[*stepError](err); is {
		r.Doing, r.Text = at.step, at.err.Error()
	}
	if status, is := errors.AsType[*ort.Error](err); is {
		// the code is sent separately, and is more informative than the name of a C function
		r.Code, r.Text = status.Code, strings.Replace(r.Text, status.Error(), status.Text, 1)
	}
	return r
}

// stepError names the failed step of a job in the user's words.
type stepError struct {
	step string
	err  error
}

func (e *stepError) Error() string { return e.step + ": " + e.err.Error() }
func (e *stepError) Unwrap() error { return e.err }

func step(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return &stepError{fmt.Sprintf(format, args...), err}
}

// The main goroutine stays on the main thread: see prepare.
func init() { runtime.LockOSThread() }

// version is set by the linker for releases.
var version = "0.1.0-dev"

const help = `epcached-ort is the worker of epcached, which starts it for each job. It loads ONNX
Runtime and an execution provider, compiles or loads one model, and exits. There is no need to start
it yourself.

epcached expects it in its own directory. The key worker of the configuration names another path.

Usage:
  epcached-ort --help | --version

Examples:
  epcached-ort --version
`

func main() { os.Exit(run(os.Args[1:])) }

func failed(status int, err error) int {
	fmt.Fprintln(os.Stderr, "epcached-ort:", printable.Text(err.Error()))
	return status
}

func run(args []string) int {
	if err := defaultSignals(); err != nil {
		return failed(workerproto.ExitSetup, err)
	}
	switch {
	case len(args) == 2 && args[0] == "prepare":
		status, err := prepare(args[1])
		if err != nil {
			return failed(workerproto.ExitSetup, fmt.Errorf("prepare: %w", err))
		}
		return status
	case len(args) == 1 && args[0] == "serve":
		if err := serve(); err != nil {
			return failed(workerproto.ExitSetup, err)
		}
		return workerproto.ExitDone
	case len(args) == 1 && args[0] == "--version":
		fmt.Println("epcached-ort", version)
		return workerproto.ExitDone
	case len(args) == 1 && (args[0] == "--help" || args[0] == "-h"):
		fmt.Print(help)
		return workerproto.ExitDone
	case len(args) == 1 && args[0] == "work":
		return work()
	}
	return failed(workerproto.ExitSetup, errors.New("only epcached starts this program\n"+
		"epcached-ort: hint: epcached-ort --help"))
}
