package cache

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/internal/apierr"
)

const unlisted = "UnlistedExecutionProvider" // has an entry in no table

// noEntry is a cache over ONNX Runtime with a release of the test EP under a name that has no
// entry.
func noEntry(t *testing.T, release compilertest.Release) *bench {
	release.Name = unlisted
	r := compilertest.TestEPRuntime(t, "1.31.1", release)
	ort := compilers.NewORT(compilers.ORTOptions{Worker: compilertest.Worker(t)})
	t.Cleanup(func() { require.NoError(t, ort.Close()) })
	return newBenchWith(t, func(o *Options) {
		o.Compiler, o.Runtimes = ort, []compilers.Runtime{r}
		o.AllowOptions = []string{unlisted + "/target", unlisted + "/fault"}
	})
}

// forNoEntry asks for a model of one operator with two inputs of so many elements.
func (b *bench) forNoEntry(op string, elements int, options map[string]string) *request.Request {
	value := func(name string) tinymodel.Value {
		return tinymodel.Value{Name: name, Type: tinymodel.Float, Shape: []any{elements}}
	}
	m := tinymodel.Model{Nodes: []tinymodel.Node{{Op: op, Inputs: []string{"a", "b"},
		Outputs: []string{"y"}}},
		Inputs: []tinymodel.Value{value("a"), value("b")}, Outputs: []tinymodel.Value{value("y")}}
	path := filepath.Join(b.TempDir(), "m.onnx")
	require.NoError(b, os.WriteFile(path, m.Encode(), 0o644))
	r := b.request(b.openFile(path))
	r.EPs = []identity.EP{{Name: unlisted, Options: options}}
	return r
}

// The target of an EP without an entry may depend on any of its options.
func TestOptionsOfAnEPWithoutEntryBelongToItsFingerprint(t *testing.T) {
	b := noEntry(t, compilertest.Release{})
	for _, target := range []string{"1", "2"} {
		a := b.acquire(b.forNoEntry("Mul", 4, map[string]string{"target": "sim-" + target}))
		require.Equal(t, request.Compiled, a.Outcome)
		require.Equal(t, "sim-"+target, a.Build.EPs[0].HardwareArchitecture)
		require.Contains(t, a.Build.EPs[0].CompatibilityString, "hw=sim-"+target)
	}
}

// ONNX Runtime's example plugin EP takes one Mul and nothing else: no Relu, and not two nodes.
func TestAnEPThatTakesOneMulOnly(t *testing.T) {
	b := noEntry(t, compilertest.Release{Ops: "Mul", Single: true})
	require.Equal(t, request.Compiled, b.acquire(b.forNoEntry("Mul", 4, nil)).Outcome)
	require.Equal(t, request.Hit, b.acquire(b.forNoEntry("Mul", 4, nil)).Outcome)
	b.reopen()
	require.Equal(t, request.Hit, b.acquire(b.forNoEntry("Mul", 4, nil)).Outcome)
	require.Empty(t, b.probed().MarkErrors)
}

// Where an EP takes none of the tiny models, the request's own model is what it is probed with.
func TestAnEPThatTakesNoTinyModel(t *testing.T) {
	b := noEntry(t, compilertest.Release{Least: 1000})
	a := b.acquire(b.forNoEntry("Mul", 1000, map[string]string{"target": "sim-2"}))
	require.Equal(t, request.Compiled, a.Outcome)
	require.Equal(t, "1.0.0", a.Build.EPs[0].SDKVersion)
	require.Equal(t, "sim-2", a.Build.EPs[0].HardwareArchitecture)
	require.Equal(t, request.Hit, b.acquire(b.forNoEntry("Mul", 1000,
		map[string]string{"target": "sim-2"})).Outcome)
	b.reopen()
	require.Equal(t, request.Hit, b.acquire(b.forNoEntry("Mul", 1000,
		map[string]string{"target": "sim-2"})).Outcome)

	// A model that it does not take is refused for that, and for no option.
	e := b.refused(b.forNoEntry("Mul", 999, nil))
	require.Equal(t, apierr.CompileFailed, e.Class)
	require.Equal(t, "no node taken", e.Facts["reason"])
	require.NotContains(t, e.Hint, "option")
	require.Regexp(t,
		`^model "m.onnx" does not compile, and neither do the smallest models for `+
			`UnlistedExecutionProvider: UnlistedEx`, e.Text)
	e = b.refused(b.forNoEntry("Mul", 999, map[string]string{"target": "sim-2"}))
	require.Contains(t, e.Hint, "target=sim-2")
	left, err := filepath.Glob(filepath.Join(b.state, "staging", "*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// Where an EP refuses the tiny models all in the same words, the request's model is not blamed.
func TestAnEPThatRefusesEverything(t *testing.T) {
	b := noEntry(t, compilertest.Release{})
	e := b.refused(b.forNoEntry("Mul", 4, map[string]string{"fault": "fail@compile"}))
	require.Regexp(t,
		`^execution provider UnlistedExecutionProvider cannot compile here: .*asked to fail`,
		e.Text)
	require.Contains(t, e.Hint, "fault=fail@compile")
	require.Equal(t, "refused", e.Facts["reason"])
}

// An EP that ends its worker is named with the step and its last words, not its files or the model.
func TestAnEPThatAborts(t *testing.T) {
	for stage, says := range map[string]string{
		"register": "compiler crashed (SIGABRT): aborted while registering",
		"probe":    "compiler crashed (SIGABRT): aborted while registering",
		"create":   "compiler crashed (SIGABRT): aborted while compiling",
		"compile":  "compiler crashed (SIGABRT): aborted while compiling",
	} {
		t.Run(stage, func(t *testing.T) {
			b := noEntry(t, compilertest.Release{Fault: "abort@" + stage})
			options := map[string]string{"fault": "abort@" + stage}
			if stage == "register" || stage == "probe" {
				options = nil
			}
			e := b.refused(b.forNoEntry("Mul", 4, options))
			require.Contains(t, e.Text, says)
			require.NotContains(t, e.Hint, "damaged")
		})
	}
}

// fingerprinted counts the fingerprints that are made.
type fingerprinted struct {
	*compilers.ORT
	made atomic.Int64
}

func (f *fingerprinted) Fingerprint(ctx context.Context, r compilers.Runtime, eps []compilers.EP,
	own *compilers.Job) ([]compilers.Fingerprint, error) {
	f.made.Add(1)
	return f.ORT.Fingerprint(ctx, r, eps, own)
}

// An EP that makes no compiled models is known as such, also after a restart: its sessions get the
// sentence without a worker, and the doctor has nothing to mend.
func TestAnEPWithoutCompiledModelsCostsNothing(t *testing.T) {
	b := noEntry(t, compilertest.Release{Plain: true})
	f := &fingerprinted{ORT: b.cache.compiler.(*compilers.ORT)}
	b.close()
	change := b.change
	b.change = func(o *Options) {
		change(o)
		o.Compiler = f
	}
	b.open()
	for range 2 {
		for range 2 {
			e := b.refused(b.forNoEntry("Mul", 4, nil))
			require.Equal(t, "execution provider "+unlisted+
				": it makes no compiled models: nothing to cache", e.Text)
			require.Equal(t, "no node taken", e.Facts["reason"])
			b.waits(runtimes.FailureLifetime + time.Second)
		}
		require.EqualValues(t, 1, f.made.Load())
		var found []query.Advice
		for _, a := range b.doctor(b.self()) {
			if strings.HasSuffix(a.Subject, unlisted) {
				found = append(found, a)
			}
		}
		require.Len(t, found, 1)
		require.Equal(t, query.SeverityInfo, found[0].Severity)
		require.Contains(t, found[0].Text, "it makes no compiled models: nothing to cache")
		require.EqualValues(t, 1, f.made.Load())
		b.reopen()
	}
}

// picky is a compiler that takes none of the tiny models.
type picky struct{ *opinion }

func (p picky) Fingerprint(ctx context.Context, r compilers.Runtime, eps []compilers.EP,
	own *compilers.Job) ([]compilers.Fingerprint, error) {
	if own == nil {
		return nil, fmt.Errorf("%w: %w", compilers.ErrNoModelCompiled,
			&compilers.NoNodesError{EPs: []string{eps[0].Name}})
	}
	return p.opinion.Fingerprint(ctx, r, eps, own)
}

func (p picky) Compile(ctx context.Context, job compilers.Job,
	progress func(string)) (compilers.Result, error) {
	if filepath.Base(job.Model) == compilers.ProbeModel {
		return compilers.Result{}, &compilers.NoNodesError{EPs: []string{job.EPs[0].Name}}
	}
	return p.opinion.Compile(ctx, job, progress)
}

// Whether anything loads here is tried with the request's own model where an EP takes none of the
// tiny ones.
func TestControlWithTheRequestsOwnModel(t *testing.T) {
	o := &opinion{load: compilers.Failed}
	b := newOpinion(t, o, request.Policy{})
	b.wrap = picky{o}
	b.reopen()
	o.broken.Store(true)
	control := func() string {
		broken, err := b.cache.loadChecker.Control(t.Context(),
			b.planned(b.request(b.model(1))).JudgeTarget())
		require.NoError(t, err)
		return broken
	}
	require.Equal(t, "incompatible magic", control())
	o.broken.Store(false)
	require.Empty(t, control())
}

// A selector that fits nothing is reported with all that it says, beside the devices as far as it
// may distinguish them.
func TestUnmatchedDeviceSelectorNamesTheDevices(t *testing.T) {
	b, _, _ := newTestEPBench(t)
	for said, d := range map[string]compilers.Device{
		"has no NPU here; it has CPU (vendor 0x": {Type: "NPU"},
		"has no CPU (vendor 0x1, device 0x2) here; it has CPU (vendor 0x": {Type: "CPU",
			VendorID: 1, DeviceID: 2},
		"has no device (device_id=7, x=y) here; it has CPU (vendor 0x": {
			Metadata: map[string]string{"device_id": "7", "x": "y"}},
		"no is_virtual); NPU (vendor 0xecac epcached, device 0x1, is_virtual=1)": {Type: "NPU",
			DeviceID: 7, Metadata: map[string]string{compilers.IsVirtual: "1"}},
		"device_id=0, no x); CPU (vendor 0x": {Metadata: map[string]string{"device_id": "7",
			"x": "y"}},
		"has no NPU (device 0x7, is_virtual=1); it lists CPU (vendor 0x": {Type: "NPU",
			DeviceID: 7, Metadata: map[string]string{compilers.IsVirtual: "1"}},
	} {
		r := b.request(b.model(1))
		r.EPs = []identity.EP{{Name: compilertest.TestEP, Devices: []compilers.Device{d}}}
		require.Contains(t, b.refused(r).Text, said)
	}
}
