package standin

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/epmodel"
)

var addEP = sync.OnceValue(func() error { return compilers.AddEPs([]byte(Table)) })

// Compiler is the stand-in. The zero value works; fields may be set before first use.
type Compiler struct {
	// Fault is the misbehaviour of every job that names none in its option "fault".
	Fault Fault
	// Broken lets also the smallest model fail with Fault, as on a broken machine. Without it only
	// other models fail.
	Broken bool
	// Delay is how long each compile takes. Cancelling ends it at once.
	Delay time.Duration
	// CPUSeconds is what each compile reports as its use of processors.
	CPUSeconds float64
	// CompileSeconds is what each compile reports as how long it took. 0: the true time.
	CompileSeconds float64
	// LoadCPU and AgainstCPU are the processor seconds that checks with CheckJob.Against report.
	LoadCPU, AgainstCPU float64
	// CheckFault, if it returns a result, replaces that of Check, for a machine on which no build
	// loads, or without the device.
	CheckFault func(compilers.CheckJob) *compilers.CheckResult
	// Comparison, if not nil, returns the result of every comparison with a source model.
	Comparison func(compilers.VerifyJob) compilers.VerifyResult
	// Limits bound the output, as for the real compiler.
	Limits compilers.Limits

	// Calls that were made so far, for tests that count. Controls are compiles of the smallest
	// model, which Compiles leaves out.
	Compiles, Controls, Checks, LoadComparisons, Probes, Fingerprints, Verdicts atomic.Int64
	// Comparisons counts those of outputs.
	Comparisons atomic.Int64
	// Idle counts compiles that began at the lowest priority.
	Idle atomic.Int64
}

var (
	_ compilers.Compiler          = (*Compiler)(nil)
	_ compilers.OpenModelCompiler = (*Compiler)(nil)
)

// New makes a stand-in, and makes its EP known to package compilers.
func New() *Compiler {
	if err := addEP(); err != nil {
		panic(err) // Table is a constant of this package
	}
	return &Compiler{}
}

// Probe implements compilers.Compiler: one device, "CPU", per library that can be read.
func (c *Compiler) Probe(ctx context.Context, r compilers.Runtime) (compilers.Facts, error) {
	c.Probes.Add(1)
	if err := ctx.Err(); err != nil {
		return compilers.Facts{}, err
	}
	facts := compilers.Facts{ORTVersion: r.ORTVersion}
	for _, lib := range r.EPs {
		probe := compilers.EPProbe{Name: lib.EP, Library: lib.Path}
		sdk, err := sdkOf(r, compilers.EP{Name: lib.EP, Library: lib.Path})
		if err != nil {
			probe.Error = err.Error()
		} else {
			probe.Devices = []compilers.DeviceFacts{device(sdk)}
		}
		facts.EPs = append(facts.EPs, probe)
	}
	return facts, nil
}

func device(sdk SDK) compilers.DeviceFacts {
	return compilers.DeviceFacts{Type: "CPU", VendorID: 0x1234, Vendor: "stand-in", DeviceID: 1,
		EPMetadata: map[string]string{"version": sdk.Version}}
}

// Fingerprint implements compilers.Compiler.
func (c *Compiler) Fingerprint(ctx context.Context, r compilers.Runtime, eps []compilers.EP,
	_ *compilers.Job) ([]compilers.Fingerprint, error) {
	c.Fingerprints.Add(1)
	var prints []compilers.Fingerprint
	for _, ep := range eps {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		sdk, err := sdkOf(r, ep)
		if err != nil {
			return nil, err
		}
		d := device(sdk)
		prints = append(prints, compilers.Fingerprint{SDKVersion: sdk.Version,
			HardwareArchitecture: sdk.Hardware, CompatibilityString: sdk.compatibility(),
			IRVersion: irVersion(r), EPVersion: sdk.Version, Device: d,
			Devices: []compilers.DeviceFacts{d}})
	}
	return prints, nil
}

// Compatibility implements compilers.Compiler.
func (c *Compiler) Compatibility(ctx context.Context, r compilers.Runtime, ep compilers.EP,
	infos []string) ([]compilers.Verdict, error) {
	c.Verdicts.Add(1)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	sdk, err := sdkOf(r, ep)
	if err != nil {
		return nil, err
	}
	var verdicts []compilers.Verdict
	for _, info := range infos {
		verdicts = append(verdicts, sdk.verdict(info))
	}
	return verdicts, nil
}

// AcceptsOpenModel implements compilers.OpenModelCompiler.
func (c *Compiler) AcceptsOpenModel(job compilers.Job) bool {
	return job.ModelFile != nil && len(job.Share) == 0
}

// Compile implements compilers.Compiler.
func (c *Compiler) Compile(ctx context.Context, job compilers.Job,
	progress func(string)) (compilers.Result, error) {
	if err := await(ctx, job.Ready); err != nil {
		return compilers.Result{}, fmt.Errorf("compile %q: %w", job.Model, err)
	}
	if controlled(job) {
		c.Controls.Add(1)
	} else {
		c.Compiles.Add(1)
	}
	if waits(job.Idle) {
		c.Idle.Add(1)
	}
	start := time.Now()
	if len(job.EPs) == 0 {
		return compilers.Result{}, errors.New("compile: no EP")
	}
	sdk, err := sdkOf(job.Runtime, job.EPs[0])
	if err != nil {
		return compilers.Result{}, err
	}
	if progress != nil {
		progress("compiling")
	}
	if err := sleep(ctx, c.Delay); err != nil {
		return compilers.Result{}, fmt.Errorf("compile %q: %w", job.Model, err)
	}
	models, err := readModels(ctx, job)
	if err != nil {
		return compilers.Result{}, err
	}
	before, err := names(job.Dir)
	if err != nil {
		return compilers.Result{}, err
	}
	if err := write(job, sdk, models); err != nil {
		return compilers.Result{}, err
	}
	if err := c.misbehave(ctx, job); err != nil {
		return compilers.Result{}, err
	}
	graphs := job.Outputs()
	files, _, err := compilers.Collect(ctx, job.Dir, graphs, before, c.Limits)
	if err != nil {
		var none *compilers.NoNodesError
		if errors.As(err, &none) {
			none.EPs = []string{EP}
		}
		return compilers.Result{}, err
	}
	return compilers.Result{Graph: job.Output, Graphs: graphs, Files: files,
		Seconds:    cmp.Or(c.CompileSeconds, time.Since(start).Seconds()),
		ORTVersion: job.Runtime.ORTVersion, Route: route(job),
		CPUSeconds: c.CPUSeconds,
		EPs: []compilers.EPUsed{{Name: EP, Version: sdk.Version,
			Devices: []compilers.DeviceFacts{device(sdk)}}}}, nil
}

// source is a model to compile.
type source struct {
	bytes []byte
	*epmodel.Model
}

// readModels reads the job's models in order.
func readModels(ctx context.Context, job compilers.Job) ([]source, error) {
	paths := []string{job.Model}
	for _, m := range job.Share {
		paths = append(paths, m.Model)
	}
	var models []source
	for i, path := range paths {
		content, err := os.ReadFile(path)
		if i == 0 && job.ModelFile != nil {
			content, err = io.ReadAll(io.NewSectionReader(job.ModelFile, 0, math.MaxInt64))
		}
		m, err := readModel(ctx, path, content, err)
		if err != nil && len(paths) > 1 {
			return nil, &compilers.MemberError{Member: i, Err: err}
		}
		if err != nil {
			return nil, err
		}
		models = append(models, m)
	}
	return models, nil
}

func readModel(ctx context.Context, path string, model []byte, err error) (source, error) {
	if err != nil {
		return source{}, &compilers.RefusedError{Doing: "compile", Code: 3, Text: err.Error()}
	}
	constant := make(map[string]bool)
	m, err := epmodel.Tensors(ctx, filepath.Base(path), bytes.NewReader(model),
		func(t *epmodel.Initializer) { constant[t.Name] = true })
	if err != nil {
		return source{}, &compilers.RefusedError{Doing: "compile", Code: 7, Text: err.Error()}
	}
	_, lost, err := epmodel.ExposeOuter(ctx, m, bytes.NewReader(model))
	for name := range lost {
		if constant[name] { // as ONNX Runtime
			return source{}, &compilers.RefusedError{Doing: "compile", Code: 10, Text: "Nodes " +
				"in a graph must be topologically sorted, however input '" + name + "' of node:  " +
				"name:  OpType: Add  is not output of any previous nodes."}
		}
	}
	if err != nil {
		return source{}, err
	}
	// as ONNX Runtime, which compiles initializers into the context
	m.Inputs = slices.DeleteFunc(m.Inputs, func(v epmodel.Value) bool { return constant[v.Name] })
	return source{model, m}, nil
}

func route(job compilers.Job) string {
	if len(job.Share) > 0 {
		return compilers.RouteSessionOptions
	}
	return compilers.RouteCompileAPI
}

// write makes the artefact: for each model a graph with one EPContext node, and the context binary
// that they share beside, or inside, them.
func write(job compilers.Job, sdk SDK, models []source) error {
	context := binary(job, sdk, models)
	if !job.Embed {
		if err := os.WriteFile(filepath.Join(job.Dir, binaryName(job)), context,
			0o600); err != nil {
			return err
		}
	}
	for i, output := range job.Outputs() {
		if err := writeGraph(job, filepath.Join(job.Dir, output), sdk, context,
			models[i].Model); err != nil {
			return err
		}
	}
	return nil
}

// binaryName is that of the first graph.
func binaryName(job compilers.Job) string {
	return strings.TrimSuffix(job.Output, ".onnx") + ".bin"
}

func writeGraph(job compilers.Job, path string, sdk SDK, context []byte,
	source *epmodel.Model) error {
	attributes := map[string]any{"main_context": int64(1), "embed_mode": int64(1),
		"ep_cache_context": context, "source": EP, "ep_sdk_version": sdk.Version,
		"hardware_architecture": sdk.Hardware, "partition_name": EP + "_0"}
	if !job.Embed {
		attributes["embed_mode"], attributes["ep_cache_context"] = int64(0), binaryName(job)
	}
	graph := tinymodel.Model{
		IRVersion: irVersion(job.Runtime), Graph: source.GraphName,
		Opsets:   map[string]int64{"": 17, "com.microsoft": 1},
		Metadata: map[string]string{"ep_compatibility_info." + EP: sdk.compatibility()},
		Nodes: []tinymodel.Node{{Name: EP + "_0", Op: "EPContext", Domain: "com.microsoft",
			Attributes: attributes}},
	}
	for _, v := range source.Inputs {
		graph.Inputs = append(graph.Inputs, value(v))
		graph.Nodes[0].Inputs = append(graph.Nodes[0].Inputs, v.Name)
	}
	for _, v := range source.Outputs {
		graph.Outputs = append(graph.Outputs, value(v))
		graph.Nodes[0].Outputs = append(graph.Nodes[0].Outputs, v.Name)
	}
	return os.WriteFile(path, graph.Encode(), 0o600)
}

// irVersion is the IR version that an ONNX Runtime writes, and the latest that it loads.
func irVersion(r compilers.Runtime) int64 {
	if compilers.CompareVersions(r.ORTVersion, LaterIR) >= 0 {
		return 10
	}
	return 9
}

// LaterIR is the first ONNX Runtime that writes graphs which earlier ones do not load.
const LaterIR = "1.33.0"

func value(v epmodel.Value) tinymodel.Value {
	out := tinymodel.Value{Name: v.Name, Type: v.Type}
	for _, d := range v.Shape {
		if d.Value >= 0 {
			out.Shape = append(out.Shape, d.Value)
		} else {
			out.Shape = append(out.Shape, d.Param)
		}
	}
	return out
}

// binary is the context: a header that Check can verify, everything of the request that a
// compiler's output depends on, and the models' bytes.
func binary(job compilers.Job, sdk SDK, models []source) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", sdk.compatibility())
	for _, ep := range job.EPs {
		fmt.Fprintf(&b, "%s %s\n", ep.Name, sorted(ep.Options))
	}
	fmt.Fprintf(&b, "%s %s\n", sorted(job.SessionOptions), job.GraphOptimizationLevel)
	body := []byte(b.String())
	for _, m := range models {
		body = append(body, m.bytes...)
	}
	return append([]byte(fmt.Sprintf("standin %x\n", sha256.Sum256(body))), body...)
}

func sorted(m map[string]string) string {
	var list []string
	for k, v := range m {
		list = append(list, fmt.Sprintf("%q=%q", k, v))
	}
	sort.Strings(list)
	return strings.Join(list, " ")
}

// names lists what is in a directory before a job: the model's private copy may be among it.
func names(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var list []string
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list, nil
}

// await waits until ready is closed.
func await(ctx context.Context, ready <-chan struct{}) error {
	if ready == nil {
		return ctx.Err()
	}
	select {
	case <-ready:
	case <-ctx.Done():
	}
	return ctx.Err()
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return ctx.Err()
	}
}

// waits reports whether idle is set and not closed yet.
func waits(idle <-chan struct{}) bool {
	select {
	case <-idle:
		return false
	default:
		return idle != nil
	}
}
