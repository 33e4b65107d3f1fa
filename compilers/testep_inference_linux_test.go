//go:build linux && (amd64 || arm64)

package compilers_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/stretchr/testify/require"
)

func itoa(n int) string { return strconv.Itoa(n) }

// noFallback makes a session fail when a node is left to the CPU.
var noFallback = set{"session.disable_cpu_ep_fallback": "1"}

// inference has the guidelines for loading an EPContext model.
var inference = []guideline{
	{"the EP inspects source, and takes only its own nodes", func(t *testing.T, h host) {
		dir, c := compiledAlone(t, h, nil)
		own := write(t, dir, "own.onnx", contextModel(nodeOf(c, "x", "y", nil)))
		h.requireLoads(t, own, layers(1, 2, false), noFallback, nil)
		for _, source := range []string{"OpenVINOExecutionProvider",
			"epcachedtestexecutionprovider", "", "-"} {
			other := write(t, dir, "other.onnx",
				contextModel(nodeOf(c, "x", "y", set{"source": source})))
			_, err := h.options(t, nil, nil).Open(other)
			require.Error(t, err, "source %q", source)
			require.NotContains(t, err.Error(), "context binary", "the EP did not even look at it")
		}
	}},
	{"the EP loads the cached context: nothing is compiled again", func(t *testing.T, h host) {
		dir, _ := compiledAlone(t, h, nil)
		h.requireLoads(t, filepath.Join(dir, "m_ctx.onnx"), layers(1, 2, false), noFallback,
			set{"fault": "fail@compile"})
	}},
	{"attributes that are left out have the schema's defaults", func(t *testing.T, h host) {
		dir, c := compiledAlone(t, h, nil)
		path := write(t, dir, "short.onnx",
			contextModel(nodeOf(c, "x", "y", set{"main_context": "-"})))
		h.requireLoads(t, path, layers(1, 2, false), nil, nil)
		path = write(t, dir, "embedded.onnx",
			contextModel(nodeOf(c, "x", "y", set{"embed_mode": "-"})))
		require.Contains(t, h.refuses(t, invalidGraph, path, nil, nil), "in the model",
			"the name is read as the content, for embed_mode is 1")
	}},
	{"loaded from memory: ep.context_file_path gives the directory, and is required",
		func(t *testing.T, h host) {
			dir, _ := compiledAlone(t, h, nil)
			model, err := os.ReadFile(filepath.Join(dir, "m_ctx.onnx"))
			require.NoError(t, err)
			// only its path counts
			require.NoError(t, os.Remove(filepath.Join(dir, "m_ctx.onnx")))
			_, err = h.options(t, nil, nil).OpenBytes(model)
			require.ErrorContains(t, err, "ep.context_file_path")
			s, err := h.options(t, set{"ep.context_file_path": filepath.Join(dir, "m_ctx.onnx")},
				nil).OpenBytes(model)
			require.NoError(t, err)
			defer s.Release()
			requireComputes(t, s, layers(1, 2, false))
		}},
	{"several primary nodes, from files or from within the model", func(t *testing.T, h host) {
		for _, embed := range []string{"0", "1"} {
			dir := t.TempDir()
			h.compile(t, write(t, dir, "m.onnx", layers(1, 3, true)),
				set{"ep.context_embed_mode": embed}, set{"primaries": "each"})
			h.requireLoads(t, filepath.Join(dir, "m_ctx.onnx"), layers(1, 3, true), nil, nil)
		}
	}},
	{"main_context=0: the graph comes from another node's context, wherever that node stands",
		func(t *testing.T, h host) {
			dir := t.TempDir()
			h.compile(t, write(t, dir, "m.onnx", layers(1, 2, true)), nil, nil)
			nodes := readModel(t, filepath.Join(dir, "m_ctx.onnx")).Contexts
			require.Len(t, nodes, 2)
			first, second := nodes[0], nodes[1]
			if first.MainContext == 0 {
				first, second = second, first
			}
			negation := tinymodel.Node{Op: "Neg", Inputs: []string{"h"}, Outputs: []string{"n"}}
			swapped := contextModel(nodeOf(first, "x", "h",
				set{"main_context": "0", "ep_cache_context": "-"}), negation,
				nodeOf(second, "n", "y",
					set{"main_context": "1", "ep_cache_context": first.CacheContext}))
			h.requireLoads(t, write(t, dir, "swapped.onnx", swapped), layers(1, 2, true), nil,
				nil)
			orphan := contextModel(nodeOf(second, "x", "y", nil))
			require.Contains(t,
				h.refuses(t, invalidGraph, write(t, dir, "orphan.onnx", orphan), nil, nil),
				"no primary context")
		}},
	{"main_context=0: a graph that two primary contexts hold is refused, not guessed",
		func(t *testing.T, h host) {
			dir := t.TempDir()
			path := filepath.Join(dir, "m.onnx")
			var nodes []tinymodel.Node
			for i, at := range [][2]string{{"x", "h"}, {"h", "g"}} {
				write(t, dir, "m.onnx", layers(uint64(1+10*i), 1, false))
				h.compile(t, path,
					set{"ep.context_embed_mode": "1",
						"ep.context_file_path": filepath.Join(dir, itoa(i)+".onnx")}, nil)
				c := readModel(t, filepath.Join(dir, itoa(i)+".onnx")).Contexts[0]
				content, err := os.ReadFile(filepath.Join(dir, itoa(i)+".onnx"))
				require.NoError(t, err)
				node := nodeOf(c, at[0], at[1],
					set{
						"ep_cache_context": string(
							content[c.Inline.Offset : c.Inline.Offset+c.Inline.Length])})
				// ONNX Runtime wants nodes' names to differ, which partitions' need not
				node.Name = "primary" + itoa(i)
				nodes = append(nodes, node)
			}
			second := nodes[1]
			second.Name = "secondary"
			second.Inputs, second.Outputs = []string{"g"}, []string{"y"}
			second.Attributes = map[string]any{"source": second.Attributes["source"],
				"partition_name": second.Attributes["partition_name"], "main_context": int64(0)}
			text := h.refuses(t, invalidGraph,
				write(t, dir, "three.onnx", contextModel(append(nodes, second)...)), nil, nil)
			require.Contains(t, text, "two primary contexts")
		}},
	{"a binary that is missing, or lacks the graph, is an error that says so",
		func(t *testing.T, h host) {
			dir, c := compiledAlone(t, h, nil)
			path := write(t, dir, "renamed.onnx",
				contextModel(nodeOf(c, "x", "y", set{"partition_name": "nobody"})))
			require.Contains(t, h.refuses(t, invalidGraph, path, nil, nil), `"nobody"`)
			require.NoError(t, os.Remove(filepath.Join(dir, c.CacheContext)))
			require.Contains(t,
				h.refuses(t, noSuchFile, filepath.Join(dir, "m_ctx.onnx"), nil, nil),
				c.CacheContext)
		}},
	{"ep.enable_weightless_ep_context_nodes: weights stay in the model, and are the nodes' inputs",
		func(t *testing.T, h host) {
			dir := t.TempDir()
			source := layers(1, 2, false)
			h.compile(t, write(t, dir, "m.onnx", source),
				set{"ep.enable_weightless_ep_context_nodes": "1"}, nil)
			m := readModel(t, filepath.Join(dir, "m_ctx.onnx"))
			require.Equal(t, 1+len(source.Initializers), m.Contexts[0].Inputs)
			binary, err := os.ReadFile(filepath.Join(dir, "m_epcachedtest.bin"))
			require.NoError(t, err)
			require.NotContains(t, string(binary), string(source.Initializers[0].Raw[:64]))
			h.requireLoads(t, filepath.Join(dir, "m_ctx.onnx"), source, nil, nil)
		}},
	{"ep.enable_weightless: the binary says where in the source's external data the weights stand",
		func(t *testing.T, h host) {
			dir, source := t.TempDir(), layers(1, 2, false)
			path := filepath.Join(dir, "m_ctx.onnx")
			h.compile(t, write(t, dir, "m.onnx", externalized(t, dir, source)),
				set{"ep.enable_weightless": "1"}, nil)
			m := readModel(t, path)
			require.Equal(t, 1, m.Contexts[0].Inputs,
				"unlike with the older option the EP has the weights itself")
			require.Empty(t, m.Locations())
			binary, err := os.ReadFile(filepath.Join(dir, "m_epcachedtest.bin"))
			require.NoError(t, err)
			require.NotContains(t, string(binary), string(source.Initializers[0].Raw[:64]))
			h.requireLoads(t, path, source, nil, nil) // from beside the compiled model
			require.NoError(t, os.Truncate(filepath.Join(dir, "m.data"), 2000))
			require.Contains(t, h.refuses(t, invalidGraph, path, nil, nil), "m.data")
			require.NoError(t, os.Remove(filepath.Join(dir, "m.data")))
			require.Contains(t, h.refuses(t, noSuchFile, path, nil, nil), "m.data")
			require.NoError(t,
				os.WriteFile(filepath.Join(dir, "m_epcachedtest.bin"),
					bytes.ReplaceAll(binary, []byte("m.data"), []byte("../m.d")), 0o600))
			require.Contains(t, h.refuses(t, invalidGraph, path, nil, set{"check": "0"}), "../m.d",
				"no way out of the directory")
		}},
	{"ep.enable_weightless: initializers within the source model are copied",
		func(t *testing.T, h host) {
			dir, source := t.TempDir(), layers(1, 2, false)
			h.compile(t, write(t, dir, "m.onnx", source), set{"ep.enable_weightless": "1"}, nil)
			require.NoError(t, os.Remove(filepath.Join(dir, "m.onnx")))
			h.requireLoads(t, filepath.Join(dir, "m_ctx.onnx"), source, nil, nil)
		}},
	{"ep.context_source_model_path: where the source model is, if not beside the compiled one",
		func(t *testing.T, h host) {
			from, to, source := t.TempDir(), t.TempDir(), layers(1, 2, false)
			for _, embed := range []string{"0", "1"} {
				path := filepath.Join(to, embed+"_ctx.onnx")
				h.compile(t, write(t, from, "m.onnx", externalized(t, from, source)),
					set{"ep.enable_weightless": "1", "ep.context_file_path": path,
						"ep.context_embed_mode": embed}, nil)
				require.Contains(t, h.refuses(t, noSuchFile, path, nil, nil), "m.data")
				h.requireLoads(t, path, source,
					set{"ep.context_source_model_path": filepath.Join(from, "m.onnx")}, nil)
			}
		}},
	{"a virtual device compiles, and does not load", func(t *testing.T, h host) {
		dir := t.TempDir()
		virtual := host{env: h.env, devices: h.devices[2:]}
		require.Equal(t, "NPU", virtual.devices[0].Type)
		virtual.compile(t, write(t, dir, "m.onnx", layers(1, 2, false)), nil, nil)
		require.Equal(t, "sim-virtual", readModel(t, filepath.Join(dir, "m_ctx.onnx")).
			Contexts[0].HardwareArchitecture)
		virtual.refuses(t, epFail, filepath.Join(dir, "m_ctx.onnx"), nil, nil)
		require.Contains(t, h.refuses(t, plainFail, filepath.Join(dir, "m_ctx.onnx"), nil, nil),
			"not supported", "so the EP reported it to ONNX Runtime")
	}},
}
