//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/epmodel"
	"github.com/stretchr/testify/require"
)

// guideline is a sentence of ONNX Runtime's EP context design page, and what proves that the test
// EP keeps it. The names are in the page's words:
// https://onnxruntime.ai/docs/execution-providers/EP-Context-Design.html. Here are those that only
// an EP can be held to whose options, names and error messages are known; those for any EP are in
// compilers/conformance/certificate, whose tests hold the test EP to them.
type guideline struct {
	name  string
	prove func(t *testing.T, h host)
}

func TestGuidelines(t *testing.T) {
	for _, version := range []string{"1.24.4", "1.31.1"} {
		t.Run(version, func(t *testing.T) {
			h := hostOf(t, version)
			for _, part := range []struct {
				name string
				rows []guideline
			}{{"generation", generation}, {"inference", inference},
				{"weight sharing", weightSharing}, {"compile API", compileAPI}} {
				for _, row := range part.rows {
					t.Run(part.name+"/"+row.name, func(t *testing.T) { row.prove(t, h) })
				}
			}
		})
	}
}

// generation has the guidelines for making an EPContext model.
var generation = []guideline{
	{"otherwise each primary node names its file", func(t *testing.T, h host) {
		dir := t.TempDir()
		h.compile(t, write(t, dir, "m.onnx", layers(1, 3, true)), nil, set{"primaries": "each"})
		for _, c := range readModel(t, filepath.Join(dir, "m_ctx.onnx")).Contexts {
			require.EqualValues(t, 1, c.MainContext)
			require.FileExists(t, filepath.Join(dir, c.CacheContext))
		}
		require.Equal(t,
			[]string{"m.onnx", "m_ctx.onnx", "m_epcachedtest.bin", "m_epcachedtest_1.bin",
				"m_epcachedtest_2.bin"}, listing(t, dir))
	}},
	{"nowhere else", func(t *testing.T, h host) {
		dir, c := compiledAlone(t, h, nil)
		for _, name := range []string{filepath.Join(dir, c.CacheContext),
			"../" + filepath.Base(dir) + "/" + c.CacheContext, "sub/../" + c.CacheContext, ""} {
			path := write(t, dir, "bad.onnx",
				contextModel(nodeOf(c, "x", "y", set{"ep_cache_context": name})))
			require.Contains(t, h.refuses(t, invalidGraph, path, nil, nil), "ep_cache_context")
		}
	}},
	// The node's own name cannot have it: up to now ONNX Runtime puts an EPContext node where it
	// finds a fused node of the same name, and leaves plugin EPs no say in that.
	{"ep.context_node_name_prefix: in the partition's name and the graph's name in the binary",
		func(t *testing.T, h host) {
			dir := t.TempDir()
			h.compile(t, write(t, dir, "m.onnx", layers(1, 2, true)),
				set{"ep.context_node_name_prefix": "left_"}, nil)
			binary, err := os.ReadFile(filepath.Join(dir, "m_epcachedtest.bin"))
			require.NoError(t, err)
			for _, c := range readModel(t, filepath.Join(dir, "m_ctx.onnx")).Contexts {
				require.True(t, strings.HasPrefix(c.PartitionName, "left_"), c.PartitionName)
				require.Equal(t, c.PartitionName, "left_"+c.Node)
				require.Contains(t, string(binary), c.PartitionName)
			}
			h.requireLoads(t, filepath.Join(dir, "m_ctx.onnx"), layers(1, 2, true), nil, nil)
		}},
	{"optional attributes: ep_sdk_version, hardware_architecture, onnx_model_filename, " +
		"partition_name, source, notes, max_size", func(t *testing.T, h host) {
		dir := t.TempDir()
		h.compile(t, write(t, dir, "m.onnx", layers(1, 2, false)), nil,
			set{"notes": "made by a test"})
		c := readModel(t, filepath.Join(dir, "m_ctx.onnx")).Contexts[0]
		require.Equal(t,
			[]string{"1.0.0", "sim-1", "m.onnx", c.Node, compilertest.TestEP, "made by a test"},
			[]string{c.SDKVersion, c.HardwareArchitecture, c.ONNXModelFilename, c.PartitionName,
				c.Source, c.Notes})
		const between = 2*4 - 1 // values of 2 x 16 floats, all but the output
		require.EqualValues(t, between*2*width*4, c.MaxSize)
	}},
	{"ep.context_model_external_initializers_file_name: initializers of the CPU's nodes go into " +
		"a file of the new model", func(t *testing.T, h host) {
		dir := t.TempDir()
		source := layers(1, 2, false)
		h.compile(t, write(t, dir, "m.onnx", source),
			set{"ep.context_model_external_initializers_file_name": "weights.bin"},
			set{"ops": "Mul,Relu"})
		require.Contains(t, listing(t, dir), "weights.bin")
		h.requireLoads(t, filepath.Join(dir, "m_ctx.onnx"), source, nil, nil)
	}},
	{"the new model does not rely on the old external data file", func(t *testing.T, h host) {
		dir := t.TempDir()
		source := layers(1, 2, false)
		h.compile(t, write(t, dir, "m.onnx", externalized(t, dir, source)), nil,
			set{"ops": "Mul,Relu"})
		require.NoError(t, os.Remove(filepath.Join(dir, "m.data")))
		h.requireLoads(t, filepath.Join(dir, "m_ctx.onnx"), source, nil, nil)
	}},
}

// OrtErrorCode.
const (
	plainFail       = 1
	invalidArgument = 2
	noSuchFile      = 3
	invalidGraph    = 10
	epFail          = 11
)

// requireLoads loads a compiled model and runs it.
func (h host) requireLoads(t *testing.T, path string, source tinymodel.Model, session,
	provider set) {
	s := h.open(t, path, session, provider)
	defer s.Release()
	requireComputes(t, s, source)
}

// compiledAlone compiles two layers into a directory, and gives the one node.
func compiledAlone(t *testing.T, h host, session set) (dir string, c epmodel.Context) {
	dir = t.TempDir()
	h.compile(t, write(t, dir, "m.onnx", layers(1, 2, false)), session, nil)
	m := readModel(t, filepath.Join(dir, "m_ctx.onnx"))
	require.Len(t, m.Contexts, 1)
	return dir, m.Contexts[0]
}

// nodeOf returns a node with other values and, where edit says so, other attributes; "-" leaves one
// out.
func nodeOf(c epmodel.Context, in, out string, edit set) tinymodel.Node {
	attributes := map[string]any{"source": c.Source, "partition_name": c.PartitionName,
		"ep_cache_context": c.CacheContext, "main_context": c.MainContext,
		"embed_mode": c.EmbedMode}
	for name, value := range edit {
		switch {
		case value == "-":
			delete(attributes, name)
		case name == "main_context" || name == "embed_mode":
			attributes[name] = int64(value[0] - '0')
		default:
			attributes[name] = value
		}
	}
	return tinymodel.Node{Name: c.Node, Op: "EPContext", Domain: "com.microsoft",
		Inputs: []string{in}, Outputs: []string{out}, Attributes: attributes}
}

// contextModel is a model from x to y.
func contextModel(nodes ...tinymodel.Node) tinymodel.Model {
	value := func(name string) tinymodel.Value {
		return tinymodel.Value{Name: name, Type: tinymodel.Float, Shape: []any{2, width}}
	}
	m := tinymodel.Model{Opsets: map[string]int64{"": 17, "com.microsoft": 1}, Nodes: nodes,
		Inputs: []tinymodel.Value{value("x")}, Outputs: []tinymodel.Value{value("y")}}
	for _, n := range nodes {
		if n.Outputs[0] != "y" {
			m.Values = append(m.Values, value(n.Outputs[0]))
		}
	}
	return m
}

// externalized moves a model's weights into m.data in a directory.
func externalized(t *testing.T, dir string, m tinymodel.Model) tinymodel.Model {
	var data []byte
	moved := m
	moved.Initializers = nil
	for _, w := range m.Initializers {
		offset, length := len(data), len(w.Raw)
		data = append(data, w.Raw...)
		w.Location, w.Offset, w.Length = "m.data", itoa(offset), itoa(length)
		moved.Initializers = append(moved.Initializers, w)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "m.data"), data, 0o600))
	return moved
}
