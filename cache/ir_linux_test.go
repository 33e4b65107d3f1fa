//go:build linux && (amd64 || arm64)

package cache

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/index"
)

// wrapped asks for an ONNX model that wraps one in OpenVINO's own format.
func (b *bench) wrapped(seed uint64) *request.Request {
	const n = 64
	dir := b.TempDir()
	xml, bin := irModel(seed, n)
	for name, data := range map[string][]byte{"wrapper.onnx": wrapsIR("ir/model.xml", n).Encode(),
		"ir/model.xml": xml, "ir/model.bin": bin} {
		require.NoError(b, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		require.NoError(b, os.WriteFile(filepath.Join(dir, name), data, 0o644))
	}
	r := b.request(b.openFile(filepath.Join(dir, "wrapper.onnx")))
	r.External = map[string]*os.File{}
	for _, name := range []string{"ir/model.xml", "ir/model.bin"} {
		r.External[name] = b.openFile(filepath.Join(dir, name))
	}
	r.EPs = []identity.EP{{Name: "OpenVINOExecutionProvider",
		Options: map[string]string{"load_config": `{"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}`}}}
	return r
}

// An EPContext model that only wraps one in OpenVINO's own format is a source: it is compiled from
// all of its files, and computes what it does when ONNX Runtime loads it as it is.
func TestModelsThatWrapIRAreCompiled(t *testing.T) {
	for _, name := range []string{"openvino-1.8.1", "openvino-1.4.0"} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.Runtime(t, name)
			b, ort := newRealBench(t, r)
			builds := map[index.BuildKey]bool{}
			for _, form := range []struct {
				seed   uint64
				change func(*request.Request)
			}{
				{1, func(*request.Request) {}},
				{2, func(*request.Request) {}}, // with other weights, and an equal graph
				{1, func(r *request.Request) { r.Embed = true }},
				{3, func(r *request.Request) { r.Route = compilers.RouteSessionOptions }},
			} {
				asked := b.wrapped(form.seed)
				form.change(asked)
				a := b.acquire(asked)
				require.NotEqual(t, request.PassThrough, a.Outcome, a.Why)
				require.Equal(t, compilers.Passed, a.Build.LoadCheck)
				require.Empty(t, a.Warnings)
				require.False(t, builds[a.Build.BuildKey], "the weights are part of the key")
				builds[a.Build.BuildKey] = true
				for _, n := range b.graphOf(a).Contexts {
					require.NotContains(t, n.CacheContext, ".xml")
				}
				eps := []compilers.EP{{Name: asked.EPs[0].Name,
					Options: a.ProviderOptions[asked.EPs[0].Name]}}
				require.Equal(t, b.outputs(ort, compilers.CheckJob{Runtime: r, EPs: eps,
					Graph: asked.Graph.Name()}),
					b.outputs(ort,
						compilers.CheckJob{Runtime: r, EPs: eps,
							Graph: filepath.Join(a.Path, filepath.FromSlash(a.Graph))}))
				require.Equal(t, request.Hit,
					b.acquire(
						func() *request.Request {
							r := b.wrapped(form.seed)
							form.change(r)
							return r
						}()).Outcome)
			}
			lacks := b.wrapped(1)
			delete(lacks.External, "ir/model.bin")
			_, err := b.cache.Acquire(t.Context(), lacks, nil)
			var need *identity.NeedFilesError
			require.ErrorAs(t, err, &need)
			require.Equal(t, []string{"ir/model.bin"}, need.Locations)
		})
	}
}

// OpenVINO compiles IR under the extension .xml alone, and loads it under others: such a model is
// passed through, because no build can be made of it.
func TestIRUnderAnotherExtensionIsPassedThrough(t *testing.T) {
	for _, name := range []string{"openvino-1.8.1", "openvino-1.4.0"} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.Runtime(t, name)
			b, ort := newRealBench(t, r)
			asked := b.wrapped(1)
			dir := filepath.Dir(asked.Graph.Name())
			xml := filepath.Join(dir, "ir", "model.xml")
			require.NoError(t, os.Rename(xml, filepath.Join(dir, "ir", "model.XML")))
			file := asked.Graph.Name()
			require.NoError(t, os.WriteFile(file, wrapsIR("ir/model.XML", 64).Encode(), 0o644))
			loads := compilers.CheckJob{Runtime: r, Graph: file,
				EPs: []compilers.EP{{Name: asked.EPs[0].Name}}}
			require.NotEmpty(t, b.outputs(ort, loads))
			asked.Graph, asked.External = b.openFile(file), nil
			require.Equal(t, request.PassThrough, b.acquire(asked).Outcome)
		})
	}
}

// Such a model is compiled again from what was kept of all of its files.
func TestModelsThatWrapIRAreRebuilt(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	for _, how := range []string{build.KeepReference, build.KeepCopy} {
		t.Run(how, func(t *testing.T) {
			ort := compilers.NewORT(compilers.ORTOptions{Worker: compilertest.Worker(t)})
			t.Cleanup(func() { require.NoError(t, ort.Close()) })
			b := rebuilding(t, func(o *Options) {
				o.Compiler, o.Runtimes, o.KeepSource = ort, []compilers.Runtime{r}, how
			})
			first := b.acquire(b.wrapped(1))
			require.Equal(t, how, first.Build.Source.Kind)
			b.age()
			b.refresh(first.Build)
			require.Empty(t, b.waitForRebuilds())
			again := b.acquire(b.wrapped(1))
			require.Equal(t, request.Hit, again.Outcome)
			require.NotEqual(t, first.Build.ID, again.Build.ID)
		})
	}
}

// irModel returns a model in OpenVINO's own format, y = Relu(x W), with W of n rows and columns
// that follow from the seed: what its .xml file holds, and what the .bin file beside it does.
func irModel(seed uint64, n int) (xml, bin []byte) {
	tensor := func(id, rows int) string {
		return fmt.Sprintf(`<port id="%d" precision="FP32"><dim>%d</dim><dim>%d</dim></port>`, id,
			rows, n)
	}
	named := func(id int, name string) string {
		return fmt.Sprintf(
			`<port id="%d" precision="FP32" names="%s"><dim>1</dim><dim>%d</dim></port>`, id, name,
			n)
	}
	return fmt.Appendf(nil, `<?xml version="1.0"?>
<net name="model" version="11">
 <layers>
  <layer id="0" name="x" type="Parameter" version="opset1">
   <data shape="1,%[1]d" element_type="f32"/><output>%[3]s</output></layer>
  <layer id="1" name="w" type="Const" version="opset1">
   <data element_type="f32" shape="%[1]d, %[1]d" offset="0" size="%[2]d"/><output>%[4]s</output>`+
			`</layer>
  <layer id="2" name="product" type="MatMul" version="opset1">
   <data transpose_a="false" transpose_b="false"/><input>%[5]s%[6]s</input><output>%[7]s</output>`+
			`</layer>
  <layer id="3" name="relu" type="ReLU" version="opset1"><input>%[5]s</input><output>%[8]s</`+
			`output></layer>
  <layer id="4" name="y/sink" type="Result" version="opset1"><input>%[5]s</input></layer>
 </layers>
 <edges>
  <edge from-layer="0" from-port="0" to-layer="2" to-port="0"/>
  <edge from-layer="1" from-port="0" to-layer="2" to-port="1"/>
  <edge from-layer="2" from-port="2" to-layer="3" to-port="0"/>
  <edge from-layer="3" from-port="1" to-layer="4" to-port="0"/>
 </edges>
</net>
`, n, n*n*4, named(0, "x"), tensor(0, n), tensor(0, 1), tensor(1, n), tensor(2, 1), named(1, "y")),
		tinymodel.Floats(seed, n*n)
}

// wrapsIR is an ONNX model of one EPContext node that names a model as irModel gives it, as Olive's
// pass for OpenVINO writes it.
func wrapsIR(xml string, n int) tinymodel.Model {
	return tinymodel.Model{
		Nodes: []tinymodel.Node{{Name: "ContextNode", Op: "EPContext", Domain: "com.microsoft",
			Inputs: []string{"x"}, Outputs: []string{"y"},
			Attributes: map[string]any{"embed_mode": int64(0), "main_context": int64(1),
				"ep_cache_context": xml, "partition_name": "model",
				"source": "OpenVINOExecutionProvider", "ep_sdk_version": "2026.4"}}},
		Inputs:  []tinymodel.Value{{Name: "x", Type: tinymodel.Float, Shape: []any{1, n}}},
		Outputs: []tinymodel.Value{{Name: "y", Type: tinymodel.Float, Shape: []any{1, n}}},
		Opsets:  map[string]int64{"": 17, "com.microsoft": 1},
	}
}
