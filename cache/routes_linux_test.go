//go:build linux && (amd64 || arm64)

package cache

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
)

// threeParts has three Relu nodes with a node between each that the test EP leaves to the CPU.
func threeParts() tinymodel.Model {
	value := func(name string) tinymodel.Value {
		return tinymodel.Value{Name: name, Type: tinymodel.Float, Shape: []any{2, 16}}
	}
	m := tinymodel.Model{Inputs: []tinymodel.Value{value("x")},
		Outputs: []tinymodel.Value{value("y")}}
	at := "x"
	for _, op := range []string{"Relu", "Neg", "Relu", "Neg", "Relu"} {
		out := at + strings.ToLower(op)
		if len(m.Nodes) == 4 {
			out = "y"
		}
		m.Nodes = append(m.Nodes,
			tinymodel.Node{Name: "to_" + out, Op: op, Inputs: []string{at}, Outputs: []string{out}})
		at = out
	}
	return m
}

// Every form that ONNX Runtime's design knows passes through the whole cache unchanged: keyed,
// compiled, validated, loaded, stored and served again.
func TestFormsOfContexts(t *testing.T) {
	for name, row := range map[string]struct {
		change func(*request.Request)
		files  int
		check  string
		nodes  func(t *testing.T, nodes []epmodel.Context)
	}{
		"one primary node, and secondary ones": {nil, 2, compilers.Passed,
			func(t *testing.T, nodes []epmodel.Context) {
				mains := 0
				for _, n := range nodes {
					mains += int(n.MainContext)
				}
				require.Equal(t, 1, mains)
			}},
		"several primary nodes and binaries": {
			func(r *request.Request) { r.EPs[0].Options = map[string]string{"primaries": "each"} },
			4, compilers.Passed, func(t *testing.T, nodes []epmodel.Context) {
				for _, n := range nodes {
					require.EqualValues(t, 1, n.MainContext)
					require.NotEmpty(t, n.CacheContext)
				}
			}},
		"several primary nodes, embedded": {func(r *request.Request) {
			r.Embed,
				r.EPs[0].Options = true, map[string]string{"primaries": "each"}
		}, 1, compilers.Passed, func(t *testing.T, nodes []epmodel.Context) {
			for _, n := range nodes {
				require.Positive(t, n.Inline.Length)
			}
		}},
		"embedded": {func(r *request.Request) { r.Embed = true }, 1,
			compilers.Passed, nil},
		"by session options": {
			func(r *request.Request) { r.Route = compilers.RouteSessionOptions }, 2,
			compilers.Passed, nil},
		"embedded by session options": {func(r *request.Request) {
			r.Route,
				r.Embed = compilers.RouteSessionOptions, true
		}, 1, compilers.Passed, nil},
		"notes and max_size": {
			func(
				r *request.Request) {
				r.EPs[0].Options = map[string]string{"notes": "made for a test"}
			}, 2, compilers.Passed, func(t *testing.T, nodes []epmodel.Context) {
				for _, n := range nodes {
					require.Equal(t, "made for a test", n.Notes)
					require.Equal(t, nodes[0].MaxSize, n.MaxSize)
				}
			}},
		"a prefix": {func(r *request.Request) { r.Output.NodeNamePrefix = "left_" }, 2,
			compilers.Passed, func(t *testing.T, nodes []epmodel.Context) {
				for _, n := range nodes {
					require.True(t, strings.HasPrefix(n.PartitionName, "left_"), n.PartitionName)
				}
			}},
		"the second device": {func(r *request.Request) {
			r.EPs[0].Devices = []compilers.Device{{Metadata: map[string]string{"device_id": "1"}}}
		}, 2, compilers.Passed, func(t *testing.T, nodes []epmodel.Context) {
			require.Equal(t, "sim-2", nodes[0].HardwareArchitecture)
		}},
		"a device that is not there": {func(r *request.Request) {
			r.EPs[0].Devices = []compilers.Device{{Type: "npu",
				Metadata: map[string]string{compilers.IsVirtual: "1"}}}
		}, 2, compilers.Failed,
			func(t *testing.T, nodes []epmodel.Context) {
				require.Equal(t, "sim-virtual", nodes[0].HardwareArchitecture)
			}},
	} {
		t.Run(name, func(t *testing.T) {
			b, _, _ := newTestEPBench(t)
			path := filepath.Join(t.TempDir(), "m.onnx")
			require.NoError(t, os.WriteFile(path, threeParts().Encode(), 0o644))
			ask := func() *request.Answer {
				r := b.request(b.openFile(path))
				r.EPs = []identity.EP{{Name: compilertest.TestEP}}
				if row.change != nil {
					row.change(r)
				}
				return b.acquire(r)
			}
			a := ask()
			require.Equal(t, request.Compiled, a.Outcome)
			require.Equal(t, row.check, a.Build.LoadCheck)
			require.Len(t, a.Build.Files, row.files)
			m := b.graphOf(a)
			require.Len(t, m.Contexts, 3)
			if row.nodes != nil {
				row.nodes(t, m.Contexts)
			}
			again := ask()
			require.Equal(t, request.Hit, again.Outcome)
			require.Equal(t, b.read(a), b.read(again))
		})
	}
}

// graphOf reads the graph of an answer.
func (b *bench) graphOf(a *request.Answer) *epmodel.Model {
	f := b.openFile(filepath.Join(a.Path, a.Graph))
	src, err := epmodel.FileSource(f)
	require.NoError(b, err)
	m, err := epmodel.Read(b.Context(), filepath.Base(a.Graph), src)
	require.NoError(b, err)
	return m
}

// A device that is absent differs from one that is present, in the key and in the load check; a
// caller that does not know it says so.
func TestDevicesThatAreNotThere(t *testing.T) {
	b, _, _ := newTestEPBench(t)
	ask := func(d compilers.Device) *request.Request {
		r := b.externalModel("m.onnx")
		r.EPs[0].Devices = []compilers.Device{d}
		return r
	}
	virtual := map[string]string{compilers.IsVirtual: "1"}
	e := b.refused(ask(compilers.Device{Type: "NPU"}))
	require.Equal(t, apierr.Unavailable, e.Class,
		"without a word it is a device of this machine that is meant")
	e = b.refused(ask(compilers.Device{Type: "GPU", Metadata: virtual}))
	require.Equal(t, apierr.CompileFailed, e.Class)
	require.Contains(t, e.Error(), "GPU")
	a := b.acquire(ask(compilers.Device{Type: "NPU", Metadata: virtual}))
	require.Equal(t, "sim-virtual", a.Build.EPs[0].HardwareArchitecture)
	here := b.acquire(ask(compilers.Device{Metadata: map[string]string{"device_id": "0"}}))
	require.NotEqual(t, a.Build.BuildKey, here.Build.BuildKey)
	require.NotEqual(t, a.RequestKey, here.RequestKey)
}

// Several execution providers, in order: each takes what those before it left, and the order is
// part of the request.
func TestSeveralExecutionProviders(t *testing.T) {
	const openVINO = "OpenVINOExecutionProvider"
	r, real := compilertest.TestEPRuntime(t, "1.31.1", compilertest.Release{}),
		compilertest.Runtime(t, "openvino-1.8.1")
	both, err := compilers.Complete(compilers.Runtime{Directory: "both",
		ORTLibrary: real.ORTLibrary, EPs: append(r.EPs, real.EPs...)})
	require.NoError(t, err)
	ort := compilers.NewORT(compilers.ORTOptions{Worker: compilertest.Worker(t)})
	t.Cleanup(func() { require.NoError(t, ort.Close()) })
	b := newBenchWith(t,
		func(o *Options) { o.Compiler, o.Runtimes = ort, []compilers.Runtime{both} })
	first, second := identity.EP{Name: compilertest.TestEP,
		Options: map[string]string{"ops": "Relu"}}, identity.EP{Name: openVINO}
	path := filepath.Join(t.TempDir(), "m.onnx")
	require.NoError(t, os.WriteFile(path, threeParts().Encode(), 0o644))
	ask := func(eps ...identity.EP) *request.Answer {
		q := b.request(b.openFile(path))
		q.EPs = eps
		return b.acquire(q)
	}
	a := ask(first, second)
	require.Equal(t, compilers.Passed, a.Build.LoadCheck)
	sources := map[string]int{}
	for _, n := range b.graphOf(a).Contexts {
		sources[n.Source]++
	}
	require.Equal(t, map[string]int{compilertest.TestEP: 3, openVINO: 2}, sources)
	require.Len(t, a.Build.EPs, 2)
	require.Empty(t, a.Warnings)
	other := ask(second, first)
	require.NotEqual(t, a.RequestKey, other.RequestKey)
	require.Contains(t, other.Warnings[0], compilertest.TestEP+" took no node")
	none := other.Build.EPs[1]
	require.True(t, none.TookNone)
	require.Empty(t, none.SDKVersion+none.HardwareArchitecture+none.CompatibilityString,
		"it states nothing")
	require.NotEmpty(t, other.Build.EPs[0].SDKVersion)
	require.Equal(t, request.Hit, ask(second, first).Outcome)
	require.Equal(t, request.Hit, ask(first, second).Outcome)
}
