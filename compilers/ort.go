package compilers

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"
)

// Limits bound one worker process. A zero field takes the value of DefaultLimits; a negative one means no limit.
type Limits struct {
	Wall        time.Duration // from start to result
	Memory      int64         // bytes of address space
	Output      int64         // bytes of all files in the job's folder, and of each single file
	Files       int           // files in the job's folder
	OpenFiles   int64
	Stack       int64 // bytes; deep graphs recurse
	Nice        int   // added to the niceness
	StderrBytes int   // tail that is kept
}

// DefaultLimits are generous: they stop what has gone wrong, not what is large.
var DefaultLimits = Limits{
	Wall:        30 * time.Minute,
	Memory:      256 << 30, // address space, not resident memory: vendor libraries reserve tens of GB
	Output:      64 << 30,
	Files:       1024,
	OpenFiles:   4096,
	Stack:       512 << 20,
	Nice:        5,
	StderrBytes: 64 << 10,
}

func (l Limits) orDefault() Limits {
	d := DefaultLimits
	l.Wall = cmp.Or(l.Wall, d.Wall)
	l.Memory = cmp.Or(l.Memory, d.Memory)
	l.Output = cmp.Or(l.Output, d.Output)
	l.OpenFiles = cmp.Or(l.OpenFiles, d.OpenFiles)
	l.Stack = cmp.Or(l.Stack, d.Stack)
	l.Files = cmp.Or(l.Files, d.Files)
	l.Nice = cmp.Or(l.Nice, d.Nice)
	l.StderrBytes = cmp.Or(l.StderrBytes, d.StderrBytes)
	return l
}

// Credential is the user that workers run as. Only a daemon that runs as root can give one.
type Credential struct {
	UID, GID uint32
}

// ORTOptions configure the ORT compiler.
type ORTOptions struct {
	Worker string // path of epcached-ort; empty: beside the running program
	Limits Limits
	Log    *slog.Logger // nil: no log
	User   *Credential  // nil: workers run as the caller
}

// ORT compiles with ONNX Runtime, in worker processes.
type ORT struct {
	opts ORTOptions
}

// NewORT prepares a compiler. It starts one thread, from which all workers are started, and which Close ends.
func NewORT(o ORTOptions) *ORT { return &ORT{opts: o} }

// Close ends the thread that NewORT started; calls under way must have returned. Workers cannot be started any more.
func (o *ORT) Close() error { return nil }

var errUnfinished = errors.New("not built yet")

// Probe implements Compiler.
func (o *ORT) Probe(ctx context.Context, r Runtime) (Facts, error) { return Facts{}, errUnfinished }

// Fingerprint implements Compiler.
func (o *ORT) Fingerprint(ctx context.Context, r Runtime, eps []EP) ([]Fingerprint, error) {
	return nil, errUnfinished
}

// Compile implements Compiler.
func (o *ORT) Compile(ctx context.Context, job Job, progress func(phase string)) (Result, error) {
	return Result{}, errUnfinished
}

// Check implements Compiler.
func (o *ORT) Check(ctx context.Context, job CheckJob) (CheckResult, error) {
	return CheckResult{}, errUnfinished
}

// Compatibility implements Compiler.
func (o *ORT) Compatibility(ctx context.Context, r Runtime, ep EP, infos []string) ([]Verdict, error) {
	return nil, errUnfinished
}
