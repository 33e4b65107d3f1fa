//go:build linux && (amd64 || arm64)

package cache

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
)

const qnn = "QNNExecutionProvider"

// newQNNBench is a cache over ONNX Runtime with QNN ahead of time: for devices that are elsewhere,
// on any machine.
func newQNNBench(t *testing.T) (*bench, *compilers.ORT, compilers.Runtime) {
	r := compilertest.Runtime(t, "qnn-2.7.0")
	ort := compilers.NewORT(compilers.ORTOptions{Worker: compilertest.Worker(t)})
	t.Cleanup(func() { require.NoError(t, ort.Close()) })
	return newBenchWith(t,
		func(o *Options) { o.Compiler, o.Runtimes = ort, []compilers.Runtime{r} }), ort, r
}

// forQNN asks for a model with a target, and further options.
func (b *bench) forQNN(m tinymodel.Model, soc string, options map[string]string) *request.Request {
	path := filepath.Join(b.TempDir(), "m.onnx")
	require.NoError(b, os.WriteFile(path, m.Encode(), 0o644))
	r := b.request(b.openFile(path))
	r.EPs = []identity.EP{{Name: qnn, Options: map[string]string{"soc_model": soc}}}
	for name, value := range options {
		r.EPs[0].Options[name] = value
	}
	return r
}

// Targets, precisions and option sets of one model stand side by side, and none is served for
// another.
func TestQNNTargetsSideBySide(t *testing.T) {
	b, _, _ := newQNNBench(t)
	model := compilertest.DenseModel(1, 64, 2)
	asks := map[string]func() *request.Request{
		"one SoC": func() *request.Request {
			return b.forQNN(model, "60", map[string]string{"enable_htp_fp16_precision": "1"})
		},
		"another SoC": func() *request.Request {
			return b.forQNN(model, "57", map[string]string{"enable_htp_fp16_precision": "1"})
		},
		"a third": func() *request.Request {
			return b.forQNN(model, "43", map[string]string{"enable_htp_fp16_precision": "1"})
		},
		"another precision": func() *request.Request {
			return b.forQNN(model, "60", map[string]string{"enable_htp_fp16_precision": "0"})
		},
		"other options": func() *request.Request {
			return b.forQNN(model, "60",
				map[string]string{"enable_htp_fp16_precision": "1",
					"htp_graph_finalization_optimization_mode": "3"})
		},
		"embedded": func() *request.Request {
			r := b.forQNN(model, "60", map[string]string{"enable_htp_fp16_precision": "1"})
			// by another route: the other form of a build is converted
			r.Embed, r.Route = true, compilers.RouteSessionOptions
			return r
		},
	}
	hardware := map[string]string{"one SoC": "60", "another SoC": "57", "a third": "43",
		"another precision": "60", "other options": "60", "embedded": "60"}
	first := map[string]*request.Answer{}
	for name, ask := range asks {
		nobody := ask()
		nobody.OnMiss = request.Fail
		require.Equal(t, apierr.NotFound, b.refused(nobody).Class,
			"%s: nothing that was made for another is served", name)
		a := b.acquire(ask())
		require.Equal(t, request.Compiled, a.Outcome, name)
		require.Equal(t, compilers.Passed, a.Build.LoadCheck,
			"%s: single binaries load on the simulator", name)
		require.Contains(t, a.Build.EPs[0].HardwareArchitecture, "/"+hardware[name],
			"%s: soc_model is the hardware architecture", name)
		require.Contains(t, b.graphOf(a).Metadata["ep_compatibility_info."+qnn],
			":"+hardware[name]+":")
		require.Equal(t, "libQnnHtp.so", filepath.Base(b.optionsOf(a)["backend_path"]),
			"what to load it with")
		first[name] = a
	}
	keys := map[string]string{}
	for name, ask := range asks {
		a := b.acquire(ask())
		require.Equal(t, request.Hit, a.Outcome, name)
		require.Equal(t, first[name].Build.ID, a.Build.ID, name)
		require.Equal(t, b.read(first[name]), b.read(a), name)
		require.Empty(t, keys[a.Build.BuildKey.String()], name)
		keys[a.Build.BuildKey.String()] = name
	}
	require.NotEqual(t, binaryOf(first["one SoC"]), binaryOf(first["another SoC"]),
		"the target is in the binary")
	require.NotEqual(t, binaryOf(first["one SoC"]), binaryOf(first["another precision"]))
}

func (b *bench) optionsOf(a *request.Answer) map[string]string {
	require.Contains(b, a.ProviderOptions, qnn)
	return a.ProviderOptions[qnn]
}

func binaryOf(a *request.Answer) string { return a.Build.Files[1].Digest.String() }

// islands has count layers with a node between them that QNN leaves to the CPU.
func islands(count int) tinymodel.Model {
	m := tinymodel.Model{Opsets: map[string]int64{"": 18}}
	value := func(name string) tinymodel.Value {
		return tinymodel.Value{Name: name, Type: tinymodel.Float, Shape: []any{2, 16}}
	}
	at := "x"
	for i := range count {
		name := func(s string) string { return s + string(rune('a'+i)) }
		m.Initializers = append(m.Initializers,
			tinymodel.Tensor{Name: name("w"), Type: tinymodel.Float, Shape: []int64{16, 16},
				Raw: tinymodel.Floats(uint64(i), 256)})
		m.Nodes = append(m.Nodes,
			tinymodel.Node{Name: name("mul"), Op: "MatMul", Inputs: []string{at, name("w")},
				Outputs: []string{name("m")}},
			tinymodel.Node{Name: name("act"), Op: "Relu", Inputs: []string{name("m")},
				Outputs: []string{name("r")}})
		at = name("r")
		if i < count-1 {
			m.Nodes = append(m.Nodes,
				tinymodel.Node{Name: name("shrink"), Op: "Shrink", Inputs: []string{at},
					Outputs: []string{name("s")}})
			at = name("s")
		}
	}
	m.Inputs, m.Outputs = []tinymodel.Value{value("x")}, []tinymodel.Value{value(at)}
	return m
}

// A model in many parts, with the CPU's nodes between them, is one build; a request that wants all
// of it compiled gets that error.
func TestQNNWithNodesOfTheCPUBetween(t *testing.T) {
	b, _, _ := newQNNBench(t)
	const parts = 16
	ask := func() *request.Request {
		return b.forQNN(islands(parts), "60", map[string]string{"enable_htp_fp16_precision": "1"})
	}
	a := b.acquire(ask())
	require.Equal(t, compilers.Passed, a.Build.LoadCheck)
	require.Len(t, a.Build.Files, 2, "one binary for all parts")
	m := b.graphOf(a)
	require.Len(t, m.Contexts, parts)
	mains := 0
	for _, n := range m.Contexts {
		require.Equal(t, qnn, n.Source)
		mains += int(n.MainContext)
	}
	require.Equal(t, 1, mains)
	require.Equal(t, parts-1, m.OpTypes["ai.onnx::Shrink"])
	require.Len(t, a.Warnings, 1)
	require.Contains(t, a.Warnings[0], "15 nodes (15 Shrink)")
	complete := ask()
	complete.Output.Complete = true
	e := b.refused(complete)
	require.Equal(t, apierr.CompileFailed, e.Class)
	require.Contains(t, e.Hint, "without --complete")
	require.Contains(t, b.refused(complete).Hint, "without --complete", "nor is it forgotten")
	require.Equal(t, request.Hit, b.acquire(ask()).Outcome)
}

// withSource writes a graph of one EPContext node again, with another source.
func (b *bench) withSource(dir, graph, source string) string {
	b.Helper()
	f := b.openFile(filepath.Join(dir, graph))
	src, err := epmodel.FileSource(f)
	require.NoError(b, err)
	m, err := epmodel.Read(b.Context(), graph, src)
	require.NoError(b, err)
	require.Len(b, m.Contexts, 1)
	c := m.Contexts[0]
	context := []byte(c.CacheContext)
	if c.Inline.Length > 0 {
		context = make([]byte, c.Inline.Length)
		_, err = f.ReadAt(context, c.Inline.Offset)
		require.NoError(b, err)
	}
	out := compilertest.DenseModel(1, 64, 2)
	out.Opsets = map[string]int64{"": 17, "com.microsoft": 1}
	out.Metadata, out.Initializers = m.Metadata, nil
	out.Nodes = []tinymodel.Node{{Name: c.Node, Op: "EPContext", Domain: "com.microsoft",
		Inputs: []string{"x"}, Outputs: []string{"y"}, Attributes: map[string]any{
			"source": source, "partition_name": c.PartitionName, "ep_cache_context": context,
			"embed_mode": c.EmbedMode, "main_context": c.MainContext,
			"ep_sdk_version": c.SDKVersion}}}
	path := filepath.Join(b.TempDir(), filepath.Base(graph))
	require.NoError(b, os.WriteFile(path, out.Encode(), 0o644))
	return path
}

// QNN takes nodes under other names than its own: a model that has them is one of QNN's, wherever
// it comes from.
func TestQNNNodesUnderOtherNamesOfTheirSource(t *testing.T) {
	b, ort, r := newQNNBench(t)
	fp16 := map[string]string{"enable_htp_fp16_precision": "1"}
	embedded := b.forQNN(compilertest.DenseModel(1, 64, 2), "60", fp16)
	embedded.Embed = true
	a := b.acquire(embedded)
	for _, source := range []string{"QNN", "qnn", "QnnExecutionProvider"} {
		own := b.forQNN(compilertest.DenseModel(1, 64, 2), "60", fp16)
		own.Graph = b.openFile(b.withSource(a.Path, a.Graph, source))
		passed := b.acquire(own)
		require.Equal(t, request.PassThrough, passed.Outcome)
		require.Empty(t, passed.Warnings, source)
		require.Contains(t, passed.Compatibility.Reason, "it loads", source)
	}
	own := b.forQNN(compilertest.DenseModel(1, 64, 2), "60", fp16)
	own.Graph = b.openFile(b.withSource(a.Path, a.Graph, "SomeOtherExecutionProvider"))
	require.NotEmpty(t, b.acquire(own).Warnings)

	claimed := b.forQNN(compilertest.DenseModel(2, 64, 2), "60", fp16)
	claimed.OnMiss = request.ForClaim
	claim := b.acquire(claimed)
	require.Equal(t, request.Claimed, claim.Outcome)
	dir := t.TempDir()
	result, err := ort.Compile(t.Context(),
		compilers.Job{Runtime: r, Model: claimed.Graph.Name(), Dir: dir,
			Output: claim.Claim.Output,
			EPs:    []compilers.EP{{Name: qnn, Options: claim.ProviderOptions[qnn]}}}, nil)
	require.NoError(t, err)
	put := &claims.Put{Claim: claim.Claim.ID, Files: []claims.PutFile{
		{Name: result.Graph, File: b.openFile(b.withSource(dir, result.Graph, "qnn"))},
		{Name: result.Files[1], File: b.openFile(filepath.Join(dir, result.Files[1]))},
	}}
	got, err := b.cache.Claims.Put(t.Context(), claimed.Peer, put, nil)
	require.NoError(t, err)
	t.Cleanup(func() { got.View.Close() })
	require.Equal(t, request.Taken, got.Outcome)
	require.NotEmpty(t, got.Build.EPs[0].CompatibilityString)
}
