//go:build linux && (amd64 || arm64)

package cache

import (
	"context"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/internal/apierr"
)

// newTestEPBench is a cache over ONNX Runtime with the test EP, in worker processes.
func newTestEPBench(t *testing.T, change ...func(*Options)) (*bench, *compilers.ORT,
	compilers.Runtime) {
	r := compilertest.TestEPRuntime(t, "1.31.1", compilertest.Release{})
	ort := compilers.NewORT(compilers.ORTOptions{Worker: compilertest.Worker(t)})
	t.Cleanup(func() { require.NoError(t, ort.Close()) })
	return newBenchWith(t, func(o *Options) {
		o.Compiler, o.Runtimes = ort, []compilers.Runtime{r}
		for _, one := range change {
			one(o)
		}
	}), ort, r
}

// externalModel is a request for a model with its weights in w/model.data.
func (b *bench) externalModel(name string) *request.Request {
	m, dir := compilertest.DenseModel(1, 16, 2), b.TempDir()
	var data []byte
	for i := range m.Initializers {
		w := &m.Initializers[i]
		w.Location, w.Offset, w.Length = "w/model.data", strconv.Itoa(len(data)),
			strconv.Itoa(len(w.Raw))
		data = append(data, w.Raw...)
	}
	require.NoError(b, os.MkdirAll(filepath.Join(dir, "w"), 0o755))
	require.NoError(b, os.WriteFile(filepath.Join(dir, "w", "model.data"), data, 0o644))
	require.NoError(b, os.WriteFile(filepath.Join(dir, name), m.Encode(), 0o644))
	r := b.request(b.openFile(filepath.Join(dir, name)))
	r.EPs = []identity.EP{{Name: compilertest.TestEP}}
	r.External = map[string]*os.File{"w/model.data": b.openFile(filepath.Join(dir, "w",
		"model.data"))}
	return r
}

// respelledModel is a request for a model with initializers that name one file by each of the
// spellings.
func (b *bench) respelledModel(spellings ...string) *request.Request {
	m, dir, raw := compilertest.DenseModel(1, 16, 2), b.TempDir(), tinymodel.Floats(1, 16*16)
	relu := m.Nodes[1]
	m.Nodes, m.Initializers = nil, nil
	var data []byte
	last := "x"
	for i, spelling := range spellings { // MatMul is left to the CPU, with its weights
		w, to := "w"+strconv.Itoa(i), "h"+strconv.Itoa(i)
		m.Nodes = append(m.Nodes,
			tinymodel.Node{Name: w, Op: "MatMul", Inputs: []string{last, w}, Outputs: []string{to}})
		m.Initializers = append(m.Initializers,
			tinymodel.Tensor{Name: w, Type: tinymodel.Float, Shape: []int64{16, 16},
				Location: spelling, Offset: strconv.Itoa(len(data)),
				Length: strconv.Itoa(len(raw))})
		data, last = append(data, raw...), to
	}
	relu.Inputs = []string{last}
	m.Nodes = append(m.Nodes, relu)
	require.NoError(b, os.WriteFile(filepath.Join(dir, "a.bin"), data, 0o644))
	require.NoError(b, os.WriteFile(filepath.Join(dir, "m.onnx"), m.Encode(), 0o644))
	r := b.request(b.openFile(filepath.Join(dir, "m.onnx")))
	r.EPs = []identity.EP{{Name: compilertest.TestEP,
		Options: map[string]string{"ops": "Add,Relu"}}}
	r.External = map[string]*os.File{}
	for _, spelling := range spellings {
		r.External[spelling] = b.openFile(filepath.Join(dir, "a.bin"))
	}
	return r
}

// ONNX Runtime resolves the location of external data as a path, so that one file may have several
// spellings in one model.
func TestExternalDataUnderSeveralSpellings(t *testing.T) {
	b, _, _ := newTestEPBench(t)
	for name, change := range map[string]func(*request.Request){
		"compile API": func(*request.Request) {},
		"session options": func(r *request.Request) {
			r.Route = compilers.RouteSessionOptions
		},
		"initializers in source": func(r *request.Request) { r.Output.InitializersInSource = true },
		"initializers in a file": func(r *request.Request) {
			r.Output.InitializersFile = "rest.bin"
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := b.respelledModel("a.bin", "./a.bin", "s//../a.bin", "s/../t/.././a.bin")
			change(r)
			a := b.acquire(r)
			require.Equal(t, compilers.Passed, a.Build.LoadCheck)
			for _, f := range a.Build.Files {
				require.Equal(t, path.Clean(f.Name), f.Name)
			}
		})
	}
	t.Run("a group", func(t *testing.T) {
		r, other := b.respelledModel("a.bin", "./a.bin"), b.respelledModel("./a.bin", "a.bin")
		r.Group = []identity.Files{{Name: "other.onnx", Graph: other.Graph,
			External: other.External}}
		b.acquire(r)
	})
	t.Run("compiled again from the kept source", func(t *testing.T) {
		a := b.acquire(b.respelledModel("a.bin", "s/../a.bin"))
		r, err := b.cache.keptSources.Request(context.Background(), a.Build)
		require.NoError(t, err)
		defer r.Close()
		r.Peer = request.Peer{UID: b.cache.uid}
		again, err := b.cache.Acquire(context.Background(), r, nil)
		require.NoError(t, err)
		defer again.View.Close()
		require.Equal(t, a.Build.BuildKey, again.Build.BuildKey)
	})
	t.Run("two files under one path", func(t *testing.T) {
		r := b.respelledModel("a.bin", "s/../a.bin")
		data, err := os.ReadFile(r.External["a.bin"].Name())
		require.NoError(t, err)
		data[len(data)-1] ^= 1
		elsewhere := filepath.Join(t.TempDir(), "a.bin")
		require.NoError(t, os.WriteFile(elsewhere, data, 0o644))
		r.External["s/../a.bin"] = b.openFile(elsewhere)
		e := b.refused(r)
		require.Equal(t, apierr.BadModel, e.Class)
		require.Contains(t, e.Error(), `"a.bin" and "s/../a.bin" name one file`)
	})
}

// A weightless build refers to the source's weights, which are part of it, stored once, and
// verified like all of its files.
func TestWeightlessBuildsKeepTheirWeights(t *testing.T) {
	b, ort, runtime := newTestEPBench(t)
	weightless := func() *request.Request {
		r := b.externalModel("m.onnx")
		r.SessionOptions = map[string]string{"ep.enable_weightless_ep_context_nodes": "1"}
		r.Output.InitializersInSource = true
		return r
	}
	a := b.acquire(weightless())
	require.Equal(t, compilers.Passed, a.Build.LoadCheck)
	names := map[string]string{}
	for _, f := range a.Build.Files {
		names[f.Name] = f.Digest.String()
	}
	require.Len(t, names, 3)
	require.Contains(t, names, "w/model.data")
	source, err := os.ReadFile(filepath.Join(a.Path, filepath.Dir(a.Graph), "w", "model.data"))
	require.NoError(t, err)
	require.Len(t, source, 4*16*16)

	graph := filepath.Join(a.Path, a.Graph)
	check, err := ort.Check(t.Context(),
		compilers.CheckJob{Runtime: runtime, EPs: []compilers.EP{{Name: compilertest.TestEP}},
			Graph: graph, Session: compilers.Session{SessionOptions: a.SessionOptions}})
	require.NoError(t, err)
	require.Equal(t, compilers.Passed, check.Outcome, check.Text)

	embedded := weightless()
	embedded.Embed = true
	other := b.acquire(embedded)
	require.NotEqual(t, a.Build.BuildKey, other.Build.BuildKey)
	require.Len(t, other.Build.Files, 2)
	require.Equal(t, names["w/model.data"], other.Build.Files[1].Digest.String(),
		"one file in the store for both")

	path := filepath.Join(a.Path, filepath.Dir(a.Graph), "w", "model.data")
	require.NoError(t, os.Chmod(path, 0o644))
	source[7] ^= 1
	require.NoError(t, os.WriteFile(path, source, 0o644))
	require.NotEqual(t, request.Hit, b.acquire(weightless()).Outcome,
		"weights that were changed are damage like any other")
}

// Where the EP finds the weights by itself only it knows which, so the build has all of the source,
// and the answer's options lead there.
func TestWeightlessBuildsKeepTheirSource(t *testing.T) {
	b, _, _ := newTestEPBench(t)
	ask := func(option, value string, embed bool) *request.Answer {
		r := b.externalModel("m.onnx")
		r.SessionOptions, r.Embed = map[string]string{option: value}, embed
		return b.acquire(r)
	}
	var model string
	for _, embed := range []bool{false, true} {
		a := ask("ep.enable_weightless", "1", embed)
		require.Equal(t, compilers.Passed, a.Build.LoadCheck)
		files := map[string]string{}
		for _, f := range a.Build.Files {
			files[f.Name] = f.Digest.String()
		}
		// the name that it was compiled by, also where one form was made of the other
		source := b.graphOf(a).Contexts[0].ONNXModelFilename
		require.Contains(t, files, source)
		require.Contains(t, files, "w/model.data")
		require.Len(t, files, map[bool]int{false: 4, true: 3}[embed])
		if model == "" {
			model = files[source]
		}
		require.Equal(t, model, files[source], "the source as it came")
	}
	plain := ask("ep.enable_weightless", "0", false)
	require.Len(t, plain.Build.Files, 2)
	r := b.externalModel("m.onnx")
	r.SessionOptions = map[string]string{"ep.context_source_model_path": "/etc/passwd"}
	require.Equal(t, apierr.NotAllowed, b.refused(r).Class)
}

// Every wish gives a build of its own, and none is served for another.
func TestOutputsSideBySide(t *testing.T) {
	b, _, _ := newTestEPBench(t)
	wishes := map[string]identity.Output{"plain": {}, "in a file": {InitializersFile: "rest.bin"},
		"large ones in a file": {InitializersFile: "rest.bin", InitializersThreshold: 100},
		"in the source":        {InitializersInSource: true}, "named": {NodeNamePrefix: "left_"}}
	builds := map[string]string{}
	for _, outcome := range []string{request.Compiled, request.Hit} {
		for name, wish := range wishes {
			r := b.externalModel("m.onnx")
			// MatMul, with 1024 bytes of weights, is left to the CPU
			r.EPs[0].Options = map[string]string{"ops": "Add,Relu"}
			r.Output = wish
			a := b.acquire(r)
			require.Equal(t, outcome, a.Outcome, name)
			require.Equal(t, compilers.Passed, a.Build.LoadCheck, name)
			if outcome == request.Hit {
				require.Equal(t, builds[name], a.Build.BuildKey.String(), name)
			}
			builds[name] = a.Build.BuildKey.String()
		}
	}
	seen := map[string]bool{}
	for name, key := range builds {
		require.False(t, seen[key], name)
		seen[key] = true
	}
	complete := b.externalModel("m.onnx")
	complete.EPs[0].Options = map[string]string{"ops": "Add,Relu"}
	complete.Output.Complete = true
	e := b.refused(complete)
	require.Equal(t, apierr.CompileFailed, e.Class)
	require.Contains(t, e.Error(), "fallback")
}

// With the real ONNX Runtime: what the daemon serves for such a request loads with the entry set,
// and what it withholds does not.
func TestBuildsForSessionsThatFailOnSuboptimalModels(t *testing.T) {
	b, ort, runtime := newTestEPBench(t, func(o *Options) {
		o.Policies = map[string]request.Policy{"": {PreferRecompilation: request.PolicyServe}}
	})
	const entry = "session.fail_on_suboptimal_compiled_model"
	ask := func(entries map[string]string) *request.Answer {
		r := b.request(b.model(1))
		r.EPs, r.SessionOptions = []identity.EP{{Name: compilertest.TestEP}}, entries
		return b.acquire(r)
	}
	load := func(a *request.Answer) compilers.CheckResult {
		checked, err := ort.Check(t.Context(),
			compilers.CheckJob{Runtime: runtime, EPs: []compilers.EP{{Name: compilertest.TestEP}},
				Graph:   filepath.Join(a.View.Name(), a.Graph),
				Session: compilers.Session{SessionOptions: map[string]string{entry: "1"}}})
		require.NoError(t, err)
		return checked
	}
	first := ask(nil)
	runtime = compilertest.InstallTestEP(t, runtime.Directory, compilertest.Release{SDK: "1.4.2"})
	still := ask(nil)
	require.Equal(t, compilers.PreferRecompilation, still.Compatibility.Verdict)
	require.Contains(t, load(still).Text, "suboptimal")
	again := ask(map[string]string{entry: "1"})
	require.NotEqual(t, first.Build.ID, again.Build.ID)
	require.Equal(t, first.Build.RequestKey, again.Build.RequestKey)
	require.Equal(t, compilers.Passed, load(again).Outcome)
}
