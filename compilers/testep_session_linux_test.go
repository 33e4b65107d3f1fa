//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"encoding/binary"
	"io"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/epmodel"
	"github.com/stretchr/testify/require"
)

// host is an application: a process with ONNX Runtime and the test EP. It is the test's own
// process, for the EP is ours; vendors' are only loaded in workers.
type host struct {
	env     *ort.Env
	devices []ort.Device
}

// set is a set of options, ONNX Runtime's or the EP's.
type set map[string]string

// hosts holds the one host of each version of ONNX Runtime: in a process that has one environment,
// in which a library is registered once.
var hosts = map[string]host{}

func hostOf(t *testing.T, version string) host {
	if _, ok := hosts[version]; !ok {
		hosts[version] = newHost(t, version)
	}
	return hosts[version]
}

func newHost(t *testing.T, version string) host {
	r := compilertest.TestEPRuntime(t, version, compilertest.Release{})
	api, err := ort.Open(r.ORTLibrary)
	require.NoError(t, err)
	env, err := api.NewEnv(io.Discard, nil)
	require.NoError(t, err)
	require.NoError(t, env.Register(compilertest.TestEP+".virtual", r.EPs[0].Path))
	return host{env: env, devices: devicesOf(t, env)}
}

func devicesOf(t *testing.T, env *ort.Env) []ort.Device {
	all, err := env.Devices()
	require.NoError(t, err)
	var devices []ort.Device
	for _, d := range all {
		if d.EP == compilertest.TestEP {
			devices = append(devices, d)
		}
	}
	require.Len(t, devices, 3, "two devices, and a virtual one")
	return devices
}

// options has the EP with its first device.
func (h host) options(t *testing.T, session, provider set) *ort.SessionOptions {
	o, err := h.env.NewSessionOptions()
	require.NoError(t, err)
	t.Cleanup(o.Release)
	for key, value := range session {
		require.NoError(t, o.Set(key, value))
	}
	require.NoError(t, o.Append(h.devices[:1], provider))
	return o
}

func (h host) open(t *testing.T, model string, session, provider set) *ort.Session {
	s, err := h.options(t, session, provider).Open(model)
	require.NoError(t, err)
	return s
}

// refuses opens a model that is not to be opened, and gives the error's words.
func (h host) refuses(t *testing.T, code int, model string, session, provider set) string {
	s, err := h.options(t, session, provider).Open(model)
	if err == nil {
		s.Release()
	}
	var status *ort.Error
	require.ErrorAs(t, err, &status)
	require.Equal(t, code, status.Code, status.Text)
	return status.Text
}

// compile makes the compiled form of a model in its directory, by session options, and ends the
// session.
func (h host) compile(t *testing.T, model string, session, provider set) {
	h.compiling(t, model, session, provider).Release()
}

func (h host) compiling(t *testing.T, model string, session, provider set) *ort.Session {
	entries := set{"ep.context_enable": "1"}
	for key, value := range session {
		entries[key] = value
	}
	return h.open(t, model, entries, provider)
}

// requireComputes runs a session, and compares what it gives with what the source model means.
func requireComputes(t *testing.T, s *ort.Session, source tinymodel.Model) {
	inputs := someInputs(t, s)
	values := map[string][]float32{}
	for _, in := range inputs {
		values[in.Name] = floats(in.Data)
	}
	outputs, err := s.Run(inputs)
	require.NoError(t, err)
	evaluate(source, values)
	require.Len(t, outputs, len(source.Outputs))
	for _, out := range outputs {
		require.InDeltaSlice(t, values[out.Name], floats(out.Data), 1e-4, out.Name)
		require.NotZero(t, norm(values[out.Name]), "an output of zeros would prove nothing")
	}
}

// someInputs returns numbers for all inputs of a session.
func someInputs(t *testing.T, s *ort.Session) []ort.Tensor {
	inputs, err := s.Inputs()
	require.NoError(t, err)
	for i := range inputs {
		count := 1
		for _, dim := range inputs[i].Shape {
			count *= int(dim)
		}
		inputs[i].Data = tinymodel.Floats(uint64(100+i), count)
	}
	return inputs
}

func norm(values []float32) (sum float32) {
	for _, v := range values {
		sum += v * v
	}
	return sum
}

func floats(data []byte) []float32 {
	var values []float32
	for ; len(data) >= 4; data = data[4:] {
		values = append(values, math.Float32frombits(binary.LittleEndian.Uint32(data)))
	}
	return values
}

// evaluate computes a model in plain Go. All values are rows of the same width; a shorter operand
// of Add and Mul is repeated.
func evaluate(m tinymodel.Model, values map[string][]float32) {
	for _, w := range m.Initializers {
		values[w.Name] = floats(w.Raw)
	}
	for _, n := range m.Nodes {
		a := values[n.Inputs[0]]
		var b []float32
		if len(n.Inputs) > 1 {
			b = values[n.Inputs[1]]
		}
		values[n.Outputs[0]] = apply(n.Op, a, b)
	}
}

func apply(op string, a, b []float32) []float32 {
	if op == "MatMul" {
		width := int(math.Sqrt(float64(len(b))))
		out := make([]float32, len(a))
		for i := range out {
			for k := range width {
				out[i] += a[i/width*width+k] * b[k*width+i%width]
			}
		}
		return out
	}
	out := make([]float32, len(a))
	for i, x := range a {
		switch op {
		case "Add":
			out[i] = x + b[i%len(b)]
		case "Mul":
			out[i] = x * b[i%len(b)]
		case "Relu":
			out[i] = max(x, 0)
		case "Neg":
			out[i] = -x
		}
	}
	return out
}

const width = 16

// layers is y[2,16] = layer(layer(... x)), each Relu(x W + b) * s. Between two layers stands a node
// that the EP leaves to the CPU, if apart.
func layers(seed uint64, count int, apart bool) tinymodel.Model {
	shape := []any{2, width}
	m := tinymodel.Model{
		Inputs:  []tinymodel.Value{{Name: "x", Type: tinymodel.Float, Shape: shape}},
		Outputs: []tinymodel.Value{{Name: "y", Type: tinymodel.Float, Shape: shape}},
	}
	at := "x"
	for i := range count {
		name := func(s string) string { return s + string(rune('0'+i)) }
		w := tinymodel.Tensor{Name: name("w"), Type: tinymodel.Float, Shape: []int64{width, width},
			Raw: tinymodel.Floats(seed+uint64(i), width*width)}
		b := tinymodel.Tensor{Name: name("b"), Type: tinymodel.Float, Shape: []int64{width},
			Raw: tinymodel.Floats(seed+uint64(i)+50, width)}
		s := tinymodel.Tensor{Name: name("s"), Type: tinymodel.Float,
			Raw: tinymodel.Floats(seed+uint64(i)+70, 1)}
		out := name("h")
		if i == count-1 {
			out = "y"
		}
		m.Initializers = append(m.Initializers, w, b, s)
		m.Nodes = append(m.Nodes,
			tinymodel.Node{Name: name("mul"), Op: "MatMul", Inputs: []string{at, w.Name},
				Outputs: []string{name("m")}},
			tinymodel.Node{Name: name("add"), Op: "Add", Inputs: []string{name("m"), b.Name},
				Outputs: []string{name("a")}},
			tinymodel.Node{Name: name("act"), Op: "Relu", Inputs: []string{name("a")},
				Outputs: []string{name("r")}},
			tinymodel.Node{Name: name("scale"), Op: "Mul", Inputs: []string{name("r"), s.Name},
				Outputs: []string{out}})
		at = out
		if apart && i < count-1 {
			m.Nodes = append(m.Nodes,
				tinymodel.Node{Name: name("neg"), Op: "Neg", Inputs: []string{at},
					Outputs: []string{name("n")}})
			at = name("n")
		}
	}
	return m
}

// write puts a model into a directory.
func write(t *testing.T, dir, name string, m tinymodel.Model) string {
	path := filepath.Join(dir, name)
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, m.Encode(), 0o600))
	return path
}

type modelFile struct {
	*os.File
	size int64
}

func (f modelFile) Size() int64 { return f.size }

func readModel(t *testing.T, path string) *epmodel.Model {
	m, _ := readTensors(t, path)
	return m
}

func tensorsOf(t *testing.T, path string) []epmodel.Initializer {
	_, all := readTensors(t, path)
	return all
}

func readTensors(t *testing.T, path string) (*epmodel.Model, []epmodel.Initializer) {
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close() // only read
	info, err := f.Stat()
	require.NoError(t, err)
	var all []epmodel.Initializer
	m, err := epmodel.Tensors(t.Context(), filepath.Base(path), modelFile{f, info.Size()},
		func(i *epmodel.Initializer) {
			all = append(all, *i)
		})
	require.NoError(t, err)
	return m, all
}

// listing returns the names of the files in a directory, sorted.
func listing(t *testing.T, dir string) []string {
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
