//go:build linux && (amd64 || arm64)

package main

import (
	"bufio"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/compilers/dialogue"
	"github.com/epcached/epcached/compilers/ort"
)

// job is the state of one request.
type job struct {
	req     dialogue.Request
	in      *bufio.Reader // that the request came from
	env     *ort.Env
	tell    func(dialogue.Event) error
	result  dialogue.Result
	devices [][]ort.Device // per EP: those that were chosen

	mu     sync.Mutex
	errors []string // that ONNX Runtime logged; guarded by mu
}

// failed keeps what ONNX Runtime logs as an error: where an EP takes no node, nothing else says why. Callers up the stack log what those below
// logged with words around it, which adds nothing.
func (j *job) failed(text string) {
	text = strings.ToValidUTF8(strings.Join(strings.Fields(text[:min(len(text), dialogue.MaxErrorText)]), " "), "")
	j.mu.Lock()
	defer j.mu.Unlock()
	repeats := slices.ContainsFunc(j.errors, func(earlier string) bool { return strings.Contains(text, earlier) })
	if text != "" && !repeats && len(j.errors) < dialogue.MaxErrors {
		j.errors = append(j.errors, text)
	}
}

// logged gives what failed has kept.
func (j *job) logged() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.errors)
}

// do does the request.
func do(req dialogue.Request, in *bufio.Reader, tell func(dialogue.Event) error) (dialogue.Result, error) {
	if req.Do == dialogue.Try {
		return try(req), nil
	}
	j := &job{req: req, in: in, tell: tell}
	if req.Do == dialogue.Command {
		err := j.command()
		return j.result, err
	}
	if err := j.open(); err != nil {
		return dialogue.Result{}, err
	}
	if req.Do == dialogue.Conformance {
		err := j.conformance()
		j.result.Errors = j.logged()
		return j.result, err
	}
	// Execution providers may open their device as they are registered: not beside another process that is using it.
	early := req.Do == dialogue.Compile || req.Beside
	if !early {
		if err := j.awaitModel(); err != nil {
			return dialogue.Result{}, err
		}
	}
	if err := j.phase(dialogue.PhaseRegistering); err != nil {
		return dialogue.Result{}, err
	}
	if req.Do == dialogue.Probe {
		err := j.probe()
		return j.result, err
	}
	if err := j.register(); err != nil {
		return dialogue.Result{}, err
	}
	if early {
		if err := j.awaitModel(); err != nil {
			return j.result, err
		}
	}
	steps := map[string]func() error{dialogue.Compile: j.compile, dialogue.Load: j.load, dialogue.Compatibility: j.compatibility, dialogue.Run: j.run, dialogue.Compare: j.verify}
	next, ok := steps[req.Do]
	if !ok {
		return dialogue.Result{}, fmt.Errorf("unknown request %q", req.Do)
	}
	err := next()
	j.result.Errors = j.logged()
	return j.result, err
}

// awaitModel returns when the model is there.
func (j *job) awaitModel() error {
	if !j.req.Waits {
		return nil
	}
	return dialogue.ReadGo(j.in)
}

func (j *job) open() error {
	if err := j.phase(dialogue.PhaseStarting); err != nil {
		return err
	}
	api, err := ort.Open(j.req.ORTLibrary)
	if err != nil {
		return err
	}
	j.result.ORTVersion, j.result.ORTBuild = api.Version, api.Build
	j.env, err = api.NewEnv(os.Stderr, j.failed)
	return step(err, "start ONNX Runtime %s", api.Version)
}

// probe registers each EP, and lists what it offers. One that fails does not spoil the others.
func (j *job) probe() error {
	for _, ep := range j.req.EPs {
		r := dialogue.EPResult{Name: ep.Name, Library: ep.Library}
		if err := j.env.Register(ep.Name, ep.Library); err != nil {
			r.Error = err.Error()
		} else if devices, err := j.devicesOf(ep.Name); err != nil {
			r.Error = err.Error()
		} else {
			fill(&r, devices)
		}
		j.result.EPs = append(j.result.EPs, r)
	}
	return nil
}

// register registers all EPs and chooses their devices.
func (j *job) register() error {
	for _, ep := range j.req.EPs {
		if err := j.env.Register(registration(ep), ep.Library); err != nil {
			return step(err, "register %s from %q", ep.Name, ep.Library)
		}
	}
	for _, ep := range j.req.EPs {
		devices, err := j.devicesOf(ep.Name)
		if err != nil {
			return step(err, "list devices")
		}
		chosen, err := choose(ep, devices)
		if err != nil {
			return err
		}
		j.devices = append(j.devices, chosen)
		r := dialogue.EPResult{Name: ep.Name, Library: ep.Library}
		fill(&r, chosen)
		j.result.EPs = append(j.result.EPs, r)
	}
	return j.tell(dialogue.Event{EPs: j.result.EPs, Memory: peakMemory()})
}

// registration is the name that an EP's library is registered under. ONNX Runtime lets EPs list devices that are not there under this ending only.
func registration(ep dialogue.EP) string {
	for _, d := range ep.Devices {
		if d.Virtual() {
			return ep.Name + ".virtual"
		}
	}
	return ep.Name
}

func (j *job) phase(name string) error { return j.tell(dialogue.Event{Phase: name}) }

// devicesOf lists the devices under exactly this EP name: OpenVINO also has names with an ending, such as ".AUTO".
func (j *job) devicesOf(ep string) ([]ort.Device, error) {
	all, err := j.env.Devices()
	if err != nil {
		return nil, err
	}
	var devices []ort.Device
	for _, d := range all {
		if d.EP == ep {
			devices = append(devices, d)
		}
	}
	return devices, nil
}

// options makes session options with the EPs of the request in their order.
func (j *job) options() (*ort.SessionOptions, error) {
	o, err := j.env.NewSessionOptions()
	if err != nil {
		return nil, err
	}
	s := j.req.Options
	for key, value := range entries(s.Entries) {
		if err := o.Set(key, value); err != nil {
			return nil, step(err, "session option %s", key)
		}
	}
	for name, value := range s.FreeDimensions {
		if err := o.FixDimension(name, value); err != nil {
			return nil, step(err, "free dimension %s", name)
		}
	}
	for name, value := range s.FreeDimensionsByDenotation {
		if err := o.FixDenotation(name, value); err != nil {
			return nil, step(err, "free dimension of denotation %s", name)
		}
	}
	if s.GraphOptimizationLevel != "" {
		if err := o.SetGraphOptimization(s.GraphOptimizationLevel); err != nil {
			return nil, step(err, "graph optimisation level")
		}
	}
	if s.Threads > 0 {
		if err := o.SetThreads(s.Threads); err != nil {
			return nil, step(err, "threads")
		}
	}
	for i, ep := range j.req.EPs {
		if err := o.Append(j.devices[i], ep.Options); err != nil {
			return nil, step(err, "add %s to the session", ep.Name)
		}
	}
	return o, nil
}

// spinning is the session option by which ONNX Runtime's own threads wait for work in a loop.
const spinning = "session.intra_op.allow_spinning"

// entries gives a session's config entries with what a worker does otherwise than an application: its threads do not spin while the execution
// provider compiles on all cores, which changes nothing in the result. On two cores that is a twentieth of a compile.
func entries(asked map[string]string) map[string]string {
	all := map[string]string{spinning: "0"}
	maps.Copy(all, asked)
	return all
}

func (j *job) load() error {
	if len(j.req.Share) > 0 {
		return j.loadGroup()
	}
	if j.req.Against != "" {
		return j.compareLoads()
	}
	s, err := j.session()
	if err != nil || j.req.Zeros == 0 {
		return err
	}
	return j.runOnZeros([]*ort.Session{s})
}

// compareLoads measures the processor time of one load of the compiled graph and of one of its
// source. The time does not depend on what else the machine does. The graph is loaded once before,
// because the first session in a process also pays for what the EP sets up once.
func (j *job) compareLoads() error {
	sizes := j.req.Options
	fixed := sizes
	fixed.FreeDimensions, fixed.FreeDimensionsByDenotation = nil, nil
	for i, model := range []string{j.req.Model, j.req.Model, j.req.Against} {
		j.req.Options = fixed
		if model == j.req.Against {
			j.req.Options = sizes
		}
		if err := j.phase(dialogue.PhaseLoading); err != nil {
			return err
		}
		before, start := processorTime(), time.Now()
		o, err := j.options()
		if err != nil {
			return err
		}
		s, err := o.Open(model)
		if err != nil {
			return step(err, "load %q", model)
		}
		if i == 0 {
			j.result.Seconds = time.Since(start).Seconds()
		} else {
			j.result.LoadCPU = append(j.result.LoadCPU, (processorTime() - before).Seconds())
		}
		s.Release()
	}
	return nil
}

// processorTime is what this process has taken so far, in all its threads.
func processorTime() time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		return 0 // it cannot fail for this process
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

func (j *job) session() (*ort.Session, error) {
	if err := j.phase(dialogue.PhaseLoading); err != nil {
		return nil, err
	}
	start := time.Now()
	o, err := j.options()
	if err != nil {
		return nil, err
	}
	s, err := o.Open(j.req.Model)
	j.result.Seconds = time.Since(start).Seconds()
	return s, step(err, "load %q", j.req.Model)
}

func (j *job) compatibility() error {
	for _, info := range j.req.Infos {
		verdict, err := j.env.Compatibility(j.devices[0], info)
		if err != nil {
			fmt.Fprintln(os.Stderr, "compatibility:", err) // this EP or device gives no verdicts: that is "unknown"
			verdict = 0
		}
		j.result.Verdicts = append(j.result.Verdicts, verdict)
	}
	return nil
}

// choose picks the devices that any of the selectors matches; each selector must match one.
func choose(ep dialogue.EP, devices []ort.Device) ([]ort.Device, error) {
	selectors := ep.Devices
	if len(selectors) == 0 {
		selectors = []dialogue.DeviceSelector{{}}
	}
	taken := make([]bool, len(devices))
	for _, s := range selectors {
		found, example := 0, uint32(0)
		for i, d := range devices {
			if s.Fits(factsOf(d)) {
				taken[i], example = true, d.DeviceID
				found++
			}
		}
		if found > 1 && s.Virtual() { // EPs list every kind there is, and compile for one
			return nil, fmt.Errorf("%d devices of %s fit %s: say which, by its device id, such as device=%#x; it lists %s",
				found, ep.Name, s, example, s.Listed(factsOfAll(devices)))
		}
		if found == 0 {
			return nil, fmt.Errorf("%s has no %s; it lists %s", ep.Name, s, s.Listed(factsOfAll(devices)))
		}
	}
	var chosen []ort.Device
	for i, d := range devices {
		if taken[i] {
			chosen = append(chosen, d)
		}
	}
	return chosen, nil
}

// fill describes devices in the dialogue's terms.
func fill(r *dialogue.EPResult, devices []ort.Device) {
	for _, d := range devices {
		r.Version = d.EPMetadata["version"]
	}
	r.Devices = append(r.Devices, factsOfAll(devices)...)
}

func factsOf(d ort.Device) dialogue.DeviceFacts {
	return dialogue.DeviceFacts{Type: d.Type, VendorID: d.VendorID, Vendor: d.Vendor, DeviceID: d.DeviceID,
		EPMetadata: d.EPMetadata, DeviceMetadata: d.DeviceMetadata}
}

func factsOfAll(devices []ort.Device) []dialogue.DeviceFacts {
	var list []dialogue.DeviceFacts
	for _, d := range devices {
		list = append(list, factsOf(d))
	}
	return list
}
