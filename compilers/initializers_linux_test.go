//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/epmodel"
	"github.com/stretchr/testify/require"
)

// apartJob has the model, with its weights in m.data, in another directory than the output, as the
// daemon has them.
func apartJob(t *testing.T, r compilers.Runtime, ep compilers.EP, m tinymodel.Model) compilers.Job {
	dir := t.TempDir()
	model := write(t, dir, "00112233445566.onnx", externalized(t, dir, m))
	return compilers.Job{Runtime: r, EPs: []compilers.EP{ep}, Model: model, Dir: t.TempDir(),
		Output: "00112233445566_ctx.onnx"}
}

// requireAlone checks that a build loads and computes what the source does, from a directory that
// holds nothing else.
func requireAlone(t *testing.T, c *compilers.ORT, job compilers.Job,
	result compilers.Result) *epmodel.Model {
	want := compilertest.Outputs(t,
		compilers.CheckJob{Runtime: job.Runtime, EPs: job.EPs, Graph: job.Model,
			Session: compilers.Session{SessionOptions: job.SessionOptions}}, 7)
	alone := t.TempDir()
	sizes := map[string]int64{}
	for _, name := range result.Files {
		data, err := os.ReadFile(filepath.Join(job.Dir, name))
		require.NoError(t, err)
		sizes[name] = int64(len(data))
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(alone, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(alone, name), data, 0o600))
	}
	require.NoError(t, os.RemoveAll(filepath.Dir(job.Model)))
	got := compilertest.Outputs(t,
		compilers.CheckJob{Runtime: job.Runtime, EPs: job.EPs,
			Graph:   filepath.Join(alone, result.Graph),
			Session: compilers.Session{SessionOptions: job.SessionOptions}}, 7)
	require.Equal(t, want, got)
	m := readModel(t, filepath.Join(alone, result.Graph))
	require.NoError(t, epmodel.Validate(m, sizes))
	return m
}

func TestInitializersOfTheOutput(t *testing.T) {
	// so that the weights of MatMul, 1024 bytes, and of Add, 64 bytes, stay with the CPU
	some := map[string]string{"ops": "Mul,Relu"}
	for _, row := range []struct {
		name    string
		options map[string]string
		route   string
		embed   bool
		session map[string]string
		keep    compilers.Initializers
		files   []string // of the artefact, besides graph and binary
		inside  int      // initializers with their bytes in the graph
	}{
		{"in the graph", some, compilers.RouteCompileAPI, false, nil, compilers.Initializers{}, nil,
			4},
		{"in a file", some, compilers.RouteCompileAPI, false, nil,
			compilers.Initializers{File: "rest.bin"}, []string{"rest.bin"}, 0},
		{"in a file, beside an embedded context", some, compilers.RouteCompileAPI, true, nil,
			compilers.Initializers{File: "rest.bin"}, []string{"rest.bin"}, 0},
		{"in a file from a threshold on", some, compilers.RouteCompileAPI, false, nil,
			compilers.Initializers{File: "rest.bin", Threshold: 65}, []string{"rest.bin"}, 2},
		{"in a file, by session options", some, compilers.RouteSessionOptions, false, nil,
			compilers.Initializers{File: "rest.bin"}, []string{"rest.bin"}, 0},
		{"in the source's file", some, compilers.RouteCompileAPI, false, nil,
			compilers.Initializers{InSource: true}, []string{"m.data"}, 0},
		{"weightless, in the graph", nil, compilers.RouteCompileAPI, false, weightless,
			compilers.Initializers{}, nil, 6},
		{"weightless, in the source's file", nil, compilers.RouteCompileAPI, false, weightless,
			compilers.Initializers{InSource: true}, []string{"m.data"}, 0},
		{"weightless and embedded, in the source's file", nil, compilers.RouteCompileAPI, true,
			weightless, compilers.Initializers{InSource: true}, []string{"m.data"}, 0},
		{"weightless, found by the EP", nil, compilers.RouteCompileAPI, false, byReference,
			compilers.Initializers{}, []string{"00112233445566.onnx", "m.data"}, 0},
		{"weightless and embedded, found by the EP", nil, compilers.RouteCompileAPI, true,
			byReference, compilers.Initializers{}, []string{"00112233445566.onnx", "m.data"}, 0},
		{"weightless by session options, found by the EP", nil, compilers.RouteSessionOptions,
			false, byReference, compilers.Initializers{}, []string{"00112233445566.onnx", "m.data"},
			0},
		{"nothing is left for the source's file", nil, compilers.RouteCompileAPI, false, nil,
			compilers.Initializers{InSource: true}, nil, 0},
	} {
		for _, version := range []string{oldestORT, newestORT} {
			t.Run(row.name+"/"+version, func(t *testing.T) {
				r := compilertest.TestEPRuntime(t, version, compilertest.Release{})
				c := newORT(t, compilers.ORTOptions{})
				job := apartJob(t, r, testEP(row.options), layers(1, 2, false))
				job.Route, job.Embed, job.SessionOptions, job.Initializers = row.route, row.embed,
					row.session, row.keep
				result, err := c.Compile(t.Context(), job, nil)
				require.NoError(t, err)
				binary := []string{"00112233445566_epcachedtest.bin"}
				if row.embed {
					binary = nil
				}
				require.ElementsMatch(t, append(append(binary, row.files...), job.Output),
					result.Files)
				requireAlone(t, c, job, result)
				inside := 0
				for _, i := range tensorsOf(t, filepath.Join(job.Dir, result.Graph)) {
					if i.Location == "" {
						inside++
					}
				}
				require.Equal(t, row.inside, inside)
			})
		}
	}
}

// weightless leaves the weights to the model: the EPContext nodes take them as inputs.
var weightless = map[string]string{"ep.enable_weightless_ep_context_nodes": "1"}

// No real EP that there is leaves weights to the source, and ONNX Runtime says so before one is
// asked.
func TestWeightlessOnRealEPs(t *testing.T) {
	for _, name := range []string{"openvino-1.8.1", "qnn-2.7.0"} {
		r := compilertest.Runtime(t, name)
		ep := compilers.EP{Name: r.EPs[0].EP}
		if ep.Name == qnn {
			ep.Options = map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}
		}
		job := apartJob(t, r, ep, layers(1, 2, false))
		job.SessionOptions = byReference
		_, err := newORT(t, compilers.ORTOptions{}).Compile(t.Context(), job, nil)
		var refused *compilers.RefusedError
		require.ErrorAs(t, err, &refused, name)
		require.Contains(t, refused.Text, "Weightless mode requested")
	}
}

// byReference leaves the weights to the source model, where the EP finds them itself.
var byReference = map[string]string{"ep.enable_weightless": "1"}

func TestInitializersThatCannotBe(t *testing.T) {
	c := newORT(t, compilers.ORTOptions{})
	for name, edit := range map[string]func(*compilers.Job){
		"a path": func(j *compilers.Job) {
			j.Initializers.File = "sub/rest.bin"
		},
		"a way out":        func(j *compilers.Job) { j.Initializers.File = ".." },
		"the graph's name": func(j *compilers.Job) { j.Initializers.File = j.Output },
		"two places": func(j *compilers.Job) {
			j.Initializers = compilers.Initializers{File: "rest.bin", InSource: true}
		},
		"a threshold without a file": func(j *compilers.Job) { j.Initializers.Threshold = 1 },
		"a threshold below nothing": func(j *compilers.Job) {
			j.Initializers = compilers.Initializers{File: "rest.bin", Threshold: -1}
		},
		"a threshold by session options": func(j *compilers.Job) {
			j.Route, j.Initializers = compilers.RouteSessionOptions,
				compilers.Initializers{File: "rest.bin", Threshold: 1}
		},
		"of a group": func(j *compilers.Job) {
			j.Share, j.Initializers.File = []compilers.ShareMember{{Model: "/nowhere/n.onnx",
				Output: "n_ctx.onnx"}}, "rest.bin"
		},
		"weightless, of a group": func(j *compilers.Job) {
			j.Share, j.SessionOptions = []compilers.ShareMember{{Model: "/nowhere/n.onnx",
				Output: "n_ctx.onnx"}}, byReference
		},
		"the source's by session options": func(j *compilers.Job) {
			j.Route, j.Initializers = compilers.RouteSessionOptions,
				compilers.Initializers{InSource: true}
		},
	} {
		t.Run(name, func(t *testing.T) {
			job := compilers.Job{
				Runtime: compilers.Runtime{ORTLibrary: "/nowhere/libonnxruntime.so"},
				EPs:     []compilers.EP{{Name: "AnyExecutionProvider", Library: "/nowhere/ep.so"}},
				Model:   "/nowhere/m.onnx", Dir: t.TempDir(), Output: "m_ctx.onnx"}
			edit(&job)
			_, err := c.Compile(t.Context(), job, nil)
			require.ErrorIs(t, err, compilers.ErrOption)
		})
	}
}

// QNN leaves bitwise operators to the CPU, with their constants.
func TestInitializersWithQNN(t *testing.T) {
	r := compilertest.Runtime(t, "qnn-2.7.0")
	c := newORT(t, compilers.ORTOptions{})
	ep := compilers.EP{Name: qnn,
		Options: map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}}
	var want []byte
	for _, row := range []struct {
		name  string
		keep  compilers.Initializers
		files []string // besides graph and binary
	}{
		{"in the graph", compilers.Initializers{}, nil},
		{"in a file", compilers.Initializers{File: "rest.bin"}, []string{"rest.bin"}},
		{"in the source's file", compilers.Initializers{InSource: true}, []string{"m.data"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			job := apartJob(t, r, ep, bitwise())
			job.GraphOptimizationLevel, job.Initializers = "basic", row.keep
			result, err := c.Compile(t.Context(), job, nil)
			require.NoError(t, err)
			require.ElementsMatch(t,
				append([]string{job.Output, "00112233445566_ctx_qnn.bin"}, row.files...),
				result.Files)
			m := readModel(t, filepath.Join(job.Dir, result.Graph))
			require.Len(t, m.Contexts, 2)
			require.Equal(t, len(row.files), outside(t, filepath.Join(job.Dir, result.Graph)))
			require.NoError(t, os.RemoveAll(filepath.Dir(job.Model)))
			got := compilertest.Outputs(t,
				compilers.CheckJob{Runtime: r, EPs: job.EPs,
					Graph: filepath.Join(job.Dir, result.Graph)}, 7)
			if want == nil {
				want = got
			}
			require.Equal(t, want, got)
		})
	}
}

// bitwise is y = ((x w0) as integers ^ bits) as floats w1.
func bitwise() tinymodel.Model {
	const int32s = 6
	weight := func(name string, seed uint64) tinymodel.Tensor {
		return tinymodel.Tensor{Name: name, Type: tinymodel.Float, Shape: []int64{width, width},
			Raw: tinymodel.Floats(seed, width*width)}
	}
	bits := tinymodel.Tensor{Name: "bits", Type: int32s, Shape: []int64{2, width}}
	for i := range 2 * width {
		bits.Raw = binary.LittleEndian.AppendUint32(bits.Raw, uint32(i%8))
	}
	node := func(op string, attributes map[string]any, out string, in ...string) tinymodel.Node {
		return tinymodel.Node{Name: "to_" + out, Op: op, Inputs: in, Outputs: []string{out},
			Attributes: attributes}
	}
	value := func(name string) tinymodel.Value {
		return tinymodel.Value{Name: name, Type: tinymodel.Float, Shape: []any{2, width}}
	}
	return tinymodel.Model{Opsets: map[string]int64{"": 18}, Inputs: []tinymodel.Value{value("x")},
		Outputs:      []tinymodel.Value{value("y")},
		Initializers: []tinymodel.Tensor{weight("w0", 1), bits, weight("w1", 2)},
		Nodes: []tinymodel.Node{node("MatMul", nil, "a", "x", "w0"),
			node("Cast", map[string]any{"to": int64(int32s)}, "b", "a"),
			node("BitwiseXor", nil, "c", "b", "bits"),
			node("Cast", map[string]any{"to": int64(tinymodel.Float)}, "d", "c"),
			node("MatMul", nil, "y", "d", "w1")}}
}
