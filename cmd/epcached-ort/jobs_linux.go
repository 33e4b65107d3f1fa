//go:build linux && (amd64 || arm64)

package main

import (
	"bufio"
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/workerproto"
)

type job struct {
	req     workerproto.Request
	in      *bufio.Reader // reads requests
	env     *ort.Env
	report  func(workerproto.Event) error
	result  workerproto.Result
	devices [][]ort.Device // chosen devices of each EP

	mu     sync.Mutex
	errors []string // logged by ONNX Runtime; guarded by mu
}

// logError keeps the errors that ONNX Runtime logs, because only they say why an EP takes no node.
// It drops repetitions, because callers log an error again with text around it.
func (j *job) logError(text string) {
	text = strings.ToValidUTF8(
		strings.Join(strings.Fields(text[:min(len(text), workerproto.MaxErrorText)]), " "), "")
	j.mu.Lock()
	defer j.mu.Unlock()
	repeats := slices.ContainsFunc(j.errors, func(earlier string) bool {
		return strings.Contains(text, earlier)
	})
	if text != "" && !repeats && len(j.errors) < workerproto.MaxErrors {
		j.errors = append(j.errors, text)
	}
}

func (j *job) run() error {
	switch j.req.Do {
	case workerproto.TrySandbox:
		return j.trySandbox()
	case workerproto.Command:
		return j.command()
	}
	if err := j.open(); err != nil {
		return err
	}
	// EPs may open their device when they are registered, which fails while another process uses
	// it.
	early := j.req.Do == workerproto.Compile || j.req.Beside
	if err := j.awaitModel(!early); err != nil {
		return err
	}
	if err := j.phase(workerproto.PhaseRegistering); err != nil {
		return err
	}
	if j.req.Do == workerproto.Probe {
		return j.probe()
	}
	if err := j.register(); err != nil {
		return err
	}
	if err := j.awaitModel(early); err != nil {
		return err
	}
	switch j.req.Do {
	case workerproto.Compile:
		return j.compile()
	case workerproto.Load:
		return j.load()
	case workerproto.Compatibility:
		return j.compatibility()
	case workerproto.Compare:
		return j.compareOutputs()
	}
	return fmt.Errorf("unknown request %q", j.req.Do)
}

func (j *job) awaitModel(now bool) error {
	if !now || !j.req.Waits {
		return nil
	}
	return workerproto.ReadGo(j.in)
}

func (j *job) open() error {
	if err := j.phase(workerproto.PhaseStarting); err != nil {
		return err
	}
	api, err := ort.Open(j.req.ORTLibrary)
	if err != nil {
		return err
	}
	j.result.ORTVersion, j.result.ORTBuild = api.Version, api.Build
	j.env, err = api.NewEnv(os.Stderr, j.logError)
	return step(err, "start ONNX Runtime %s", api.Version)
}

// probe registers each EP, and lists its devices. It continues after an EP that fails.
func (j *job) probe() error {
	for _, ep := range j.req.EPs {
		err := j.registerLibrary(ep.Name, ep.Library)
		var devices []ort.Device
		if err == nil {
			devices, err = j.env.DevicesOf(ep.Name)
		}
		if err == nil && len(devices) == 0 {
			err = j.otherName(ep)
		}
		r := describeEP(ep, devices)
		if err != nil {
			r.Error = err.Error()
		}
		j.result.EPs = append(j.result.EPs, r)
	}
	return nil
}

// otherName returns an error that says under which name a library lists a device, nil if it lists
// none.
func (j *job) otherName(ep workerproto.EP) error {
	all, err := j.env.Devices()
	for _, d := range all {
		if d.EPMetadata["library_path"] == ep.Library && !strings.HasPrefix(d.EP, ep.Name+".") {
			return fmt.Errorf("the library has a device of %q: name its execution provider so by "+
				"ep_libraries in [[runtime]]", d.EP)
		}
	}
	return err
}

func (j *job) register() error {
	for _, ep := range j.req.EPs {
		// ONNX Runtime lists an EP's virtual devices only under a name with this suffix.
		name := ep.Name
		if slices.ContainsFunc(ep.Devices, workerproto.DeviceSelector.Virtual) {
			name += ".virtual"
		}
		if err := j.registerLibrary(name, ep.Library); err != nil {
			return step(err, "register %s from %q", ep.Name, ep.Library)
		}
	}
	for _, ep := range j.req.EPs {
		devices, err := j.env.DevicesOf(ep.Name)
		if err != nil {
			return step(err, "list devices")
		}
		chosen, err := ort.Choose(ep, devices)
		if err != nil {
			return err
		}
		j.devices = append(j.devices, chosen)
		j.result.EPs = append(j.result.EPs, describeEP(ep, chosen))
	}
	return j.report(workerproto.Event{EPs: j.result.EPs, Memory: peakMemory()})
}

func (j *job) phase(name string) error { return j.report(workerproto.Event{Phase: name}) }

// modelPhase reports a phase and the current model, so that a crash can be attributed to it.
func (j *job) modelPhase(name string, member int) error {
	return j.report(workerproto.Event{Phase: name, Member: member + 1})
}

func (j *job) options() (*ort.SessionOptions, error) {
	o, err := j.env.NewSessionOptions()
	if err != nil {
		return nil, err
	}
	s, failed := j.req.Options, error(nil)
	try := func(err error, format string, args ...any) {
		failed = cmp.Or(failed, step(err, format, args...))
	}
	for key, value := range entries(s.SessionOptions) {
		try(o.Set(key, value), "session option %s", key)
	}
	for name, value := range s.FreeDimensions {
		try(o.FixDimension(name, value), "free dimension %s", name)
	}
	for name, value := range s.FreeDimensionsByDenotation {
		try(o.FixDenotation(name, value), "free dimension of denotation %s", name)
	}
	if s.GraphOptimizationLevel != "" {
		try(o.SetGraphOptimization(s.GraphOptimizationLevel), "graph optimisation level")
	}
	for i, ep := range j.req.EPs {
		try(o.Append(j.devices[i], ep.Options), "add %s to the session", ep.Name)
	}
	return o, failed
}

const spinningOptions = "session.intra_op.allow_spinning"

// entries returns a session's config entries, with the worker's own, which disable spinning of ONNX
// Runtime's threads while the EP compiles on all cores. The result is the same, and on two cores a
// compile is a twentieth faster.
func entries(asked map[string]string) map[string]string {
	all := map[string]string{spinningOptions: "0"}
	maps.Copy(all, asked)
	return all
}

func (j *job) compatibility() error {
	for _, info := range j.req.Infos {
		verdict, err := j.env.Compatibility(j.devices[0], info)
		if err != nil {
			// this EP or device gives no verdicts: that is "unknown"
			fmt.Fprintln(os.Stderr, "compatibility:", err)
			verdict = 0
		}
		j.result.Verdicts = append(j.result.Verdicts, verdict)
	}
	return nil
}

// describeEP describes an EP and some of its devices for the dialogue.
func describeEP(ep workerproto.EP, devices []ort.Device) workerproto.EPResult {
	r := workerproto.EPResult{Name: ep.Name, Library: ep.Library, Devices: ort.Facts(devices)}
	for _, d := range devices {
		r.Version = d.EPMetadata["version"]
	}
	return r
}
