//go:build linux && (amd64 || arm64)

package cache

import (
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/internal/apierr"
)

const openVINO = "OpenVINOExecutionProvider"

// lesserProcessor has every EP that uses oneDNN compile and run as on a processor without AVX.
func lesserProcessor(t *testing.T) { t.Setenv("ONEDNN_MAX_CPU_ISA", "SSE41") }

// runCounter is a compiler that counts how often something is run on zeros.
type runCounter struct {
	*compilers.ORT
	runs atomic.Int64
}

func (r *runCounter) Check(ctx context.Context, job compilers.CheckJob) (
	compilers.CheckResult, error) {
	if job.Zeros > 0 {
		r.runs.Add(1)
	}
	return r.ORT.Check(ctx, job)
}

// newOpenVINOBench is a cache over one release of OpenVINO's EP.
func newOpenVINOBench(t *testing.T, name string) (*bench, *runCounter) {
	r := compilertest.Runtime(t, name)
	ort := &runCounter{ORT: compilers.NewORT(compilers.ORTOptions{Worker: compilertest.Worker(t)})}
	t.Cleanup(func() { require.NoError(t, ort.Close()) })
	b := newBenchWith(t, func(o *Options) { o.Compiler, o.Runtimes = ort, []compilers.Runtime{r} })
	return b, ort
}

// forOpenVINO asks for a model that ONNX Runtime leaves as it is.
func (b *bench) forOpenVINO(path string, miss request.OnMiss) *request.Request {
	r := b.request(b.openFile(path))
	r.EPs, r.OnMiss, r.GraphOptimizationLevel = []identity.EP{{Name: openVINO}}, miss, "disable_all"
	return r
}

// collected is a real model.
func collected(t *testing.T, name string) string {
	path := filepath.Join(os.Getenv("EPCACHED_MODELS"), name, "model.onnx")
	if _, err := os.Stat(path); err != nil {
		t.Skipf("NOT TESTED WITH A REAL MODEL: %v; testdata/fetch-models gets it", err)
	}
	return path
}

// inThrees is a model with a free dimension that has to be a multiple of 3.
func inThrees(t *testing.T) string {
	m := tinymodel.Model{
		Nodes: []tinymodel.Node{
			{Name: "r", Op: "Reshape", Inputs: []string{"x", "shape"}, Outputs: []string{"r"}},
			{Name: "y", Op: "Relu", Inputs: []string{"r"}, Outputs: []string{"y"}},
		},
		Inputs:  []tinymodel.Value{{Name: "x", Type: tinymodel.Float, Shape: []any{"n"}}},
		Outputs: []tinymodel.Value{{Name: "y", Type: tinymodel.Float, Shape: []any{"thirds", 3}}},
		Initializers: []tinymodel.Tensor{{Name: "shape", Type: tinymodel.Int64, Shape: []int64{2},
			Raw: binary.LittleEndian.AppendUint64(slices.Repeat([]byte{255}, 8), 3)}},
	}
	path := filepath.Join(t.TempDir(), "threes.onnx")
	require.NoError(t, os.WriteFile(path, m.Encode(), 0o644))
	return path
}

// requireRuns has an answer run as an application does.
func (b *bench) requireRuns(ort *runCounter, a *request.Answer) {
	b.Helper()
	rt := b.cache.runtimes.All()[0].LastContent().Spec
	ep := compilers.EP{Name: openVINO, Devices: []compilers.Device{{Type: "CPU"}}}
	job := compilers.CheckJob{Runtime: rt, EPs: []compilers.EP{ep},
		Graph: filepath.Join(a.Path, a.Graph),
		Session: compilers.Session{SessionOptions: a.SessionOptions,
			GraphOptimizationLevel: a.GraphOptimizationLevel}, Zeros: 1}
	result, err := ort.ORT.Check(b.Context(), job) // which does not count
	require.NoError(b, err)
	require.Equal(b, compilers.Passed, result.Outcome, result.Text)
}

// requireStale has a build refused, and gives the reason.
func (b *bench) requireStale(path string) string {
	b.Helper()
	e := b.refused(b.forOpenVINO(path, request.Fail))
	require.Equal(b, apierr.Stale, e.Class)
	return e.Text
}

// These releases state no hardware: what was compiled for a greater processor may fail on a lesser
// one as late as in Run. Nothing of a store of another machine is answered before it was run once.
func TestBuildOfAnotherMachineClassMustRun(t *testing.T) {
	runs, doesNotRun := collected(t, "tiny-convolution"), collected(t, "minilm-int8")
	doesNotLoad := collected(t, "silero-vad")
	runsLarger := collected(t, "rapidocr-cls") // its free dimensions have to be larger than 1
	notOnZeros := inThrees(t)
	const equal = "compiled by an equal library of " + openVINO
	for name, models := range map[string][]string{
		"openvino-1.4.0": {runs, doesNotRun, doesNotLoad, runsLarger, notOnZeros},
		"openvino-1.6.1": {runs, doesNotRun},
	} {
		t.Run(name, func(t *testing.T) {
			b, ort := newOpenVINOBench(t, name)
			for _, path := range models {
				a := b.acquire(b.forOpenVINO(path, request.Wait))
				require.Regexp(t, "^cpu:[0-9a-f]{16}$", a.Build.EPs[0].HardwareArchitecture)
				require.Equal(t, request.Hit, b.acquire(b.forOpenVINO(path, request.Fail)).Outcome)
			}
			require.Zero(t, ort.runs.Load(), "this machine's own builds need no trial")
			change, copies := b.change, b.copies()
			lesserProcessor(t)
			other := copies(t)
			e := other.notFound(other.forOpenVINO(runs, request.Fail), "")
			require.Contains(t, e.Text, "compiled on a machine of class cpu:",
				"without a daemon none runs it")
			other.change = change
			other.openSound()

			a := other.acquire(other.forOpenVINO(runs, request.Fail))
			require.Equal(t, request.Hit, a.Outcome)
			require.Equal(t, compilers.PreferRecompilation, a.Compatibility.Verdict)
			require.Contains(t, a.Compatibility.Reason,
				"it loads and runs; "+equal+" on another class of machine")
			other.requireRuns(ort, a)
			why := other.requireStale(doesNotRun)
			require.Contains(t, why, "is unsupported: it loads and does not run: ")
			if len(models) > 2 {
				why = other.requireStale(doesNotLoad)
				require.Contains(t, why, "is unsupported: it does not load: ")
				a = other.acquire(other.forOpenVINO(runsLarger, request.Fail))
				require.Contains(t, a.Compatibility.Reason, "it loads and runs; "+equal)
				why = other.requireStale(notOnZeros)
				require.Contains(t, why,
					"is unknown: running it cannot be tested on this machine: it does not run "+
						"on zeros")
			}
			a = other.acquire(other.forOpenVINO(doesNotRun, request.Wait))
			require.Equal(t, request.Compiled, a.Outcome)
			other.requireRuns(ort, a)

			tried := ort.runs.Load()
			other.reopen()
			for _, path := range []string{runs, doesNotRun} {
				require.Equal(t, request.Hit,
					other.acquire(other.forOpenVINO(path, request.Fail)).Outcome)
			}
			require.Equal(t, tried, ort.runs.Load(), "a build is tried once")
			if len(models) == 2 {
				return
			}
			serving := copies(t)
			serving.change = func(o *Options) {
				change(o)
				o.Policies[""] = request.Policy{Unknown: request.PolicyServe,
					MeasureGain: new(bool)}
			}
			serving.openSound()
			why = serving.requireStale(doesNotRun)
			require.Contains(t, why, "it loads and does not run: ", "no policy has it served")
			a = serving.acquire(serving.forOpenVINO(notOnZeros, request.Fail))
			require.Equal(t, compilers.Unknown, a.Compatibility.Verdict)
			require.Contains(t, a.Compatibility.Reason, "and neither does its source model")
		})
	}
}

// recordedEarlier has the answer's build recorded as epcached did before it knew machine classes.
func (b *bench) recordedEarlier(a *request.Answer) {
	b.Helper()
	earlier := *a.Build
	earlier.EPs = slices.Clone(a.Build.EPs)
	earlier.EPs[0].HardwareArchitecture = ""
	earlier.ID[0] ^= 1
	earlier.BuildKey = identity.BuildKey(earlier.RequestKey, earlier.EPs, earlier.Route)
	b.publish(&earlier)
	names := []string{a.Build.BuildKey.String()}
	_, err := b.cache.Remove(b.Context(), b.self(), names, false, false)
	require.NoError(b, err)
}

// Where a build was made is not known of those that are there already: each is run once, and stays
// the best there is.
func TestBuildsOfUnknownMachinesAreRunOnce(t *testing.T) {
	b, ort := newOpenVINOBench(t, "openvino-1.4.0")
	path := collected(t, "tiny-convolution")
	b.recordedEarlier(b.acquire(b.forOpenVINO(path, request.Wait)))
	for range 2 {
		a := b.acquire(b.forOpenVINO(path, request.Fail))
		require.Equal(t, request.Hit, a.Outcome)
		require.Equal(t, compilers.Optimal, a.Compatibility.Verdict)
		require.Contains(t, a.Compatibility.Reason,
			"it loads and runs; compiled by an equal library of "+
				openVINO+" on an unknown machine")
		require.EqualValues(t, 1, ort.runs.Load())
		b.reopen()
	}
	b.close()
	e := b.notFound(b.forOpenVINO(path, request.Fail), "")
	require.Contains(t, e.Text, "the machine that compiled it is unknown")
}

// An artefact that an application puts states no hardware either, so it is run before others get
// it.
func TestPutIsRunWhereItStatesNoHardware(t *testing.T) {
	b, ort := newOpenVINOBench(t, "openvino-1.4.0")
	path := collected(t, "tiny-convolution")
	claim := b.acquire(b.forOpenVINO(path, request.ForClaim))
	dir := t.TempDir()
	rt := b.cache.runtimes.All()[0].LastContent().Spec
	made, err := ort.Compile(t.Context(), compilers.Job{Runtime: rt, Model: path, Dir: dir,
		EPs: []compilers.EP{{Name: openVINO}}, Output: claim.Claim.Output, Route: claim.Claim.Route,
		Session: compilers.Session{GraphOptimizationLevel: "disable_all"}}, nil)
	require.NoError(t, err)
	taken, err := b.cache.Claims.Put(t.Context(), b.self(), b.putOf(claim, dir, made), nil)
	require.NoError(t, err)
	defer taken.View.Close()
	require.Regexp(t, "^cpu:", taken.Build.EPs[0].HardwareArchitecture)
	require.Equal(t, request.Hit, b.acquire(b.forOpenVINO(path, request.Fail)).Outcome)
	require.EqualValues(t, 1, ort.runs.Load())
}

// Every model of a group is run.
func TestGroupOfAnotherMachineClassIsRun(t *testing.T) {
	b, ort := newOpenVINOBench(t, "openvino-1.6.1")
	group := func(last string) *request.Request {
		r := b.forOpenVINO(collected(t, "tiny-convolution"), request.Wait)
		r.Group = []identity.Files{{Name: "second", Graph: b.openFile(collected(t, last))}}
		return r
	}
	for _, last := range []string{"tiny-mlp", "minilm-int8"} {
		require.Equal(t, request.Compiled, b.acquire(group(last)).Outcome)
	}
	change, copies := b.change, b.copies()
	lesserProcessor(t)
	other := copies(t)
	other.change = change
	other.openSound()
	r := group("tiny-mlp")
	r.OnMiss = request.Fail
	a := other.acquire(r)
	require.Equal(t, request.Hit, a.Outcome)
	require.Contains(t, a.Compatibility.Reason, "it loads and runs")
	require.EqualValues(t, 1, ort.runs.Load())
	r = group("minilm-int8")
	r.OnMiss = request.Fail
	require.Contains(t, other.refused(r).Text, "it loads and does not run")
}

// Nor does what a user compiled elsewhere and has adopted: it is run before it is served.
func TestAdoptedModelIsRunWhereItStatesNoHardware(t *testing.T) {
	paths := []string{collected(t, "tiny-convolution"), collected(t, "minilm-int8")}
	greater, _ := newOpenVINOBench(t, "openvino-1.6.1")
	var compiled []shipped
	for _, path := range paths {
		compiled = append(compiled,
			greater.ship(greater.acquire(greater.forOpenVINO(path, request.Wait))))
	}
	lesserProcessor(t)
	b, ort := newOpenVINOBench(t, "openvino-1.6.1")
	ask := func(s shipped) *request.Answer {
		r := b.adopts(s, identity.EP{Name: openVINO})
		r.GraphOptimizationLevel = "disable_all"
		return b.acquire(r)
	}
	a := ask(compiled[0])
	require.Equal(t, request.Adopted, a.Outcome, a.Warnings)
	require.Equal(t, compilers.ProcessorClass(), a.Build.EPs[0].HardwareArchitecture)
	require.EqualValues(t, 1, ort.runs.Load())
	for range 2 {
		a = ask(compiled[1])
		require.Equal(t, request.PassThrough, a.Outcome)
		require.Contains(t, strings.Join(a.Warnings, "\n"),
			"it does not run on zeros, and its source")
	}
	require.EqualValues(t, 4, ort.runs.Load(), "with each size once, and as it was taken in")
}
