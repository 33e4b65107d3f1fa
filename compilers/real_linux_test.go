package compilers_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

const (
	openVINO = "OpenVINOExecutionProvider"
	qnn      = "QNNExecutionProvider"
)

// f32 keeps OpenVINO from computing in a smaller type where the processor has one.
var f32 = map[string]string{"load_config": `{"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}`}

// newORT makes a compiler that is closed at the end of the test.
func newORT(t *testing.T, o compilers.ORTOptions) *compilers.ORT {
	if o.Worker == "" {
		o.Worker = compilertest.Worker(t)
	} else {
		o.Sandbox.NoNamespaces = true // no script is fit to be the first process of one
	}
	c := compilers.NewORT(o)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// normalizer takes text, which neither EP does.
func normalizer() []byte {
	const text = 8
	value := func(name string) tinymodel.Value {
		return tinymodel.Value{Name: name, Type: text, Shape: []any{1}}
	}
	return tinymodel.Model{
		Nodes: []tinymodel.Node{{Op: "StringNormalizer", Inputs: []string{"x"},
			Outputs: []string{"y"}}},
		Inputs: []tinymodel.Value{value("x")}, Outputs: []tinymodel.Value{value("y")},
	}.Encode()
}

func TestOpenVINO(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	suite(t, subject{
		Compiler: newORT(t, compilers.ORTOptions{}), Runtime: r,
		EP: compilers.EP{Name: openVINO, Devices: []compilers.Device{{Type: "cpu"}},
			Options: f32},
		NoNodesModel: normalizer(), Verdict: compilers.Optimal, Loads: true, GroupsLoad: true,
	})
}

func TestQNN(t *testing.T) {
	r := compilertest.Runtime(t, "qnn-2.7.0")
	suite(t, subject{
		Compiler: newORT(t, compilers.ORTOptions{}), Runtime: r,
		EP: compilers.EP{Name: qnn,
			Options: map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}},
		NoNodesModel: normalizer(),
		Verdict:      compilers.Unknown, // it judges only where an NPU is
		Loads:        true,
		// and such groups do not load without an NPU
		ShareOptions: map[string]string{"enable_htp_weight_sharing": "1"},
	})
}

// Every ORT that is supported drives the same EP library.
func TestORTVersions(t *testing.T) {
	for _, name := range []string{"openvino-1.8.0-ort-1.24.4", "openvino-1.8.1-ort-1.28.0",
		"openvino-1.8.0-ort-1.28.0", "qnn-2.3.0-ort-1.24.4"} {
		t.Run(name, func(t *testing.T) {
			r := compilertest.Runtime(t, name)
			c := newORT(t, compilers.ORTOptions{})
			ep := compilers.EP{Name: r.EPs[0].EP}
			if ep.Name == qnn {
				ep.Options = map[string]string{"soc_model": "60", "enable_htp_fp16_precision": "1"}
			}
			job := writeJob(t, r, ep, compilertest.Dense(1, 64, 1))
			result, err := c.Compile(t.Context(), job, nil)
			require.NoError(t, err)
			require.Equal(t, r.ORTVersion, result.ORTVersion)
			prints, err := c.Fingerprint(t.Context(), r, job.EPs, nil)
			require.NoError(t, err)
			require.NotEmpty(t, prints[0].SDKVersion)
			check, err := c.Check(t.Context(),
				compilers.CheckJob{Runtime: r, EPs: job.EPs,
					Graph: filepath.Join(job.Dir, result.Graph)})
			require.NoError(t, err)
			require.Equal(t, compilers.Passed, check.Outcome, check.Text)
		})
	}
}

func writeJob(t *testing.T, r compilers.Runtime, ep compilers.EP, model []byte) compilers.Job {
	dir := t.TempDir()
	path := filepath.Join(dir, "00112233445566.onnx")
	require.NoError(t, os.WriteFile(path, model, 0o600))
	return compilers.Job{Runtime: r, EPs: []compilers.EP{ep}, Model: path, Dir: dir,
		Output: "00112233445566_ctx.onnx"}
}

// Both routes, and both forms, compute the same from the same model.
func TestRoutesComputeTheSame(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	c := newORT(t, compilers.ORTOptions{})
	var outputs [][]byte
	for _, variant := range []struct {
		route string
		embed bool
	}{{compilers.RouteCompileAPI, false}, {compilers.RouteCompileAPI, true},
		{compilers.RouteSessionOptions, false}, {compilers.RouteSessionOptions, true}} {
		job := writeJob(t, r, compilers.EP{Name: openVINO, Options: f32},
			compilertest.Dense(3, 64, "batch"))
		job.Route, job.Embed, job.FreeDimensions = variant.route, variant.embed,
			map[string]int64{"batch": 4}
		result, err := c.Compile(t.Context(), job, nil)
		require.NoError(t, err)
		require.Equal(t, variant.route, result.Route)
		require.Equal(t, variant.embed, len(result.Files) == 1)
		require.Positive(t, result.MaxRSS)
		data := compilertest.Outputs(t,
			compilers.CheckJob{Runtime: r, EPs: job.EPs,
				Graph: filepath.Join(job.Dir, result.Graph)}, 7)
		require.Len(t, data, 4*64*4, "the free dimension was fixed to 4")
		outputs = append(outputs, data)
	}
	for _, data := range outputs[1:] {
		require.Equal(t, outputs[0], data)
	}
}

func TestOtherWeightsGiveOtherOutputs(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	ep := compilers.EP{Name: openVINO, Options: f32}
	var outputs [][]byte
	for _, seed := range []uint64{1, 2} {
		job := writeJob(t, r, ep, compilertest.Dense(seed, 64, 1))
		outputs = append(outputs,
			compilertest.Outputs(t, compilers.CheckJob{Runtime: r, EPs: job.EPs, Graph: job.Model},
				7))
	}
	require.NotEqual(t, outputs[0], outputs[1])
}

func TestRefusalsOfORT(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	c := newORT(t, compilers.ORTOptions{})
	for name, edit := range map[string]func(*compilers.Job){
		"no such device": func(j *compilers.Job) {
			j.EPs[0].Devices = []compilers.Device{{Type: "NPU"}}
		},
		"level": func(j *compilers.Job) { j.GraphOptimizationLevel = "most" },
		"option": func(j *compilers.Job) {
			j.EPs[0].Options = map[string]string{"load_config": "{not json"}
		},
		"library that is none":    func(j *compilers.Job) { j.EPs[0].Library = j.Model },
		"ort that is none":        func(j *compilers.Job) { j.Runtime.ORTLibrary = j.Model },
		"library that is missing": func(j *compilers.Job) { j.EPs[0].Library = "/nowhere/lib.so" },
	} {
		t.Run(name, func(t *testing.T) {
			job := writeJob(t, r, compilers.EP{Name: openVINO}, compilertest.Dense(1, 8, 1))
			edit(&job)
			_, err := c.Compile(t.Context(), job, nil)
			var refused *compilers.RefusedError
			require.ErrorAs(t, err, &refused)
			t.Log(err)
		})
	}
}

// OpenVINO lists the NPUs that it knows, whether they are there or not, but its wheel lacks their
// compiler.
func TestOpenVINOForDevicesThatAreNotThere(t *testing.T) {
	r, c := compilertest.Runtime(t, "openvino-1.8.1"), newORT(t, compilers.ORTOptions{})
	virtual := map[string]string{compilers.IsVirtual: "1"}
	for name, row := range map[string]struct {
		device compilers.Device
		says   string
	}{
		"one of several": {compilers.Device{Type: "NPU", Metadata: virtual},
			"choose one by its device id"},
		"none": {compilers.Device{Type: "NPU", DeviceID: 1, Metadata: virtual},
			"it lists NPU (vendor 0x8086"},
		"one": {compilers.Device{Type: "NPU", DeviceID: 0x643e, Metadata: virtual},
			"compiler loading failed"},
	} {
		t.Run(name, func(t *testing.T) {
			job := writeJob(t, r,
				compilers.EP{Name: openVINO, Devices: []compilers.Device{row.device}},
				compilertest.Dense(1, 8, 1))
			_, err := c.Compile(t.Context(), job, nil)
			var refused *compilers.RefusedError
			require.ErrorAs(t, err, &refused)
			require.ErrorContains(t, err, row.says)
		})
	}
}

func TestProbeTellsOfAnEPThatDoesNotLoad(t *testing.T) {
	r := compilertest.Runtime(t, "openvino-1.8.1")
	r.EPs = append(r.EPs, compilers.EPLibrary{EP: qnn, Path: r.ORTLibrary})
	facts, err := newORT(t, compilers.ORTOptions{}).Probe(t.Context(), r)
	require.NoError(t, err)
	require.Empty(t, facts.EPs[0].Error)
	require.NotEmpty(t, facts.EPs[1].Error)
}
