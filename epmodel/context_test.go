package epmodel_test

import (
	"bytes"
	"context"
	"io"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/epmodel"
)

func TestContextDefaults(t *testing.T) {
	b := model(msg{}.sub(1, node("com.microsoft", "EPContext", "")))
	c := mustRead(t, b).Contexts[0]
	require.EqualValues(t, 1, c.EmbedMode)
	require.EqualValues(t, 1, c.MainContext)
	require.EqualValues(t, 0, c.MaxSize)
	require.Zero(t, c.Inline)
	require.Empty(t, c.Source)
}

func TestContextAttributes(t *testing.T) {
	long := strings.Repeat("x", 5000)
	// embed_mode comes last: what ep_cache_context means is known only then
	b := model(msg{}.sub(1, contextNode("n",
		attrS("ep_cache_context", "sub/c.bin"), attrI("main_context", 0), attrI("max_size", 77),
		attrS("ep_sdk_version", "2.51"),
		attrS("partition_name", "p"), attrS("hardware_architecture", "v73"),
		attrS("onnx_model_filename", "m.onnx"), attrS("notes", "hi"),
		attrI("is_multi_soc_ep_context", 1), attrS("ep_context_type", "bin"),
		msg{}.str(1, "ratio").f32(2, math.Float32bits(0.5)).num(20, 1),
		msg{}.str(1, "old").num(3, 5), msg{}.str(1, "older").str(4, "text"), attrS("empty", ""),
		attrS("long", long), attrS("binary", "\xff\xfe"), attrs("list", "a", "b"),
		attrI("embed_mode", 0))))
	c := mustRead(t, b).Contexts[0]
	require.Equal(t, []string{"TestEP", "p", "2.51", "v73", "m.onnx", "hi", "sub/c.bin"},
		[]string{c.Source, c.PartitionName, c.SDKVersion, c.HardwareArchitecture,
			c.ONNXModelFilename, c.Notes, c.CacheContext})
	require.Equal(t, []int64{0, 0, 77}, []int64{c.EmbedMode, c.MainContext, c.MaxSize})
	require.Equal(t,
		map[string]string{"is_multi_soc_ep_context": "1", "ep_context_type": "bin", "ratio": "0.5",
			"old": "5", "older": "text", "empty": ""}, c.Attributes)
	r := c.Long["long"]
	require.Equal(t, long, string(b[r.Offset:r.Offset+r.Length]))
	require.EqualValues(t, 2, c.Long["binary"].Length)
	require.Contains(t, c.Long, "list")
	require.Equal(t, []int{1, 1}, []int{c.Inputs, c.Outputs})
	require.Equal(t, byte(1<<3|2), b[c.Offset], "the node's tag in graph")
}

// a model under the old defaults: "x.onnx_ctx.onnx", embedded, and nothing but the context in its
// node
func TestContextEmbeddedUnderOldDefaults(t *testing.T) {
	bin := "\x00\x01context\xff"
	b := model(msg{}.sub(1,
		node("com.microsoft", "EPContext", "n", attrS("ep_cache_context", bin))))
	m := mustRead(t, b)
	c := m.Contexts[0]
	require.Empty(t, c.CacheContext)
	got, err := io.ReadAll(c.Open(bytes.NewReader(b)))
	require.NoError(t, err)
	require.Equal(t, bin, string(got))
	require.Empty(t, m.Sidecars())
	require.NoError(t, epmodel.Validate(m, nil))
}

func TestSidecars(t *testing.T) {
	cases := map[string]struct {
		node msg
		want []string // attribute: name
	}{
		"embedded": {contextNode("n",
			attrS("ep_cache_context", "not a name.bin")), nil},
		"sidecar": {contextNode("n", attrI("embed_mode", 0),
			attrS("ep_cache_context", "a.bin")), []string{"ep_cache_context: a.bin"}},
		"sidecar in a subdirectory": {contextNode("n", attrI("embed_mode", 0),
			attrS("ep_cache_context", "sub/dir/a.bin")),
			[]string{"ep_cache_context: sub/dir/a.bin"}},
		"xml brings its bin": {contextNode("n", attrI("embed_mode", 0),
			attrS("ep_cache_context", "sub/a.XML")),
			[]string{"ep_cache_context: sub/a.XML", "ep_cache_context: sub/a.bin"}},
		"dlc, embed_mode left out": {contextNode("n", attrS("ep_context_type", "dlc"),
			attrS("ep_dlc_context", "m.dlc")), []string{"ep_dlc_context: m.dlc"}},
		"weights map": {contextNode("n",
			attrS("weights_metadata_map",
				`{"b":{"location":"w2","size":1},"a":{"data_offset":9007199254740993,`+
					`"location":"w1"},"c":{"location":"w2"},"d":{"deeper":[{"location":"w3"}]}}`)),
			[]string{"weights_metadata_map: w2", "weights_metadata_map: w1",
				"weights_metadata_map: w3"}},
		"weights map empty": {contextNode("n", attrS("weights_metadata_map", "")), nil},
		"not main, nothing of its own": {contextNode("n", attrI("embed_mode", 0),
			attrI("main_context", 0)), nil},
		"not main, names the file": {contextNode("n", attrI("embed_mode", 0),
			attrI("main_context", 0), attrS("ep_cache_context", "a.bin")),
			[]string{"ep_cache_context: a.bin"}},
	}
	for name, c := range cases {
		for where, graph := range map[string]msg{"main": msg{}.sub(1, c.node),
			"subgraph": msg{}.sub(1,
				node("", "If", "i", attrG("then_branch", msg{}.sub(1, c.node))))} {
			t.Run(name+"/"+where, func(t *testing.T) {
				var got []string
				for _, r := range mustRead(t, model(graph)).Sidecars() {
					require.Equal(t, "n", r.Node)
					require.Positive(t, r.Offset)
					got = append(got, r.Attribute+": "+r.Name)
				}
				require.Equal(t, c.want, got)
			})
		}
	}
}

func TestSidecarsTellExternalDataOnce(t *testing.T) {
	g := msg{}.sub(5, external("b", 1, "location", "w")).sub(5, external("a", 1, "location", "v")).
		sub(5, external("c", 1, "location", "w", "offset", "4"))
	var got []string
	for _, r := range mustRead(t, model(g)).Sidecars() {
		got = append(got, r.Node+" "+r.Attribute+" "+r.Name)
	}
	require.Equal(t, []string{"b external_data w", "a external_data v"}, got)
}

// copies of a source model's metadata survive compilation; only the EP that made a node is believed
func TestCompatibilityInfoOfSourcesOnly(t *testing.T) {
	b := model(msg{}.sub(1, contextNode("n")).
		sub(1, node("com.microsoft", "EPContext", "made by nobody"))).
		sub(14, pair("ep_compatibility_info.TestEP", "v1")).
		sub(14, pair("ep_compatibility_info.OtherEP", "left over")).
		sub(14, pair("ep_compatibility_info.", "nobody's"))
	require.Equal(t, map[string]string{"TestEP": "v1"}, mustRead(t, b).CompatibilityInfo())
}

func TestNodeSummary(t *testing.T) {
	g := msg{}.sub(1, node("", "Conv", "c1")).sub(1, node("", "Relu", "")).
		sub(1, node("", "Conv", "c2")).sub(1, node("my", "Op", "o"))
	m := mustRead(t, model(g))
	require.Equal(t, "4 nodes (2 Conv, 1 Relu, and 1 more operators)", m.NodeSummary(2))
	require.Equal(t, "0 nodes", mustRead(t, model(nil)).NodeSummary(2))

	partly := mustRead(t, model(msg{}.sub(1, contextNode("n")).sub(1, node("", "Relu", ""))))
	require.Equal(t, "1 node (1 Relu)", partly.UncompiledSummary(2))
}

// what real EPs write
func TestRealArtefacts(t *testing.T) {
	cases := map[string]struct {
		context epmodel.Context
		info    map[string]string
		ops     map[string]int
	}{
		"openvino_ctx.onnx": {
			epmodel.Context{
				Node: "OpenVINOExecutionProvider_OpenVINOExecutionProvider_" +
					"10291946305476075467_0_0", Domain: "com.microsoft",
				Source:        "OpenVINOExecutionProvider",
				PartitionName: "side_ctx_OpenVINOExecutionProvider_OpenVINO-EP-subgraph_1_0",
				SDKVersion:    "2026.4", ONNXModelFilename: "side.onnx",
				CacheContext: "side_ctx_OpenVINOExecutionProvider.bin", MainContext: 1,
				Attributes: map[string]string{}, Long: map[string]epmodel.Range{}, Inputs: 1,
				Outputs: 1, Offset: 5},
			map[string]string{
				"OpenVINOExecutionProvider": `{"ovep_compat_ver":"1.0",` +
					`"ovep_ver":"1.8.1+95d534b.ci.79","ovep_bin_ver":"1.1","ov_compat_string":` +
					`"meta=1.0;ov=2026.4.1;isa=Intel AVX-512 with Intel DL Boost and bfloat16 ` +
					`support"}`},
			map[string]int{"com.microsoft::EPContext": 1},
		},
		"qnn_ctx.onnx": {
			epmodel.Context{
				Node:   "QNNExecutionProvider_QNNExecutionProvider_18438451277776914804_1_0",
				Domain: "com.microsoft", Source: "QNNExecutionProvider",
				PartitionName: "QNNExecutionProvider_QNNExecutionProvider_18438451277776914804_1_0",
				SDKVersion:    "v2.51.0.260929181845",
				CacheContext:  "cpu_ctx_qnn.bin", MainContext: 1,
				Attributes: map[string]string{"is_multi_soc_ep_context": "0"},
				Long:       map[string]epmodel.Range{}, Inputs: 1, Outputs: 1, Offset: 5},
			map[string]string{"QNNExecutionProvider": "v2:6:2.51.0:5.51.0:0:60:0:0"},
			map[string]int{"com.microsoft::EPContext": 1, "ai.onnx::NonZero": 1},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			b, err := os.ReadFile("testdata/artefacts/" + name)
			require.NoError(t, err)
			m, err := epmodel.Read(context.Background(), name, bytes.NewReader(b))
			require.NoError(t, err)
			require.EqualValues(t, 13, m.IRVersion)
			require.Equal(t, []epmodel.Context{c.context}, m.Contexts)
			require.Equal(t, c.info, m.CompatibilityInfo())
			require.Equal(t, c.ops, m.OpTypes)
			require.Contains(t, m.Opsets, epmodel.Opset{Domain: "com.microsoft", Version: 1})
			require.NoError(t,
				epmodel.Validate(m, map[string]int64{c.context.CacheContext: 131072}))
			require.Error(t, epmodel.Validate(m, nil))
		})
	}
}
