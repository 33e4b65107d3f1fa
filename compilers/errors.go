package compilers

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/epcached/epcached/compilers/workerproto"
	"github.com/epcached/epcached/epmodel"
)

var (
	// ErrTimeout is returned when a worker was killed because it reached Limits.Wall.
	ErrTimeout = errors.New("time limit reached")
	// ErrMemory is returned when a worker was killed that reached Limits.Memory, or because the
	// memory of the container was exhausted.
	ErrMemory = errors.New("memory limit reached")
	// ErrCPU is returned when a worker reached Limits.CPU.
	ErrCPU = errors.New("processor time limit reached")
	// ErrOutput is returned when a worker left output that is not an artefact: too large, too many
	// files, a link or a device among them.
	ErrOutput = errors.New("output is not an artefact")
	// ErrOutputLimit is the ErrOutput of a worker that wrote more than Limits.Output or
	// Limits.Files allow.
	ErrOutputLimit = fmt.Errorf("%w: output limit reached", ErrOutput)
	// ErrStart is returned when there is no worker to run a job: the program cannot be started, or
	// not be made ready.
	ErrStart = errors.New("worker cannot be started")
	// ErrCrash is an ExitError of code that crashed by itself.
	ErrCrash = errors.New("compiler crashed")
	// ErrProtocol is returned when a worker's answer is malformed.
	ErrProtocol = workerproto.ErrMalformed
	// ErrNotFound is returned when a directory holds no runtime, or a runtime holds no library for
	// an EP.
	ErrNotFound = errors.New("not found")
	// ErrOption is returned for an EP or session option that may not be given.
	ErrOption = errors.New("option refused")
)

// ExitError is a worker that ended without a result: the vendor's code crashed, was killed, or left
// the process.
type ExitError struct {
	Compiler string // the EPs of the job, e.g. "QNNExecutionProvider"
	Signal   string // "segmentation fault" and so on; empty if it exited by itself
	Name     string // of the signal, "SIGSEGV"
	Code     int    // exit status; -1 when killed by a signal
	Stderr   string // bounded tail of its standard error
	Phase    string // the worker's last one, " while registering"; empty if it reported none
}

func (e *ExitError) Error() string {
	how := fmt.Sprintf("compiler ended with exit status %d", e.Code)
	switch {
	case e.IsExternalSignal():
		how = fmt.Sprintf("worker was killed (%s): %s", e.Name, e.Signal)
	case e.Signal != "":
		how = fmt.Sprintf("%v (%s): %s", ErrCrash, e.Name, e.Signal)
	}
	if e.Compiler != "" { // set only after the library has reported its name
		how = e.Compiler + ": " + how
	}
	how += e.Phase
	if line := LastLine(e.Stderr); line != "" {
		how += ": " + line
	}
	return how
}

// Is reports whether it is ErrCrash.
func (e *ExitError) Is(target error) bool {
	return target == ErrCrash && e.Signal != "" && !e.IsExternalSignal()
}

// IsExternalSignal reports whether the signal is one that the kernel, when memory is short, or a
// user sends to end a process, and not one that a fault in the process raises.
func (e *ExitError) IsExternalSignal() bool {
	return slices.Contains([]string{"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}, e.Name)
}

// RefusedError is a status that ORT or the EP returned.
type RefusedError struct {
	Doing string // the operation, e.g. "register QNNExecutionProvider"
	// Code is the OrtErrorCode; -1: the worker itself refused, for example a device that does not
	// exist.
	Code int
	Text string // ORT's text
}

func (e *RefusedError) Error() string { return e.Doing + ": " + e.Cause() }

// Cause is the error without the operation: "11 EP_FAIL: " and ORT's text.
func (e *RefusedError) Cause() string {
	if e.Code < 0 {
		return e.Text
	}
	return CodeName(e.Code) + ": " + strings.TrimSpace(e.Text)
}

// NoNodesError says that a compile succeeded but the graph has no EPContext node. The EPs took no
// node, so caching the result saves no time.
type NoNodesError struct {
	EPs    []string
	Errors []string // logged by ONNX Runtime; if an EP does not work, only they say why
	// OpTypes counts the nodes that no EP took by type, "domain::Op" ("::Op" or "Op" for the
	// default domain).
	OpTypes map[string]int
	Log     string
}

func (e *NoNodesError) Error() string {
	model := epmodel.Model{OpTypes: e.OpTypes}
	for _, count := range e.OpTypes {
		model.Nodes += count
	}
	text := fmt.Sprintf("%s took no node of the model: %s: caching has no "+
		"benefit", strings.Join(e.EPs, ", "), model.NodeSummary(12))
	if len(e.Errors) > 0 {
		text += "; ONNX Runtime logged: " + strings.Join(e.Errors, "; ")
	}
	return text
}

// LastLine returns the most informative line of text: the reason of a panic of Go's runtime,
// otherwise the last line that is not blank, in which crashing programs usually give the reason.
func LastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for i, line := range lines {
		// Go reports a signal: the reason is in the line before, or is the signal
		if strings.HasPrefix(line, "SIG") && strings.Contains(line, ": ") {
			return strings.TrimSpace(lines[max(i-1, 0)])
		}
		if strings.HasPrefix(line, "fatal error: ") || strings.HasPrefix(line, "panic: ") {
			return strings.TrimSpace(line)
		}
	}
	return strings.TrimSpace(lines[len(lines)-1])
}

// CodeNames are ONNX Runtime's error codes as its messages spell them: OrtErrorCode without ORT_,
// each at its number.
var CodeNames = []string{"OK", "FAIL", "INVALID_ARGUMENT", "NO_SUCHFILE", "NO_MODEL",
	"ENGINE_ERROR", "RUNTIME_EXCEPTION", "INVALID_PROTOBUF", "MODEL_LOADED", "NOT_IMPLEMENTED",
	"INVALID_GRAPH", "EP_FAIL", "MODEL_LOAD_CANCELED", "MODEL_REQUIRES_COMPILATION", "NOT_FOUND"}

// CodeName returns an error code with ONNX Runtime's name for it: "10 INVALID_GRAPH". Below 0 is a
// crash.
func CodeName(code int) string {
	switch {
	case code < 0:
		return "a crash"
	case code < len(CodeNames):
		return fmt.Sprintf("%d %s", code, CodeNames[code])
	}
	return fmt.Sprintf("code %d", code)
}

// Tail keeps the last bytes that are written to it. It never fails and never blocks, so that
// excessive output of a worker neither blocks the worker nor takes the daemon's memory.
type Tail struct {
	Limit int // bytes that are kept

	mu        sync.Mutex // guards kept and cut
	buf       []byte
	truncated bool
}

// Write keeps the end of p.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(p)
	if len(p) > t.Limit {
		p, t.truncated = p[len(p)-t.Limit:], true
	}
	t.buf = append(t.buf, p...)
	if len(t.buf) > 2*t.Limit { // moved only sometimes, because writes are small
		t.trim()
	}
	return n, nil
}

func (t *Tail) trim() {
	if extra := len(t.buf) - t.Limit; extra > 0 {
		t.buf, t.truncated = append(t.buf[:0:0], t.buf[extra:]...), true
	}
}

// String returns the kept bytes, with a mark where earlier ones were dropped.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trim()
	if t.truncated {
		return "[...]" + string(t.buf)
	}
	return string(t.buf)
}

// LastWords shortens a message to its end, because ONNX Runtime's messages begin with a position in
// its source code.
func LastWords(text string) string {
	const most = 400
	if len(text) <= most {
		return text
	}
	return "..." + strings.ToValidUTF8(text[len(text)-most:], "")
}
