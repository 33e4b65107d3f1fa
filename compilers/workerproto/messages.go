// Package workerproto holds the messages between epcached and its worker process, epcached-ort.
//
// The worker reads one [Request] from descriptor 3, and if that says so waits there until its model
// exists. It writes [Event] records to descriptor 4, each as one line of JSON. Standard output and
// standard error belong to the vendor's code. The last event carries a Result or a Refusal; a
// worker that ends without one has crashed, regardless of its exit status. Both ends bound what
// they read: a request by [MaxRequest], an event by [MaxEvent], the whole dialogue by [MaxEvents].
//
// Both programs are built from the same tree and installed together, so the messages carry one
// version number and no history: a worker of another version refuses.
package workerproto

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// Version must be equal on both ends.
const Version = 5

// The worker's exit statuses. They are unlike those of the Go runtime (2) and of shells (126 and
// above), so that a crash in vendor code is never mistaken for an answer.
const (
	ExitDone     = 0
	ExitRefused  = 60 // a Refusal was written
	ExitProtocol = 61 // the request could not be read, or the answer not be written
	ExitSetup    = 62 // the worker's own process could not be prepared

	// ExitSignal plus a number: that signal ended the worker. The supervising process cannot end by
	// the same signal itself.
	ExitSignal = 128
)

// A model that is an open file: a link at the model's path leads to ModelLink. The descriptor stays
// open in programs that the worker starts, so that they can open it too.
const (
	ModelFD   = 5
	ModelLink = "/proc/self/fd/5"
)

// CallRefused begins a line on standard error that says which unknown system call was refused.
const CallRefused = "epcached-ort: refused the unknown system call"

// Limits of the dialogue, in bytes and records.
const (
	MaxRequest = 16 << 20
	MaxEvent   = 4 << 20
	MaxEvents  = 4096
)

// Limits of Result.Errors.
const (
	MaxErrors    = 8
	MaxErrorText = 1 << 10
)

// The kinds of requests.
const (
	Probe         = "probe"
	Compile       = "compile"
	Load          = "load"
	Compatibility = "compatibility"
	TrySandbox    = "try"     // test the sandbox; loads no library
	Compare       = "compare" // run a graph and the model that it was compiled from
	Command       = "command" // run a vendor's own compiler; loads no library
)

// Phases that a worker reports.
const (
	PhaseStarting    = "starting"
	PhaseRegistering = "registering"
	PhaseCompiling   = "compiling"
	PhaseLoading     = "loading"
	PhaseRunning     = "running"
)

// Request is the work of one worker process. All paths are absolute, except those of models to
// compile, which are relative to the worker's working directory.
type Request struct {
	Version    int
	Do         string // one of the kinds above
	ORTLibrary string
	EPs        []EP

	Model   string  // Compile: source model. Load, Compare: the graph
	Output  string  // Compile: graph to write
	Route   string  // Compile: "compile_api" or "session_options"
	Embed   bool    // Compile
	Keep    Keep    // Compile
	Options Session // Compile, Load, Compare
	// Share has, for Compile and Load, more models in order, for the same process. In Compile all
	// share one context binary.
	Share []Member
	// Against is, for Load, the source of Model, which is loaded after it to compare both; "":
	// none.
	Against string
	Infos   []string // Compatibility: the strings to judge

	Most float64 // Compare: tolerance of values; the source model is the only one of Share

	Zeros int64 // Load: size of free dimensions for running it on zeros; 0: not run
	// Waits: for Compile and Load, the model does not exist yet; [WriteGo] follows when it does.
	Waits  bool
	Beside bool // Load: register the EPs before that, because none of them locks a device

	Args []string // Command: the program, an absolute path, and its arguments
	// CaptureOutput: for Command, return the beginning of standard output. Otherwise that goes to
	// the same pipe as standard error.
	CaptureOutput bool

	// Not sent. Fill returns Args when the worker's path of the model is known.
	Fill func(model string) []string `json:"-"`
	Read []string                    `json:"-"` // directories and files that the worker may read

	// Not sent. ModelFile is the open file that the worker gets as ModelFD; nil: there is a file at
	// Model.
	ModelFile *os.File `json:"-"`

	AnyCall bool `json:"-"` // not sent: allow unknown system calls

	// not sent: files whose directories the worker may read, besides those of the libraries and the
	// model
	Readable []string `json:"-"`
}

// Member is a model of a request after the first one.
type Member struct {
	Model  string
	Output string // Compile
}

// Keep says where to store initializers that are not in contexts. The zero value means in the
// graph.
type Keep struct {
	File      string // base name of the file for them
	Threshold int64  // in bytes; smaller initializers are stored in the graph
	InSource  bool   // initializers in files of the source model stay there
}

// EP is an EP of a request.
type EP struct {
	// canonical name, e.g. "QNNExecutionProvider"; the library is registered under it
	Name    string
	Library string // absolute path of the plugin library
	// which devices to use; empty: every device that the EP lists under exactly this name
	Devices []DeviceSelector
	Options map[string]string // provider options
}

// Session has the session options for ORT.
type Session struct {
	SessionOptions             map[string]string `json:"Entries"`
	FreeDimensions             map[string]int64
	FreeDimensionsByDenotation map[string]int64
	GraphOptimizationLevel     string // "", "disable_all", "basic", "extended", "layout", "all"
}

// Event is one record from the worker: exactly one field is set, except for those that belong to
// another one.
type Event struct {
	Phase string `json:",omitempty"`
	// Member belongs to Phase: the model that it concerns, Model being 1.
	Member int `json:",omitempty"`
	// EPs has the registered EPs and chosen devices. It is sent before they are used, because that
	// may crash.
	EPs []EPResult `json:",omitempty"`
	// Memory belongs to EPs: resident bytes of the worker so far.
	Memory  int64    `json:",omitempty"`
	Result  *Result  `json:",omitempty"`
	Refusal *Refusal `json:",omitempty"`
}

// Result ends a successful request.
type Result struct {
	ORTVersion string
	ORTBuild   string // ONNX Runtime's own build information
	EPs        []EPResult
	Seconds    float64 // time of the compile or the load
	Verdicts   []int   // Compatibility: one per string
	// Load with Against: processor seconds of one load of each form
	LoadCPU    []float64 `json:",omitempty"`
	PeakMemory int64     // bytes, resident, of the worker so far
	Confined   *Confined `json:",omitempty"` // Try
	Compared   *Compared `json:",omitempty"` // Compare
	// Errors has the first errors that ONNX Runtime logged, without duplicates.
	Errors []string `json:",omitempty"`
	// Command: the beginning of what it printed to standard output
	Printed string `json:",omitempty"`
	NotRun  string `json:",omitempty"` // Load with Zeros: why there is no such input
}

// Compared is the result of a comparison.
type Compared struct {
	Difference string // the first difference; empty if there is none
	Sizes      bool   // the difference is in sizes or types, so that no tolerance accepts it
	Without    string // why the outputs could not be compared; empty if they were
	Outputs    int    // number of compared outputs
}

// EPResult is the outcome of one EP of the request.
type EPResult struct {
	Name    string
	Library string
	Version string // the EP's own metadata, "version"; not always informative
	// Devices has, for Probe, all that the library lists under Name, otherwise the chosen ones.
	Devices []DeviceFacts
	Error   string // Probe: why it could not be registered
	Err     error  `json:"-"` // why the worker ended without an answer; Error has the text
}

// Refusal ends a request that ORT, the EP or the worker itself turned down.
type Refusal struct {
	Doing string
	Code  int // OrtErrorCode; -1: refused by the worker itself
	Text  string
}

// DeviceFacts describes a device as ORT and the EP report it.
type DeviceFacts struct {
	Type           string // "CPU", "GPU" or "NPU"
	VendorID       uint32
	Vendor         string
	DeviceID       uint32
	EPMetadata     map[string]string
	DeviceMetadata map[string]string
}

// Preparation is the worker's only argument after "prepare": the limits that it sets for itself
// before it executes itself again as "work". The daemon cannot set them between fork and exec
// without cgo, and a stack limit takes effect only in a new program. Zero leaves a limit unchanged.
type Preparation struct {
	Data      uint64 // bytes of private writable memory
	FileSize  uint64 // bytes of each file
	OpenFiles uint64
	Stack     uint64 // bytes
	CPU       uint64 // seconds of processor time of each process
	Processes uint64 // processes and threads of the user: only for a user that has no others
	Nice      int
	// Idle sets the lowest I/O priority too, and with autogroups that of the session.
	Idle bool

	Group bool // its group may read, write and remove the files that it makes
	Model bool // descriptor 5 is a model that the worker may read, and gets as ModelFD
	// Libraries are the plugins that the worker will load: it finds the libraries beside them by
	// their SONAMEs.
	Libraries []string
	// First: it is the first process of a pid namespace, with which the others end.
	First   bool
	Confine *Confinement // nil: no sandbox
}

// Messages from the daemon to an instance of the workers' unit. Handle carries the worker's
// descriptors from 2 on, and precedes its Launch. Closing the connection ends the worker.
const (
	Handle = 'h'
	Raise  = 'r' // gives the worker the usual priority
)

// Launch is what an instance of the workers' unit starts.
type Launch struct {
	Dir string // working directory, in the job's directory
	Env []string
	// Prepare is the Preparation as JSON. If it is "", the instance starts no worker, and only
	// opens the files that workers left in Dir to the group.
	Prepare string
}

// ExitReport is the last message of an instance.
type ExitReport struct {
	Status      int           // the worker's exit status
	CPU         time.Duration // of all its processes
	OutOfMemory bool          // a process was killed at the memory limit of the unit
}

// Confinement is the access of a worker, as far as the kernel can enforce it.
type Confinement struct {
	// Absolute paths of directories and files; missing ones are left out.
	Read    []string // read and executed
	Write   []string // written as well
	Network bool     // it may use the network
	Known   bool     // allow the known system calls only
	Reads   bool     // it only reads, so changes of file modes are refused too
}

// Confined is the result of a worker's test of its own sandbox.
type Confined struct {
	Reads      bool  // it read the file at Request.Model, which is outside
	Writes     bool  // it made the file at Request.Output, which is outside
	Connects   bool  // it made a socket
	Landlock   int   // ABI that the kernel offers; 0: none
	Seccomp    bool  // a filter is in effect
	Memory     int64 // memory limit of its cgroup in bytes; 0: none
	Privileged bool  // it has a capability beyond reading and writing files
	UID        uint32
}

// DeviceSelector matches hardware devices of an EP. Empty fields match every device.
type DeviceSelector struct {
	Type     string            // "CPU", "GPU" or "NPU", in any case
	VendorID uint32            // PCI vendor, e.g. 0x8086
	DeviceID uint32            // PCI device
	Metadata map[string]string // each pair must be in the EP's or the hardware device's metadata
}

// IsVirtual is the metadata key, with the value "1", of a device that this machine does not have.
// Some EPs compile for such devices, and the builds do not load here. Only a selector with this key
// matches one.
const IsVirtual = "is_virtual"

// Virtual reports whether the selector is for a device that this machine does not have.
func (s DeviceSelector) Virtual() bool { return s.Metadata[IsVirtual] == "1" }

// Fits reports whether the selector matches a device.
func (s DeviceSelector) Fits(d DeviceFacts) bool {
	if s.Type != "" && !strings.EqualFold(s.Type, d.Type) ||
		s.VendorID != 0 && s.VendorID != d.VendorID || s.DeviceID != 0 && s.DeviceID != d.DeviceID {
		return false
	}
	for k, v := range s.Metadata {
		if d.EPMetadata[k] != v && d.DeviceMetadata[k] != v {
			return false
		}
	}
	return true
}

// String describes the selector: "NPU (vendor 0x8086, is_virtual=1)".
func (s DeviceSelector) String() string {
	var more []string
	if s.VendorID != 0 {
		more = append(more, fmt.Sprintf("vendor %#x", s.VendorID))
	}
	if s.DeviceID != 0 {
		more = append(more, fmt.Sprintf("device %#x", s.DeviceID))
	}
	for _, k := range slices.Sorted(maps.Keys(s.Metadata)) {
		more = append(more, k+"="+s.Metadata[k])
	}
	return describeDevice(cmp.Or(strings.ToUpper(s.Type), "device"), more)
}

// Listed describes devices by all fields that selectors compare.
func (s DeviceSelector) Listed(devices []DeviceFacts) string {
	if len(devices) == 0 {
		return "none"
	}
	var list []string
	for _, d := range devices {
		more := []string{fmt.Sprintf("vendor %#x", d.VendorID),
			fmt.Sprintf("device %#x", d.DeviceID)}
		if d.Vendor != "" {
			more[0] += " " + d.Vendor
		}
		for _, k := range slices.Sorted(maps.Keys(s.Metadata)) {
			if v := cmp.Or(d.EPMetadata[k], d.DeviceMetadata[k]); v != "" {
				more = append(more, k+"="+v)
			} else {
				more = append(more, "no "+k)
			}
		}
		list = append(list, describeDevice(d.Type, more))
	}
	return strings.Join(list, "; ")
}

func describeDevice(kind string, more []string) string {
	if len(more) == 0 {
		return kind
	}
	return kind + " (" + strings.Join(more, ", ") + ")"
}

// ErrMalformed is wrapped by errors about bytes that are not a message of this version.
var ErrMalformed = errors.New("malformed dialogue")

// WriteRequest sends the request.
func WriteRequest(w io.Writer, r Request) error {
	r.Version = Version
	return writeLine(w, r, MaxRequest)
}

// ReadRequest reads a request that WriteRequest sent.
func ReadRequest(r *bufio.Reader) (Request, error) {
	line, err := readLine(r, MaxRequest)
	if err != nil {
		return Request{}, fmt.Errorf("request: %w", err)
	}
	var req Request
	if err := json.Unmarshal(line, &req); err != nil {
		return Request{}, fmt.Errorf("request: %w: %w", ErrMalformed, err)
	}
	if req.Version != Version {
		return Request{}, fmt.Errorf("request: %w: version %d, this worker speaks %d: epcached "+
			"and epcached-ort must have the same version", ErrMalformed, req.Version, Version)
	}
	return req, nil
}

type goMessage struct{ Go bool }

// WriteGo tells a waiting worker that the model exists.
func WriteGo(w io.Writer) error { return writeLine(w, goMessage{true}, MaxRequest) }

// ReadGo waits for WriteGo. It fails with io.ErrUnexpectedEOF if the daemon gave up. r must be the
// reader of ReadRequest.
func ReadGo(r *bufio.Reader) error {
	line, err := readLine(r, MaxRequest)
	if err != nil {
		return fmt.Errorf("wait for the model: %w", err)
	}
	var msg goMessage
	if err := json.Unmarshal(line, &msg); err != nil || !msg.Go {
		return fmt.Errorf("wait for the model: %w: %q", ErrMalformed, line)
	}
	return nil
}

// Send writes a Launch or an ExitReport; the first ExitReport of an instance only says that it
// runs.
func Send(w io.Writer, v any) error { return writeLine(w, v, MaxRequest) }

// Receive reads a message that Send wrote.
func Receive(r *bufio.Reader, v any) error {
	line, err := readLine(r, MaxRequest)
	if err != nil {
		return err
	}
	return json.Unmarshal(line, v)
}

// WriteEvent sends one event.
func WriteEvent(w io.Writer, e Event) error { return writeLine(w, e, MaxEvent) }

// ReadEvents reads events until one ends the request, and returns it. It calls each with the events
// before. It fails with io.ErrUnexpectedEOF if the worker ended without an answer.
func ReadEvents(r io.Reader, each func(Event)) (Event, error) {
	lines := bufio.NewReader(r)
	for range MaxEvents {
		line, err := readLine(lines, MaxEvent)
		if err != nil {
			return Event{}, err
		}
		var e Event
		if err := json.Unmarshal(line, &e); err != nil {
			return Event{}, fmt.Errorf("%w: %w", ErrMalformed, err)
		}
		if e.Result != nil || e.Refusal != nil {
			return e, nil
		}
		each(e)
	}
	return Event{}, fmt.Errorf("%w: more than %d events", ErrMalformed, MaxEvents)
}

func writeLine(w io.Writer, v any, limit int) error {
	line, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("dialogue: %w", err)
	}
	if len(line) >= limit {
		return fmt.Errorf("dialogue: message of %d bytes: the limit is %d", len(line), limit)
	}
	if _, err := w.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("dialogue: %w", err)
	}
	return nil
}

// readLine reads up to a line feed, at most limit bytes: memory grows only as bytes arrive.
func readLine(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > limit {
			return nil, fmt.Errorf("%w: a message of more than %d bytes", ErrMalformed, limit)
		}
		line = append(line, part...)
		switch {
		case err == nil:
			return line[:len(line)-1], nil
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF):
			// messages end with a line feed, so this one is truncated
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}
