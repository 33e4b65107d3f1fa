package epmodel_test

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"pgregory.net/rapid"

	"github.com/epcached/epcached/epmodel"
)

// embed returns the embedded form of an artefact.
func embed(b msg, files map[string]string) ([]byte, error) {
	m, err := read(b)
	if err != nil {
		return nil, err
	}
	sources := map[string]epmodel.Source{}
	for name, content := range files {
		sources[name] = strings.NewReader(content)
	}
	s, err := epmodel.Embed(context.Background(), m, bytes.NewReader(b), sources, epmodel.MaxGraph)
	if err != nil {
		return nil, err
	}
	return written(s)
}

// detach returns the form with files beside the graph.
func detach(b msg, output string) ([]byte, map[string]string, error) {
	m, err := read(b)
	if err != nil {
		return nil, nil, err
	}
	s, contexts, err := epmodel.Detach(context.Background(), m, bytes.NewReader(b), output, sum)
	if err != nil {
		return nil, nil, err
	}
	files := map[string]string{}
	for _, c := range contexts {
		content, err := written(c.Bytes)
		if err != nil {
			return nil, nil, err
		}
		files[c.Name] = string(content)
	}
	out, err := written(s)
	return out, files, err
}

func written(s *epmodel.Splice) ([]byte, error) {
	var out bytes.Buffer
	if err := s.WriteTo(context.Background(), &out); err != nil {
		return nil, err
	}
	if int64(out.Len()) != s.Size() {
		return nil, io.ErrShortWrite
	}
	return out.Bytes(), nil
}

// nestedArtefact returns a graph with an EPContext node at each of two depths, among other nodes.
func nestedArtefact(first, second msg) msg {
	g := msg{}.str(2, "g").sub(1, node("", "Relu", "before")).
		sub(5, inGraph("w", strings.Repeat("w", 300))).
		sub(1, first).
		sub(1,
			node("", "If", "if",
				attrG("then_branch", msg{}.sub(5, inGraph("d", "abcd")).sub(1, second)))).
		sub(1, contextNode("secondary", attrI("main_context", 0), attrI("embed_mode", 0))).
		num(77, 1<<40)
	return model(g).sub(14, pair("ep_compatibility_info.TestEP", "v1")).sub(99, msg{}.f32(1, 7))
}

func TestEmbedAndDetachChangeNothingElse(t *testing.T) {
	// its lengths take another number of bytes than a name's
	long := strings.Repeat("context ", 1000)
	beside := func(name, file string) msg {
		return contextNode(name, attrI("main_context", 1), attrI("embed_mode", 0),
			attrS("ep_cache_context", file), attrS("notes", "n"))
	}
	inside := func(name, bytes string) msg {
		return contextNode(name, attrI("main_context", 1), attrI("embed_mode", 1),
			attrS("ep_cache_context", bytes), attrS("notes", "n"))
	}
	cases := map[string]struct {
		sidecar, embedded msg
		files             map[string]string
	}{
		"two contexts": {
			nestedArtefact(beside("a", "x_ctx_TestEP.bin"), beside("b", "x_ctx_TestEP_1.bin")),
			nestedArtefact(inside("a", long), inside("b", "short")),
			map[string]string{"x_ctx_TestEP.bin": long, "x_ctx_TestEP_1.bin": "short"},
		},
		"two nodes, one file": {
			nestedArtefact(beside("a", "x_ctx_TestEP.bin"), beside("b", "x_ctx_TestEP.bin")),
			nestedArtefact(inside("a", long), inside("b", long)),
			map[string]string{"x_ctx_TestEP.bin": long},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			embedded, err := embed(c.sidecar, c.files)
			require.NoError(t, err)
			require.Equal(t, []byte(c.embedded), embedded)
			back, files, err := detach(embedded, "x_ctx.onnx")
			require.NoError(t, err)
			require.Equal(t, []byte(c.sidecar), back)
			require.Equal(t, c.files, files)
		})
	}
}

func TestDetachStatesTheModeThatWasTheDefault(t *testing.T) {
	b := model(msg{}.sub(1, contextNode("n", attrS("ep_cache_context", "bytes"))))
	got, files, err := detach(b, "x_ctx.onnx")
	require.NoError(t, err)
	require.Equal(t, map[string]string{"x_ctx_TestEP.bin": "bytes"}, files)
	require.Equal(t,
		[]byte(
			model(msg{}.sub(1,
				contextNode("n", attrS("ep_cache_context", "x_ctx_TestEP.bin"),
					attrI("embed_mode", 0))))), got)
}

func TestDetachNamesFilesAsTheirEPsDo(t *testing.T) {
	for source, want := range map[string]string{
		"QNNExecutionProvider":      "x_ctx_qnn.bin",
		"OpenVINOExecutionProvider": "x_ctx_OpenVINOExecutionProvider.bin",
		"":                          "x_ctx.bin",
		"../a/b":                    "x_ctx____a_b.bin",
	} {
		n := node("com.microsoft", "EPContext", "n", attrS("source", source),
			attrS("ep_cache_context", "bytes"))
		got, files, err := detach(model(msg{}.sub(1, n)), "x_ctx.onnx")
		require.NoError(t, err)
		require.Equal(t, map[string]string{want: "bytes"}, files)
		require.NoError(t, epmodel.Validate(mustRead(t, got), map[string]int64{want: 5}))
	}
}

func TestDetachTakesNoNameThatIsTaken(t *testing.T) {
	b := model(msg{}.sub(5, external("w", 3, "location", "x_ctx_TestEP.bin")).
		sub(1, contextNode("n", attrS("ep_cache_context", "bytes"))))
	_, files, err := detach(b, "x_ctx.onnx")
	require.NoError(t, err)
	require.Equal(t, map[string]string{"x_ctx_TestEP_1.bin": "bytes"}, files)
}

func TestConversionOfRealGraphs(t *testing.T) {
	for _, c := range []struct{ file, output, bin string }{
		{"openvino_ctx.onnx", "side_ctx.onnx", "side_ctx_OpenVINOExecutionProvider.bin"},
		{"qnn_ctx.onnx", "cpu_ctx.onnx", "cpu_ctx_qnn.bin"},
	} {
		t.Run(c.file, func(t *testing.T) {
			original, err := os.ReadFile(filepath.Join("testdata/artefacts", c.file))
			require.NoError(t, err)
			content := map[string]string{c.bin: strings.Repeat("0123456789abcdef", 1<<12)}
			embedded, err := embed(original, content)
			require.NoError(t, err)
			m := mustRead(t, embedded)
			require.NoError(t, epmodel.Validate(m, nil), "nothing is needed beside it")
			require.EqualValues(t, 1, m.Contexts[0].EmbedMode)
			back, files, err := detach(embedded, c.output)
			require.NoError(t, err)
			require.Equal(t, original, back)
			require.Equal(t, content, files)
		})
	}
}

func TestEmbedRefuses(t *testing.T) {
	plain := model(msg{}.sub(1, node("", "Relu", "r")))
	form := func(want string) func(*testing.T, error) {
		return func(t *testing.T, err error) {
			var f *epmodel.FormError
			require.ErrorAs(t, err, &f)
			require.Contains(t, f.Error(), want)
		}
	}
	cases := map[string]struct {
		b     msg
		check func(*testing.T, error)
	}{
		"a model without contexts": {plain, form("no context is in a file")},
		"one that is embedded already": {model(msg{}.sub(1,
			contextNode("n", attrS("ep_cache_context", "bytes")))),
			form("no context is in a file")},
		"a file that is not there": {sidecar("b.bin"), form(`"b.bin" is missing`)},
		"weights beside the context": {model(msg{}.sub(1,
			contextNode("n", attrI("embed_mode", 0), attrS("ep_cache_context", "a.bin"),
				attrS("weights_metadata_map", `{"w":{"location":"w.bin"}}`)))),
			form("other files")},
		"openvino's own model format": {sidecar("c.xml"), form("other files")},
		"a value that stands twice": {model(msg{}.sub(1,
			contextNode("n", attrI("embed_mode", 0),
				attrS("ep_cache_context", "x").str(4, "a.bin")))), func(t *testing.T, err error) {
			require.Contains(t, formatError(t, err).Reason, "twice")
		}},
		"a node within a node": {model(msg{}.sub(1,
			contextNode("n", attrI("embed_mode", 0), attrS("ep_cache_context", "a.bin"),
				attrG("g",
					msg{}.sub(1,
						contextNode("m", attrI("embed_mode", 0),
							attrS("ep_cache_context", "a.bin"))))))),
			func(t *testing.T, err error) {
				require.Contains(t, formatError(t, err).Reason, "subgraph of another")
			}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := embed(c.b, map[string]string{"a.bin": "a"})
			c.check(t, err)
		})
	}
}

// the size is known before a byte is read or written
func TestEmbedRefusesGraphsAboveTheProtobufLimit(t *testing.T) {
	b := sidecar("a.bin")
	of := func(size int64) (*epmodel.Splice, error) {
		unread := source{failing{io.ErrUnexpectedEOF}, size}
		return epmodel.Embed(context.Background(), mustRead(t, b), bytes.NewReader(b),
			map[string]epmodel.Source{"a.bin": unread}, epmodel.MaxGraph)
	}
	small, err := of(1 << 30)
	require.NoError(t, err)
	// the lengths are as long as those of 1 GiB
	largest := int64(epmodel.MaxGraph) - (small.Size() - 1<<30)
	s, err := of(largest)
	require.NoError(t, err)
	require.EqualValues(t, epmodel.MaxGraph, s.Size())
	_, err = of(largest + 1)
	var large *epmodel.TooLargeError
	require.ErrorAs(t, err, &large)
	require.EqualValues(t, epmodel.MaxGraph+1, large.Size)
}

func TestValidateRefusesAGraphThatProtobufCannotTake(t *testing.T) {
	m := *mustRead(t, sidecar("a.bin"))
	m.Size = epmodel.MaxGraph
	require.NoError(t, epmodel.Validate(&m, map[string]int64{"a.bin": 1}))
	m.Size++
	var large *epmodel.TooLargeError
	require.ErrorAs(t, epmodel.Validate(&m, map[string]int64{"a.bin": 1}), &large)
}

func TestSpliceSaysWhenAFileEnds(t *testing.T) {
	b := sidecar("a.bin")
	short := source{strings.NewReader("only this"), 100}
	s, err := epmodel.Embed(context.Background(), mustRead(t, b), bytes.NewReader(b),
		map[string]epmodel.Source{"a.bin": short}, epmodel.MaxGraph)
	require.NoError(t, err)
	require.ErrorIs(t, s.WriteTo(context.Background(), io.Discard), io.ErrUnexpectedEOF)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, s.WriteTo(ctx, io.Discard), context.Canceled)
}

// whatever stands around the contexts, and in them: back and forth gives the same files
func TestConversionComesBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		graph := msg{}
		files := map[string]string{}
		names := []string{"x_ctx_TestEP.bin", "x_ctx_TestEP_1.bin", "x_ctx_TestEP_2.bin"}
		main := 0
		for range rapid.IntRange(1, 6).Draw(t, "nodes") {
			switch kind := rapid.IntRange(0, 3).Draw(t, "kind"); {
			case kind == 0 && main < len(names):
				// lengths on both sides of where their encodings grow, and distinct contents
				size := rapid.SampledFrom([]int{1, 10, 90, 127, 128, 16000, 16384, 2 << 20}).
					Draw(t, "size")
				files[names[main]] = string(rune('a'+main)) + strings.Repeat("x", size)
				graph = graph.sub(1,
					contextNode("c", attrI("embed_mode", 0),
						attrS("ep_cache_context", names[main])))
				main++
			case kind == 1:
				graph = graph.sub(1,
					contextNode("s", attrI("main_context", 0),
						attrS("notes", rapid.String().Draw(t, "notes"))))
			case kind == 2:
				graph = graph.sub(5,
					inGraph("w", strings.Repeat("w", rapid.IntRange(0, 300).Draw(t, "weights"))))
			default:
				graph = append(graph,
					protowire.AppendVarint(protowire.AppendTag(nil, 50, protowire.VarintType),
						rapid.Uint64().Draw(t, "unknown"))...)
			}
		}
		original := model(graph)
		embedded, err := embed(original, files)
		if main == 0 {
			require.Error(t, err)
			return
		}
		require.NoError(t, err)
		back, again, err := detach(embedded, "x_ctx.onnx")
		require.NoError(t, err)
		require.True(t, bytes.Equal(original, back), "the graph")
		require.Equal(t, files, again)
	})
}

func FuzzConversion(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
	}
	f.Add([]byte(model(msg{}.sub(1, contextNode("n", attrS("ep_cache_context", "bytes"))))))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := read(b)
		if err != nil {
			return
		}
		files := map[string]string{}
		for _, name := range m.ContextFiles() {
			files[name] = "context of " + name
		}
		embedded, err := embed(b, files)
		if err == nil {
			after := mustRead(t, embedded)
			require.Empty(t, after.ContextFiles())
			require.Len(t, after.Contexts, len(m.Contexts))
			for i, c := range after.Contexts {
				if before := m.Contexts[i]; before.MainContext == 1 && before.CacheContext != "" {
					content, err := io.ReadAll(c.Open(bytes.NewReader(embedded)))
					require.NoError(t, err)
					require.Equal(t, files[before.CacheContext], string(content))
				}
			}
			b = embedded
		}
		got, _, err := detach(b, "x_ctx.onnx")
		if err != nil {
			return
		}
		for _, c := range mustRead(t, got).Contexts {
			require.False(t, c.MainContext == 1 && c.Inline.Length > 0, "a context stayed inside")
		}
	})
}
