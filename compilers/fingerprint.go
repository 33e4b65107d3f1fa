package compilers

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/epcached/epcached/epmodel"
)

// Fingerprint implements Compiler.
func (o *ORT) Fingerprint(ctx context.Context, r Runtime, eps []EP,
	own *Job) ([]Fingerprint, error) {
	var prints []Fingerprint
	for _, ep := range eps {
		t, isTool := o.tools[ep.Name]
		print, err := o.fingerprint(ctx, r, ep, t, own)
		if err != nil {
			name := ep.Name
			if isTool {
				name += " with " + t.Program
			}
			return nil, fmt.Errorf("fingerprint of %s: %w", name, err)
		}
		prints = append(prints, print)
	}
	return prints, nil
}

func (o *ORT) fingerprint(ctx context.Context, r Runtime, ep EP, t Tool,
	own *Job) (Fingerprint, error) {
	version, err := o.version(ctx, t)
	if err != nil {
		return Fingerprint{}, err
	}
	dir, err := o.scratch()
	if err != nil {
		return Fingerprint{}, err
	}
	defer o.removeScratch(dir)
	job, done, err := compileSmallest(ctx, o, probeJob(r, ep, dir), own)
	if err != nil {
		return Fingerprint{}, err
	}
	graph, err := readGraph(ctx, filepath.Join(job.Dir, done.Graph))
	if err != nil {
		return Fingerprint{}, err
	}
	stated, _, _ := ReadStated(ep.Name, true, graph) // of contradicting parts the first one counts
	print := Fingerprint{SDKVersion: cmp.Or(stated.SDKVersion, version),
		HardwareArchitecture: stated.HardwareArchitecture,
		CompatibilityString:  stated.CompatibilityString, IRVersion: graph.IRVersion,
		Seconds: done.Seconds}
	info, _ := EPByName(ep.Name)
	for _, used := range done.EPs {
		print.describe(used, info)
	}
	print.EPVersion = cmp.Or(print.EPVersion, version)
	return print, nil
}

// ProbeModel is the base name of the models that fingerprints and controls compile.
const ProbeModel = "probe.onnx"

//go:embed probes/*.onnx
var probeFiles embed.FS

// ProbeModels are tiny models for testing whether an EP compiles at all, in the order of trying:
// one Relu; then a graph that contains all others, so that one compile covers them; then the
// others, one node each. Package tinymodel writes them.
var ProbeModels = sync.OnceValue(func() (models [][]byte) {
	files, _ := probeFiles.ReadDir("probes") // the program's own
	for _, f := range files {
		model, _ := probeFiles.ReadFile("probes/" + f.Name())
		models = append(models, model)
	}
	return models
})

// probeJob is the job that compiles a probe model in the directory, with the options of
// fingerprints.
func probeJob(r Runtime, ep EP, dir string) Job {
	info, _ := EPByName(ep.Name)
	ep.Options = info.ForFingerprint(ep.Options)
	return Job{Runtime: r, EPs: []EP{ep}, Dir: dir, Output: "probe_ctx.onnx"}
}

const driverMetadata = "os_driver_version"

func (p *Fingerprint) describe(used EPUsed, info EPInfo) {
	p.EPVersion, p.Devices = used.Version, used.Devices
	for i, d := range used.Devices {
		if i == 0 {
			p.Device = d
		}
		for _, key := range append([]string{driverMetadata}, info.DriverMetadata...) {
			p.DriverVersion = cmp.Or(p.DriverVersion, d.DeviceMetadata[key], d.EPMetadata[key])
		}
	}
}

// StatedFacts has the facts that compiled graphs state about one EP.
type StatedFacts struct {
	SDKVersion string // attribute ep_sdk_version of the EP's nodes
	// attribute hardware_architecture, else a part of CompatibilityString
	HardwareArchitecture string
	CompatibilityString  string // metadata ep_compatibility_info.<EP>
}

// ReadStated reads the facts that the graphs of one build state about an EP. took reports whether
// the EP took a node; without one there are no facts. writes says that the EP writes compatibility
// strings. Otherwise a string is ignored, because it may be left over from the metadata of the
// source model. It fails if nodes or graphs contradict each other, and then also returns the first
// statement.
func ReadStated(ep string, writes bool, graphs ...*epmodel.Model) (s StatedFacts, took bool,
	err error) {
	for _, graph := range graphs {
		said := graph.Metadata["ep_compatibility_info."+ep]
		for _, node := range graph.Contexts {
			one := StatedFacts{node.SDKVersion, node.HardwareArchitecture, said}
			switch {
			case node.Source != ep && node.Source != "":
			case !took:
				s, took = one, true
			case s != one:
				err = fmt.Errorf("nodes of %s are of two SDK versions, hardware architectures or "+
					"compatibility strings", ep)
			}
		}
	}
	if !writes {
		s.CompatibilityString = ""
	}
	if info, known := EPByName(ep); known && s.HardwareArchitecture == "" {
		s.HardwareArchitecture = info.HardwareOf(s.CompatibilityString)
	}
	return s, took, err
}

// ErrNoModelCompiled is returned where an EP takes none of the tiny models. It may take others.
var ErrNoModelCompiled = errors.New("none of the tiny test models compiles")

// ErrNoContexts is returned for an EP that takes nodes and makes no EPContext nodes of them.
var ErrNoContexts = errors.New("it makes no compiled models: nothing to cache")

// compileSmallest compiles the first of the tiny models of which the EP takes a node. If it takes
// none, it compiles own's model with own's session options, unless own is nil. The compiled model
// is in Dir of the returned job, below job.Dir. The error is that of own's model, or without own
// that of the smallest model, which wraps ErrNoModelCompiled.
func compileSmallest(ctx context.Context, c Compiler, job Job, own *Job) (Job, Result, error) {
	dir, all := job.Dir, job
	var first error
	for i, model := range ProbeModels() {
		job.Dir = filepath.Join(dir, fmt.Sprint(i))
		job.Model = filepath.Join(job.Dir, ProbeModel)
		err := os.Mkdir(job.Dir, 0o700)
		if err == nil {
			err = os.WriteFile(job.Model, model, 0o600)
		}
		var done Result
		if err == nil {
			done, err = c.Compile(ctx, job, nil)
		}
		if err != nil && strings.Contains(err.Error(), "returned a NULL EPContext node") {
			return job, done, ErrNoContexts // in ONNX Runtime's words
		}
		if err == nil || !mayTryAnother(err) {
			return job, done, err
		}
		if i == 0 {
			first = err
		}
		// The second model contains all others, so if the EP takes no node of it, the others cannot
		// succeed either. The same is true if its error equals that of the first.
		if i == 1 && errors.As(err, new(*NoNodesError)) {
			break
		}
		if i == 1 && shortCause(err) == shortCause(first) {
			return job, Result{}, first
		}
	}
	if own == nil {
		return job, Result{}, fmt.Errorf("%w: %w", ErrNoModelCompiled, first)
	}
	all.Model, all.ModelFile, all.Dir = own.Model, own.ModelFile, filepath.Join(dir, "own")
	all.Session = own.Session
	if err := os.Mkdir(all.Dir, 0o700); err != nil {
		return all, Result{}, err
	}
	done, err := c.Compile(ctx, all, nil)
	return all, done, err
}

// mayTryAnother reports whether to try another model, because the EP refused this one without a
// crash.
func mayTryAnother(err error) bool {
	var refused *RefusedError
	return errors.As(err, new(*NoNodesError)) || errors.As(err, &refused) &&
		refused.Doing == "compile" && refused.Code >= 0
}

func shortCause(err error) string {
	var refused *RefusedError
	if errors.As(err, &refused) {
		return refused.Cause()
	}
	return err.Error()
}

// Control compiles the smallest model that each EP takes, and checks whether that loads: with the
// same libraries, in the same kind of process. If it does not load, a failed Check is the machine's
// fault and not the graph's: under MemoryDenyWriteExecute, for example, OpenVINO refuses intact
// artefacts with the error code of broken ones. dir is an empty private directory; own is as for
// Fingerprint. The first result that is not Passed is returned.
func Control(ctx context.Context, c Compiler, r Runtime, eps []EP, dir string,
	own *Job) (CheckResult, error) {
	result := CheckResult{Outcome: Passed}
	for i, ep := range eps {
		below := filepath.Join(dir, fmt.Sprint(i))
		if err := os.Mkdir(below, 0o700); err != nil {
			return CheckResult{}, err
		}
		job, done, err := compileSmallest(ctx, c, probeJob(r, ep, below), own)
		if err != nil {
			return CheckResult{}, fmt.Errorf("control of %s: %w", ep.Name, err)
		}
		job.GraphOptimizationLevel = "" // for the compile only
		result, err = c.Check(ctx, CheckJob{Runtime: job.Runtime, EPs: job.EPs,
			Graph: filepath.Join(job.Dir, done.Graph), Session: job.Session})
		if err != nil || result.Outcome != Passed {
			return result, err
		}
	}
	return result, nil
}
