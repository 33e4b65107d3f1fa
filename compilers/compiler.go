// Package compilers compiles ONNX models with an execution provider (EP) and checks the results,
// without ever loading vendor code into the calling process.
//
// A [Compiler] answers five questions: which devices a runtime has (Probe), which SDK and hardware
// a build made here is for (Fingerprint), what a model compiles to (Compile), whether a compiled
// graph loads (Check), and the EP's verdict on a stored compatibility string (Compatibility).
// [ORT] is the real one: each call starts one worker process (cmd/epcached-ort), which loads the
// user's libonnxruntime and EP libraries and talks through two descriptors (package workerproto).
// Package standin is an implementation for tests that needs no runtime at all.
//
// Callers may rely on this:
//
//   - All methods may be called from several goroutines at once. Each call ends when its context
//     ends, and by then the worker and every process of its group are gone.
//
// - A crash, a hang or excessive output of the vendor's code is an error value: [ExitError],
// [ErrTimeout],
//
//	  [ErrCPU], [ErrMemory], [ErrOutput]. A refusal by ORT is a [RefusedError] with its code and
//	  text.
//	- Compile reports only files that are complete: regular files in the job's directory, at least
//	  one EPContext node in the graph. A graph that holds no EPContext node is a [NoNodesError].
//	- Workers have their working directory, home and temporary files in the job's directory, write
//	  nowhere else, read only what they need, have no network, and leave no process behind: as far
//	  as the kernel can keep them so, which [ORT.Sandbox] reports ([SandboxOptions] says more).
//
// [Find] reads a directory that pip, a virtual environment or an administrator made, and returns
// the [Runtime] of every call; [EPByName] describes a known EP (its options, its library's name).
// Start reading at [ORT.Compile].
package compilers

import (
	"cmp"
	"context"
	"os"
	"time"

	"github.com/epcached/epcached/compilers/workerproto"
)

// Compiler drives one kind of model compiler. Every method may be called concurrently, and returns
// soon after its context ends.
type Compiler interface {
	// Probe lists the devices that each EP library of the runtime offers. An EP that cannot be
	// registered is reported in its EPProbe.Error; the error result is for the runtime as a whole.
	Probe(ctx context.Context, r Runtime) (Facts, error)

	// Fingerprint compiles a tiny model with each of the EPs in turn, and returns one Fingerprint
	// per EP, in their order, from the compiled graphs. Builds made with the same EP, devices and
	// options carry the same SDK version, and if the string does not depend on the model the same
	// compatibility string. For an EP that takes none of the tiny models, own's model is compiled,
	// with own's session options, unless own is nil.
	Fingerprint(ctx context.Context, r Runtime, eps []EP, own *Job) ([]Fingerprint, error)

	// Compile compiles one model into job.Directory. progress, if not nil, is called from another
	// goroutine at the beginning of each phase, and never after Compile has returned.
	Compile(ctx context.Context, job Job, progress func(phase string)) (Result, error)

	// Check loads a graph, compiled or not, in a process of its own. A graph that does not load is
	// a result, not an error.
	Check(ctx context.Context, job CheckJob) (CheckResult, error)

	// Compatibility asks the EP for its verdict on each of the compatibility strings, in their
	// order.
	Compatibility(ctx context.Context, r Runtime, ep EP, infos []string) ([]Verdict, error)
}

// OpenModelCompiler is a Compiler that can have a model as an open file in the place of Job.Model.
type OpenModelCompiler interface {
	// AcceptsOpenModel reports whether it can for this job, whose Pace need not be set.
	AcceptsOpenModel(job Job) bool
}

// Device selects hardware devices of an EP.
type Device = workerproto.DeviceSelector

// IsVirtual is the metadata key of devices that are not in this machine.
const IsVirtual = workerproto.IsVirtual

// EP is one execution provider of a job, in ORT's order of preference. An empty Library is the
// runtime's for Name; options that name a library hold its base name.
type EP = workerproto.EP

// PhaseCompiling is the phase that Compile reports when it has the model and begins to compile.
const PhaseCompiling = workerproto.PhaseCompiling

// Routes by which ORT compiles.
const (
	RouteCompileAPI     = "compile_api"     // OrtCompileApi: model in, model out
	RouteSessionOptions = "session_options" // a session with ep.context_enable=1
)

// Job is one compile.
type Job struct {
	Runtime Runtime
	EPs     []EP   // at least one
	Model   string // absolute path of a private copy; names in the output are of its Spelling

	// ModelFile, if not nil, is the model as an open file of any owner, so that no copy is needed.
	// Model then does not exist. The caller ensures that it does not change. Only if
	// [OpenModelCompiler] allows it.
	ModelFile *os.File

	Dir    string // absolute path of the private directory that the output goes into; it exists
	Output string // name of the graph to write, "<16 hex>_ctx.onnx"

	Session
	Embed        bool   // context binary inside the graph instead of beside it
	Route        string // "": RouteCompileAPI, or RouteSessionOptions with Share
	Initializers Initializers

	// Written, if not nil, is called from another goroutine with the bytes of all output when the
	// graph is written, if that is noticed before Compile returns. The worker still frees its
	// memory then, and may fail. Output read from then on is final if Result.Settled is set.
	Written func(size int64)

	// Share are further models, compiled after Model and in this order, in the same worker and with
	// the same options, so that all share one context binary. It is named after the first. One that
	// fails fails all, with a *MemberError.
	Share []ShareMember

	Pace
}

// Pace says when a worker may begin, and with which priority. The zero value means at once and with
// the usual priority.
type Pace struct {
	// Ready, if not nil, is closed when the model, or the graph, exists in the directory, which
	// exists already. Until then the worker only prepares.
	Ready <-chan struct{}

	// Idle, if not nil, lets the worker run at the lowest priority until it is closed, and then at
	// the usual one, as far as the system lets a process raise its priority.
	Idle <-chan struct{}
}

// Session has a session's options without execution providers. Its JSON is that of request records.
type Session struct {
	SessionOptions             map[string]string `json:"session_options"` // session config entries
	FreeDimensions             map[string]int64  `json:"free_dimensions"` // by name
	FreeDimensionsByDenotation map[string]int64  `json:"free_dimensions_by_denotation"`
	// "", "disable_all", "basic", "extended", "layout", "all"
	GraphOptimizationLevel string `json:"graph_optimization_level"`
}

// Initializers says where to store the initializers that are not in contexts: those of nodes that
// no EP took, and the weights if an EP makes weightless contexts. Threshold and InSource are for
// RouteCompileAPI only. The source's files that initializers stay in become part of the artefact.
type Initializers = workerproto.Keep

// Result is a finished compile.
type Result struct {
	Graph  string   // name of the graph in Job.Directory
	Graphs []string // names of all graphs of a group, in order, otherwise of the one
	// Files has the names of all files of the artefact in Job.Dir: the graphs first, then the
	// others sorted.
	Files      []string
	Seconds    float64 // ORT's part: from session options to written graph
	ORTVersion string
	Route      string // the route that was taken
	EPs        []EPUsed
	Log        string  // the bounded tail of what ORT and the EP printed
	MaxRSS     int64   // bytes, of the worker
	CPUSeconds float64 // of all processors, of the worker; also reported beside an error
	// Settled: Job.Written was called, and no output file was written, made or removed since.
	Settled bool
}

// EPUsed describes an EP of a job, with the devices that were chosen.
type EPUsed = workerproto.EPResult

// CheckJob loads a graph, to find out whether and how fast it loads.
type CheckJob struct {
	Runtime Runtime
	EPs     []EP
	Graph   string // absolute path; sidecars, or external data, are beside it
	Zeros   int64  // size of free dimensions for running it on zeros; 0: it is not run

	// Against, unless "", is the absolute path of the source model. It is loaded in the same worker
	// after Graph, to compare the load times. Only for it free dimensions are fixed.
	Against string

	// Share are further graphs, loaded after Graph and in this order, in the same process and with
	// the same options; they are beside it. All are released in reverse. With ShareOptions among
	// the SessionOptions it is how several members of a group are loaded.
	Share []string

	Session
	Pace // for Graph and the files beside it

	// Beside says that no EP locks a device, so that the worker may register them before
	// Pace.Ready, while another worker compiles the graph. Otherwise it waits, because EPs may open
	// their device when they are registered.
	Beside bool
}

// Outcomes of a load check.
const (
	Passed       = "passed"
	Failed       = "failed"
	NotCheckable = "cannot be tested " +
		"here" // the target device is not in this machine, so a failure would prove nothing
)

// CheckResult is the result of a load check.
type CheckResult struct {
	Outcome                string  // Passed, Failed or NotCheckable
	Code                   int     // ORT's error code when it failed; -1: the process crashed
	Text                   string  // ORT's text, or the end of standard error after a crash
	Member                 int     // of Graph and Share, which one failed; 0: the first
	Signal                 string  // "SIGSEGV" and so on, where one ended the process
	GraphOptimizationLevel string  // "disable_all" when it loads only so; else as asked
	Seconds                float64 // ORT's part: from session options to session
	CPUSeconds             float64 // of all processors, of the workers
	// processor seconds of one load of Graph and of Against; 0: not compared
	LoadCPU, AgainstCPU float64
	MaxRSS              int64 // peak bytes of the worker; 0: not reported
	ReadyRSS            int64 // its bytes when its EPs were registered
	Ran                 bool  // it was loaded, and also run
}

// Crashed reports whether the process of the check crashed.
func (r CheckResult) Crashed() bool { return r.Outcome == Failed && r.Code == -1 }

// Recorded returns the outcome that a build's record keeps: Failed also for a build that did not
// load, but whose device is not in this machine.
func (r CheckResult) Recorded() string {
	if r.Code > 0 || r.Signal != "" {
		return Failed
	}
	return r.Outcome
}

// Cause returns why it failed: "11 EP_FAIL: " and ORT's text, or how a crashed process ended.
func (r CheckResult) Cause() string { return (&RefusedError{Code: r.Code, Text: r.Text}).Cause() }

// Fingerprint has the facts that an EP states in a compiled one-node model.
type Fingerprint struct {
	SDKVersion string // attribute ep_sdk_version
	// attribute hardware_architecture, else the part of CompatibilityString that names it
	HardwareArchitecture string
	CompatibilityString  string // metadata ep_compatibility_info.<EP>
	// of the graph: the latest that this ONNX Runtime writes and loads; 0: not known
	IRVersion int64 `json:",omitempty"`
	EPVersion string
	// MachineClass is the class of the devices, for an EP that states no hardware; "": unknown.
	MachineClass  string
	DriverVersion string // device metadata "os_driver_version" where the EP gives one
	Device        DeviceFacts
	Devices       []DeviceFacts
	Seconds       float64
}

// Hardware returns the hardware that builds are for, as the EP states it, otherwise the class of
// the machine.
func (f *Fingerprint) Hardware() string { return cmp.Or(f.HardwareArchitecture, f.MachineClass) }

// Facts is the result of a probe.
type Facts struct {
	ORTVersion string
	ORTBuild   string    // ONNX Runtime's own build information
	EPs        []EPProbe // in the order of Runtime.EPs
}

// EPProbe is the result of probing an EP library: its devices, or why it did not register.
type EPProbe = workerproto.EPResult

// DeviceFacts describes a device as ORT and the EP report it.
type DeviceFacts = workerproto.DeviceFacts

// Verdict is an EP's verdict on a compatibility string: ORT's OrtCompiledModelCompatibility.
type Verdict int

// Verdicts, numbered as ORT numbers them.
const (
	Unknown             Verdict = 0 // the EP does not judge this string
	Optimal             Verdict = 1
	PreferRecompilation Verdict = 2
	Unsupported         Verdict = 3
)

// String returns the verdict's name in replies and listings.
func (v Verdict) String() string {
	names := []string{"unknown", "optimal", "prefer_recompilation", "unsupported"}
	if v < Unknown || v > Unsupported {
		return names[Unknown]
	}
	return names[v]
}

// Limits bound one worker process. A zero field takes the value of DefaultLimits; a negative one
// means no limit.
type Limits struct {
	Wall   time.Duration // from start to result
	Verify time.Duration // longest comparison of outputs, regardless of the compile's time
	CPU    time.Duration // processor time of each process; whole seconds
	// Memory bounds the bytes of a worker with all its processes, and the private memory of each of
	// these; 0: three quarters of the machine's.
	Memory      int64
	Output      int64 // bytes of all files that it leaves, and of each single file
	Files       int   // files in the job's directory
	OpenFiles   int64
	Processes   int64 // processes and threads, where workers have a user of their own
	Stack       int64 // bytes, of each thread: deep graphs recurse
	Nice        int   // of workers, unless they inherit a higher one
	StderrBytes int   // bytes of the tail that is kept
}

// DefaultLimits are generous: they stop runaway jobs, not large ones.
var DefaultLimits = Limits{
	Wall:        30 * time.Minute,
	Verify:      2 * time.Minute,
	CPU:         8 * time.Hour,
	Output:      64 << 30,
	Files:       1024,
	OpenFiles:   4096,
	Processes:   4096,
	Stack:       64 << 20,
	Nice:        5,
	StderrBytes: 64 << 10,
}

func (l Limits) orDefault() Limits {
	d := DefaultLimits
	l.Wall = cmp.Or(l.Wall, d.Wall)
	l.Verify = cmp.Or(l.Verify, d.Verify)
	l.CPU = cmp.Or(l.CPU, d.CPU)
	l.Memory = cmp.Or(l.Memory, MachineMemory()/4*3, -1)
	l.Output = cmp.Or(l.Output, d.Output)
	l.OpenFiles = cmp.Or(l.OpenFiles, d.OpenFiles)
	l.Processes = cmp.Or(l.Processes, d.Processes)
	l.Stack = cmp.Or(l.Stack, d.Stack)
	l.Files = cmp.Or(l.Files, d.Files)
	l.Nice = cmp.Or(l.Nice, d.Nice)
	l.StderrBytes = cmp.Or(l.StderrBytes, d.StderrBytes)
	return l
}
