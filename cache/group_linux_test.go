//go:build linux && (amd64 || arm64)

package cache

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
)

// variants asks for one model with one, two and four rows as a group.
func (b *bench) variants(ep identity.EP, seed uint64, n int) *request.Request {
	open := func(rows int) *os.File {
		path := filepath.Join(b.TempDir(), "m.onnx")
		require.NoError(b, os.WriteFile(path, compilertest.Dense(seed, n, rows), 0o644))
		return b.openFile(path)
	}
	r := b.request(open(1))
	r.EPs = []identity.EP{ep}
	for _, rows := range []int{2, 4} {
		r.Group = append(r.Group, identity.Files{Name: "m.onnx", Graph: open(rows)})
	}
	return r
}

// newRealBench is a cache over ONNX Runtime.
func newRealBench(t *testing.T, r compilers.Runtime) (*bench, *compilers.ORT) {
	ort := compilers.NewORT(compilers.ORTOptions{Worker: compilertest.Worker(t)})
	t.Cleanup(func() { require.NoError(t, ort.Close()) })
	return newBenchWith(t,
		func(o *Options) { o.Compiler, o.Runtimes = ort, []compilers.Runtime{r} }), ort
}

// outputs runs graphs in one process, in order, and gives the bytes of all outputs.
func (b *bench) outputs(ort *compilers.ORT, job compilers.CheckJob) []byte {
	return compilertest.Outputs(b, job, 3)
}

// A real group loads as its answer says, and its models compute what they do uncompiled: all in one
// process, and each alone.
func TestRealGroupsCompute(t *testing.T) {
	for name, c := range map[string]struct {
		ep      identity.EP
		runtime func(*testing.T) compilers.Runtime
	}{
		"OpenVINO": {identity.EP{Name: "OpenVINOExecutionProvider",
			Options: map[string]string{
				"load_config": `{"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}`}},
			func(t *testing.T) compilers.Runtime {
				return compilertest.Runtime(t,
					"openvino-1.8.1")
			}},
		"test EP": {identity.EP{Name: compilertest.TestEP,
			Devices: []compilers.Device{{Metadata: map[string]string{"device_id": "0"}}}},
			func(t *testing.T) compilers.Runtime {
				return compilertest.TestEPRuntime(t, "1.31.1", compilertest.Release{})
			}},
	} {
		t.Run(name, func(t *testing.T) {
			r := c.runtime(t)
			b, ort := newRealBench(t, r)
			var groups []*request.Answer
			for _, seed := range []uint64{1, 2} { // of equal names and shapes
				asked := b.variants(c.ep, seed, 64)
				a := b.acquire(asked)
				groups = append(groups, a)
				require.Equal(t, request.Compiled, a.Outcome)
				require.Empty(t, a.Warnings)
				require.Equal(t, compilers.Passed, a.Build.LoadCheck)
				require.Len(t, a.Build.Files, 4, "three graphs and one binary")
				eps := []compilers.EP{{Name: c.ep.Name, Devices: c.ep.Devices,
					Options: a.ProviderOptions[c.ep.Name]}}
				var want []byte
				for i := range asked.Models() {
					source := compilers.CheckJob{Runtime: r, EPs: eps,
						Graph: asked.ModelFiles(i).Graph.Name()}
					want = append(want, b.outputs(ort, source)...)
				}
				together := compilers.CheckJob{Runtime: r, EPs: eps,
					Graph:   filepath.Join(a.Path, a.Members[0].Graph),
					Session: compilers.Session{SessionOptions: loadOptions(a)}}
				for _, m := range a.Members[1:] {
					together.Share = append(together.Share, filepath.Join(a.Path, m.Graph))
				}
				require.Equal(t, want, b.outputs(ort, together))
				var apart []byte
				for i := range asked.Models() {
					alone := b.acquire(oneOf(asked, i))
					require.Equal(t, request.Hit, alone.Outcome)
					require.Equal(t, i, alone.Member)
					one := compilers.CheckJob{Runtime: r, EPs: eps,
						Graph:   filepath.Join(alone.Path, alone.Graph),
						Session: compilers.Session{SessionOptions: alone.SessionOptions}}
					apart = append(apart, b.outputs(ort, one)...)
				}
				require.Equal(t, want, apart)
			}
			require.NotEqual(t, filepath.Base(groups[0].Graph), filepath.Base(groups[1].Graph),
				"names are of the build key")
		})
	}
}

// QNN shares the weights, which cannot be tried here; that the trial would crash is not counted as
// a failure.
func TestAQNNGroupStoresItsWeightsOnce(t *testing.T) {
	b, _, _ := newQNNBench(t)
	ep := identity.EP{Name: qnn,
		Options: map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}}
	asked := b.variants(ep, 1, 1024)
	group := b.acquire(asked)
	require.Equal(t, request.Compiled, group.Outcome)
	require.Equal(t, compilers.NotCheckable, group.Build.LoadCheck)
	require.Empty(t, group.Warnings)
	require.Len(t, group.Build.Files, 4, "three graphs and one binary")
	require.Equal(t, "1", b.optionsOf(group)["enable_htp_weight_sharing"])
	bytes := func(a *request.Answer) (sum int64) {
		for _, f := range a.Build.Files {
			sum += f.Size
		}
		return sum
	}
	plain := b.request(b.openFile(asked.Graph.Name()))
	plain.EPs, plain.Store = []identity.EP{ep}, "none" // of its own, and not from the group
	plain.OnMiss = request.Bypass
	single := b.acquire(plain)
	require.Empty(t, single.Members)
	require.LessOrEqual(t, float64(bytes(group)), 1.05*float64(bytes(single)))

	require.Equal(t, query.Miss, b.explain(oneOf(asked, 2)).Decision)
	alone := b.acquire(oneOf(asked, 2))
	require.Equal(t, request.Compiled, alone.Outcome,
		"a member of the group would end the application by SIGSEGV on this machine")
	require.Empty(t, alone.Members)
	require.Equal(t, compilers.Passed, alone.Build.LoadCheck)
	require.Equal(t, request.Hit, b.acquire(b.variants(ep, 1, 1024)).Outcome,
		"the group itself is still there")
	failures, err := b.cache.JobList.Failures(context.Background(), b.self())
	require.NoError(t, err)
	require.Empty(t, failures)
	require.NotContains(t, kinds(b.events(b.self())), event.Failed)
}

// sharing is a request for models as a group with weights in files of their own, each in the
// directory given for it.
func (b *bench) sharing(ep identity.EP, seed uint64, dirs ...string) *request.Request {
	var r *request.Request
	for i, dir := range dirs {
		model := compilertest.DenseModel(seed, 64, 1<<i)
		weights := &model.Initializers[0]
		require.NoError(b, os.WriteFile(filepath.Join(dir, "weights.bin"), weights.Raw, 0o644))
		// OpenVINO guesses neither
		weights.Location, weights.Offset, weights.Length = "weights.bin", "0",
			fmt.Sprint(len(weights.Raw))
		path := filepath.Join(dir, fmt.Sprintf("m%d.onnx", i))
		require.NoError(b, os.WriteFile(path, model.Encode(), 0o644))
		files := map[string]*os.File{"weights.bin": b.openFile(filepath.Join(dir,
			"weights.bin"))}
		if i > 0 {
			r.Group = append(r.Group,
				identity.Files{Name: filepath.Base(path), Graph: b.openFile(path), External: files})
			continue
		}
		r = b.request(b.openFile(path))
		r.EPs, r.External = []identity.EP{ep}, files
	}
	return r
}

// OpenVINO leaves weights of a group in the models' external data: that file is part of the build,
// once.
func TestRealGroupsOfOneWeightFileCompute(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	b, ort := newRealBench(t, r)
	ep := identity.EP{Name: "OpenVINOExecutionProvider",
		Options: map[string]string{"load_config": `{"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}`}}
	dir := t.TempDir()
	asked := b.sharing(ep, 1, dir, dir)
	a := b.acquire(asked)
	require.Equal(t, request.Compiled, a.Outcome)
	require.Len(t, a.Build.Files, 4, "two graphs, one binary and the weights")
	eps := []compilers.EP{{Name: ep.Name, Options: a.ProviderOptions[ep.Name]}}
	var want []byte
	for i := range asked.Models() {
		want = append(want, b.outputs(ort, compilers.CheckJob{Runtime: r, EPs: eps,
			Graph: asked.ModelFiles(i).Graph.Name()})...)
	}
	require.Equal(t, want,
		b.outputs(ort,
			compilers.CheckJob{Runtime: r, EPs: eps,
				Graph:   filepath.Join(a.Path, a.Members[0].Graph),
				Share:   []string{filepath.Join(a.Path, a.Members[1].Graph)},
				Session: compilers.Session{SessionOptions: loadOptions(a)}}))

	_, err := b.cache.Acquire(t.Context(), b.sharing(ep, 2, t.TempDir(), t.TempDir()), nil)
	require.ErrorContains(t, err, `different files are named "weights.bin"`)
}

// loadOptions are those of a group's first model, when it is loaded beside the others.
func loadOptions(a *request.Answer) map[string]string {
	all := make(map[string]string)
	maps.Copy(all, a.Build.SessionOptions)
	maps.Copy(all, a.Build.Members[0].SessionOptions)
	return all
}

// oneOf asks for one of a group's models alone.
func oneOf(group *request.Request, i int) *request.Request {
	r, m := *group, group.ModelFiles(i)
	r.Name, r.Graph, r.External, r.Group = m.Name, m.Graph, m.External, nil
	return &r
}
