package epmodel_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/epmodel"
)

func TestReadTakesEverySpellingOfAFileBelowTheDirectory(t *testing.T) {
	for _, location := range []string{"a.bin", "./a.bin", "s//a.bin", "s/../a.bin",
		"s/t/.././../a.bin", "..a.bin", `s\a.bin`} {
		m := mustRead(t, model(msg{}.sub(5, external("w", 3, "location", location))))
		require.Equal(t, []string{location}, m.Locations(), "the spelling is the model's")
	}
}

func TestReadTellsInitializers(t *testing.T) {
	const raw = "abcdefgh"
	sparse := msg{}.sub(1, inGraph("s", raw)).sub(2, external("", 2, "location", "idx.bin")).
		num(3, 40).num(3, 50)
	cases := map[string]struct {
		graph msg
		want  epmodel.Initializer
	}{
		"raw data: a range of the graph file": {
			msg{}.sub(5, inGraph("w", raw)),
			epmodel.Initializer{Name: "w", Type: 1, Shape: []int64{2}, Length: 8},
		},
		"external data, every key": {
			msg{}.sub(5,
				external("w", 3, "location", "sub/w.bin", "offset", "4096", "length", "12",
					"checksum", "c0ffee", "prepacked_0", "x|0;1")),
			epmodel.Initializer{Name: "w", Type: 1, Shape: []int64{3}, Location: "sub/w.bin",
				Offset: 4096, Length: 12, OtherKeys: []string{"prepacked_0"}},
		},
		"external data, no length: to the end": {
			msg{}.sub(5, external("w", 3, "location", "w.bin")),
			epmodel.Initializer{Name: "w", Type: 1, Shape: []int64{3}, Location: "w.bin",
				Length: -1},
		},
		"external data, length 0: not given, as readers take it": {
			msg{}.sub(5, external("w", 3, "location", "w.bin", "length", "0")),
			epmodel.Initializer{Name: "w", Type: 1, Shape: []int64{3}, Location: "w.bin",
				Length: -1},
		},
		"external_data without the mark is not used": {
			msg{}.sub(5, msg{}.num(2, 1).str(8, "w").str(9, raw).
				sub(13, pair("location", "/etc/passwd"))),
			epmodel.Initializer{Name: "w", Type: 1, Length: 8},
		},
		"typed data, packed": {
			msg{}.sub(5, msg{}.num(2, 1).str(8, "w").str(4, raw)),
			epmodel.Initializer{Name: "w", Type: 1, Typed: true, Length: 8},
		},
		"typed data, in pieces": {
			msg{}.sub(5, msg{}.num(2, 1).str(8, "w").f32(4, 1).f32(4, 2)),
			epmodel.Initializer{Name: "w", Type: 1, Typed: true},
		},
		"strings": {
			msg{}.sub(5, msg{}.num(2, 8).str(8, "w").str(6, "a").str(6, "b")),
			epmodel.Initializer{Name: "w", Type: 8, Typed: true},
		},
		"dimensions packed": {
			msg{}.sub(5, msg{}.str(1, "\x02\x80\x01").num(2, 1).str(8, "w").str(9, raw)),
			epmodel.Initializer{Name: "w", Type: 1, Shape: []int64{2, 128}, Length: 8},
		},
		"sparse values": {
			msg{}.sub(15, sparse),
			epmodel.Initializer{Name: "s", Part: "values", Sparse: true, Type: 1, Shape: []int64{2},
				Length: 8},
		},
		"constant in a node": {
			msg{}.sub(1,
				node("", "Constant", "c", attrT("value", external("", 2, "location", "c.bin")))),
			epmodel.Initializer{Node: "c", Attribute: "value", Type: 1, Shape: []int64{2},
				Location: "c.bin", Length: -1},
		},
		"constant in a node without a name": {
			msg{}.sub(1, node("", "Constant", "", attrT("value", inGraph("t", raw)))),
			epmodel.Initializer{Name: "t", Node: "Constant[0]", Attribute: "value", Type: 1,
				Shape: []int64{2}, Length: 8},
		},
		"in a subgraph of a subgraph": {
			msg{}.sub(1,
				node("", "If", "if",
					attrG("then_branch",
						msg{}.sub(1,
							node("", "Loop", "",
								attrG("body", msg{}.sub(5, inGraph("w", raw)))))))),
			epmodel.Initializer{Name: "w", Graph: "if.then_branch/Loop[0].body", Type: 1,
				Shape: []int64{2}, Length: 8},
		},
		"in the second of a list of graphs": {
			msg{}.sub(1,
				node("my", "Op", "op", msg{}.str(1, "v").sub(11, msg{}).
					sub(11, msg{}.sub(5, inGraph("w", raw))))),
			epmodel.Initializer{Name: "w", Graph: "op.v[1]", Type: 1, Shape: []int64{2}, Length: 8},
		},
		"names after what they name": {
			msg{}.sub(1, msg{}.sub(5, msg{}.sub(5, inGraph("w", raw)).str(1, "value")).
				str(4, "Constant").str(3, "late")),
			epmodel.Initializer{Name: "w", Node: "late", Attribute: "value", Type: 1,
				Shape: []int64{2}, Length: 8},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			b := model(c.graph)
			all := tensors(t, b)
			require.NotEmpty(t, all)
			got := all[0]
			require.Positive(t, got.At)
			if got.Location == "" && got.Length > 0 {
				require.Equal(t, raw, string(b[got.Offset:got.Offset+got.Length]),
					"the bytes in the recorded range")
			}
			got.At = 0
			if c.want.Location == "" {
				got.Offset = 0
			}
			require.Equal(t, c.want, got)
		})
	}
}

func TestReadLooksIntoSparseIndicesFunctionsAndTraining(t *testing.T) {
	sparse := msg{}.sub(1, inGraph("s", "abcd")).sub(2, external("", 2, "location", "indices.bin"))
	function := msg{}.str(1, "F").
		sub(7,
			node("", "Constant", "c", attrT("value", external("", 2, "location", "function.bin")))).
		sub(7,
			node("", "Constant", "s", msg{}.str(1, "sparse_value").
				sub(22, msg{}.sub(1, external("", 1, "location", "sparse_attribute.bin"))))).
		sub(11, attrT("default", external("", 2, "location", "default.bin"))).
		sub(7, contextNode("ctx", attrS("ep_cache_context", "inline"))).
		str(10, "my.domain").str(13, "v2")
	b := model(msg{}.sub(15, sparse)).sub(25, function).
		sub(20, msg{}.sub(2, msg{}.sub(5, external("", 2, "location", "training.bin"))))
	m := mustRead(t, b)
	require.Equal(t,
		[]string{"default.bin", "function.bin", "indices.bin", "sparse_attribute.bin",
			"training.bin"}, m.Locations())
	require.Equal(t, "function my.domain::F:v2", m.Contexts[0].Graph)
	require.Equal(t, map[string]int{"ai.onnx::Constant": 2, "com.microsoft::EPContext": 1},
		m.OpTypes)
}

func TestReadTellsTheModelItself(t *testing.T) {
	dim := func(m msg) msg { return msg{}.sub(1, m) }
	shape := append(dim(msg{}.num(1, 4)), append(dim(msg{}.str(2, "batch")), dim(msg{})...)...)
	in := msg{}.str(1, "x").sub(2, msg{}.sub(1, msg{}.num(1, 10).sub(2, shape)))
	seq := msg{}.str(1, "s").sub(2, msg{}.sub(4, msg{}.sub(1, msg{}.sub(1, msg{}.num(1, 1)))))
	b := msg{}.num(1, 13).str(2, "maker").str(3, "1.2").
		sub(7, msg{}.str(2, "g").sub(11, in).sub(12, seq)).
		sub(8, msg{}.num(2, 17)).sub(8, msg{}.str(1, "com.microsoft").num(2, 1)).
		sub(14, pair("k", strings.Repeat("old", 1<<20))).sub(14, pair("k", "v")).
		sub(14, pair("long", strings.Repeat("x", 2<<20))).
		str(77, "a field of a later version")
	m := mustRead(t, b)
	require.EqualValues(t, 13, m.IRVersion)
	require.Equal(t, []string{"maker", "1.2", "g"},
		[]string{m.Producer, m.ProducerVersion, m.GraphName})
	require.Equal(t, []epmodel.Opset{{"ai.onnx", 17}, {"com.microsoft", 1}}, m.Opsets)
	require.Equal(t, map[string]string{"k": "v"}, m.Metadata, "of k, the last value counts")
	require.Equal(t,
		[]epmodel.Value{{Name: "x", Kind: "tensor", Type: 10,
			Shape: []epmodel.Dim{{Value: 4}, {Value: -1, Param: "batch"}, {Value: -1}}}}, m.Inputs)
	require.Equal(t, []epmodel.Value{{Name: "s", Kind: "sequence"}}, m.Outputs)
	require.EqualValues(t, len(b), m.Size)
}

// A model's first field may be any, so what it begins with may look like something else.
func TestAModelThatLooksLikeSomethingElseIsRead(t *testing.T) {
	b := model(msg{})
	for _, first := range []msg{msg{}.str(2, "TFL3"),
		msg{}.str(6, "just text, as a doc string may well be"), msg{}.str(6, "{}")} {
		m, err := epmodel.Read(t.Context(), "m.onnx",
			bytes.NewReader(append(append(msg{}, first...), b...)))
		require.NoError(t, err)
		require.EqualValues(t, len(first)+len(b), m.Size)
	}
}

func TestReadRefusesDamage(t *testing.T) {
	good := model(msg{}.sub(5, inGraph("w", "abcdefgh")))
	nest := func(n int) msg {
		g := msg{}
		for range n {
			g = msg{}.sub(1, node("", "If", "i", attrG("then_branch", g)))
		}
		return model(g)
	}
	ext := func(kv ...string) msg { return model(msg{}.sub(5, external("w", 3, kv...))) }
	tag := func(n protowire.Number, t protowire.Type) msg { return protowire.AppendTag(nil, n, t) }
	cases := map[string]struct {
		bytes msg
		want  string // part of the error
	}{
		"empty": {nil, "empty"},
		"text": {msg("this is not a model\n"),
			"offset 0: not an ONNX model, but text"},
		"text that begins as models may": {msg("Be this a model?\n"),
			"not an ONNX model, but text"},
		"text in other letters": {msg(strings.Repeat("это не модель ", 9)),
			"not an ONNX model, but text"},
		"JSON": {msg(`{"architectures": ["Bert"]}`),
			"not an ONNX model, but JSON"},
		"a web page": {msg("<!DOCTYPE html>\n<html>"),
			"not an ONNX model, but a web page"},
		"OpenVINO's XML": {msg(`<?xml version="1.0"?><net name="m" version="11">`),
			"not an ONNX model, but XML, perhaps an OpenVINO model"},
		"safetensors": {append(msg("\x40\x00\x00\x00\x00\x00\x00\x00"),
			`{"w":{"dtype":"F32"}}`+strings.Repeat(" ", 99)...), "safetensors"},
		"TFLite": {msg("\x1c\x00\x00\x00TFL3\x14\x00\x20\x00"),
			"not an ONNX model, but a TFLite model"},
		"pickle": {msg("\x80\x02}q\x00X"),
			"not an ONNX model, but a Python pickle"},
		"unknown bytes": {msg("\x9f\x33\xc0\x01"), "not an ONNX model: "},
		"gzip":          {msg("\x1f\x8b\x08\x00"), "a gzip file"},
		"zeros": {make(msg, 64),
			"not an ONNX model, but a file that begins with zeros only"},
		"git LFS pointer": {
			msg("version https://git-lfs.github.com/spec/v1\noid sha256:..."), "git lfs pull"},
		"ORT format":              {msg("\x20\x00\x00\x00ORTMxxxxxxxx"), "ORT format"},
		"zip":                     {msg("PK\x03\x04............"), "zip"},
		"context binary":          {msg("OVEP_BIN........"), "context binary"},
		"a message, but no model": {msg{}.num(1, 9), "graph: missing"},
		"no IR version":           {msg{}.sub(7, msg{}), "ir_version: missing"},
		"IR version -1":           {msg{}.num(1, -1).sub(7, msg{}), "not an IR version"},
		"two graphs":              {append(append(msg{}, good...), good...), "occurs twice"},
		"last byte missing":       {good[:len(good)-1], "truncated"},
		"cut inside the weights":  {good[:20], "truncated"},
		"length of 2^63": {append(tag(7, protowire.BytesType),
			protowire.AppendVarint(nil, 1<<63)...), "truncated"},
		"length of 2^64-1": {append(tag(7, protowire.BytesType),
			protowire.AppendVarint(nil, math.MaxUint64)...), "truncated"},
		"field longer than its message": {model(append(tag(5, protowire.BytesType), 127)).
			sub(99, make(msg, 300)), "the message that holds it"},
		"varint of eleven bytes": {append(tag(1, protowire.VarintType),
			bytes.Repeat([]byte{0xff}, 11)...), "bad value"},
		"a group": {append(tag(30, protowire.StartGroupType),
			tag(30, protowire.EndGroupType)...), "wire type 3"},
		"field number 0":     {msg{0x02, 0x00}, "no protobuf field tag"},
		"graph as a number":  {msg{}.num(1, 9).num(7, 1), "graph: wire type 0"},
		"IR version as text": {msg{}.str(1, "9"), "ir_version: wire type 2"},
		"nested too deep":    {nest(60), "nested more than 100 deep"},
		"negative dimension": {model(msg{}.sub(5, msg{}.num(1, -2).str(8, "w"))),
			"negative dimension"},
		"too many dimensions": {model(msg{}.sub(5,
			msg{}.str(1, strings.Repeat("\x01", 2000)))), "more than 1024 values"},
		"bad packed dimension": {model(msg{}.sub(5, msg{}.str(1, "\xff"))), "bad value"},
		"name too long": {model(msg{}.sub(5,
			msg{}.str(8, strings.Repeat("x", 70<<10)))), "more than 65536"},
		"data location 7": {model(msg{}.sub(5, msg{}.str(8, "w").num(14, 7))),
			"neither 0"},
		"external without location": {ext("offset", "3"),
			`tensor "w": its data is external, but no file is named`},
		"external with empty location": {ext("location", ""), "names no file"},
		"external: the directory":      {ext("location", "."), "names no file"},
		"external: a directory":        {ext("location", "sub/"), "directory's name"},
		"external: absolute":           {ext("location", "/etc/shadow"), "absolute"},
		"external: drive letter":       {ext("location", `C:\w.bin`), "absolute"},
		"external: parent": {ext("location", "../w.bin"),
			"lies outside the model's directory"},
		"external: parent inside": {ext("location", "a/../../w.bin"),
			"lies outside the model's directory"},
		"external: parent of a directory": {ext("location", "a/b/.."), "directory's name"},
		"external: a directory and a dot": {ext("location", "sub/."), "directory's name"},
		"external: parent, Windows": {ext("location", `a\..\..\w.bin`),
			"lies outside the model's directory"},
		"external: NUL":       {ext("location", "w\x00.bin"), "control characters"},
		"external: not UTF-8": {ext("location", "w\xff.bin"), "not UTF-8"},
		"external: very long": {ext("location", strings.Repeat("x", 5000)),
			"more than 4096"},
		"external: memory address": {ext("location", "*/_ORT_MEM_ADDR_/*", "offset",
			"94000000000000", "length", "8"), "memory of the process"},
		"external: location twice": {ext("location", "a", "location", "b"), "occurs twice"},
		"external: negative offset": {ext("location", "a", "offset", "-1"),
			`"-1" is not a number`},
		"external: huge offset": {ext("location", "a", "offset", "9223372036854775808"),
			"is not a number"},
		"external: empty offset":       {ext("location", "a", "offset", ""), "is not a number"},
		"external: hexadecimal offset": {ext("location", "a", "offset", "0x10"), "is not a number"},
		"external: overflow": {ext("location", "a", "offset", "9223372036854775807",
			"length", "1"), "overflow"},
		"external: too many keys": {model(msg{}.sub(5,
			bytes.Repeat(msg{}.sub(13, pair("k", "")), 300))), "more than 256"},
		"sparse values twice": {model(msg{}.sub(15, msg{}.sub(1, msg{}).sub(1, msg{}))),
			"occurs twice"},
		"two tensors in an attribute": {model(msg{}.sub(1,
			node("", "Constant", "c", attrT("v", msg{}).sub(5, msg{})))), "two tensors"},
		"two graphs in an attribute": {model(msg{}.sub(1,
			node("", "If", "c", attrG("v", msg{}).sub(6, msg{})))), "two graphs"},
		"EPContext: attribute twice": {model(msg{}.sub(1,
			contextNode("n", attrI("embed_mode", 0), attrI("embed_mode", 1)))), "occurs twice"},
		"EPContext: embed_mode as text": {model(msg{}.sub(1,
			contextNode("n", attrS("embed_mode", "0")))), "not INT"},
		"EPContext: source as number": {model(msg{}.sub(1,
			node("com.microsoft", "EPContext", "n", attrI("source", 0)))), "not STRING"},
		"EPContext: context as number": {model(msg{}.sub(1,
			contextNode("n", attrI("ep_cache_context", 0)))), "not STRING"},
		"EPContext: file name too long":  {sidecar(strings.Repeat("x", 5000)), "more than 4096"},
		"EPContext: file name not UTF-8": {sidecar("\xff"), "not UTF-8"},
		"EPContext: from the caller": {model(msg{}.sub(1,
			contextNode("n", msg{}.str(1, "ep_cache_context").str(21, "a").num(20, 3)))),
			"ref_attr_name"},
		"EPContext: external tensor": {model(msg{}.sub(1,
			contextNode("n", attrT("extra", external("", 1, "location", "../x"))))),
			"lies outside the model's directory"},
		"weights map: no JSON": {model(msg{}.sub(1,
			contextNode("n", attrS("weights_metadata_map", "{")))), "weights_metadata_map"},
		"weights map: a list": {model(msg{}.sub(1,
			contextNode("n", attrS("weights_metadata_map", "[]")))), "weights_metadata_map"},
		"weights map: two values": {model(msg{}.sub(1,
			contextNode("n", attrS("weights_metadata_map", "{}{}")))), "unexpected data after"},
		"weights map: odd location": {model(msg{}.sub(1,
			contextNode("n", attrS("weights_metadata_map", `{"w":{"location":{}}}`)))),
			"weights_metadata_map"},
		"weights map: deep": {model(msg{}.sub(1,
			contextNode("n",
				attrS("weights_metadata_map",
					strings.Repeat(`{"a":`, 50)+"1"+strings.Repeat("}", 50))))), "nested too deep"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			m, err := read(c.bytes)
			require.Nil(t, m)
			f := formatError(t, err)
			require.Equal(t, "m.onnx", f.File)
			require.Contains(t, err.Error(), c.want)
			require.LessOrEqual(t, f.Offset, int64(len(c.bytes)))
		})
	}
}

// the offset and field say where to look
func TestReadErrorTellsWhere(t *testing.T) {
	bad := external("w", 3, "location", "../w.bin")
	b := model(msg{}.str(2, "g").
		sub(1, node("", "If", "i", attrG("then_branch", msg{}.sub(5, bad)))))
	_, err := read(b)
	f := formatError(t, err)
	require.Equal(t, "graph.node.attribute.g.initializer.external_data.location", f.Field)
	require.Equal(t, bytes.Index(b, msg{}.str(2, "../w.bin")), int(f.Offset))
}

// every prefix of a model with everything in it is an error, and never a panic
func TestReadEveryTruncation(t *testing.T) {
	b := fullModel()
	mustRead(t, b)
	for n := range len(b) {
		_, err := read(b[:n])
		if err == nil {
			// whole trailing fields can be missing without trace; nothing else
			m := mustRead(t, b[:n])
			require.EqualValues(t, n, m.Size)
			continue
		}
		formatError(t, err)
	}
}

// fullModel uses each message and field that Read knows.
func fullModel() msg {
	sub := msg{}.sub(5, external("deep", 3, "location", "a.bin", "offset", "0", "length", "12")).
		sub(1, contextNode("inner", attrS("ep_cache_context", "bytes")))
	g := msg{}.str(2, "g").sub(5, inGraph("w", "abcdefgh")).
		sub(15, msg{}.sub(1, inGraph("s", "abcd")).sub(2, external("", 2, "location", "idx.bin")).
			num(3, 9)).
		sub(1, node("", "If", "i", attrG("then_branch", sub))).
		sub(1,
			contextNode("n", attrI("embed_mode", 0), attrS("ep_cache_context", "c.xml"),
				attrS("weights_metadata_map", `{"w":{"location":"w.bin"}}`),
				attrs("tags", "a", "b"))).
		sub(11,
			msg{}.str(1, "x").
				sub(2, msg{}.sub(1, msg{}.num(1, 1).sub(2, msg{}.sub(1, msg{}.num(1, 3))))))
	return model(g).sub(14, pair("ep_compatibility_info.TestEP", "v1")).
		sub(25,
			msg{}.str(1, "F").
				sub(7, node("", "Constant", "c", attrT("value", inGraph("", "abcd")))))
}

// a file that shrinks while it is read, or fails, is no *panic* and keeps its cause
func TestReadErrorsOfTheFile(t *testing.T) {
	b := fullModel()
	t.Run("shrinks", func(t *testing.T) {
		_, err := epmodel.Read(context.Background(), "m.onnx",
			source{bytes.NewReader(b[:len(b)/2]), int64(len(b))})
		require.Contains(t, formatError(t, err).Reason, "changed while being read")
	})
	t.Run("fails", func(t *testing.T) {
		broken := errors.New("input/output error")
		_, err := epmodel.Read(context.Background(), "m.onnx",
			source{failing{broken}, int64(len(b))})
		require.ErrorIs(t, err, broken)
		var f *epmodel.FormatError
		require.False(t, errors.As(err, &f), "not the model's fault")
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_, err := epmodel.Read(ctx, "m.onnx", bytes.NewReader(b))
		require.ErrorIs(t, err, context.Canceled)
	})
}

type source struct {
	io.ReaderAt
	size int64
}

func (s source) Size() int64 { return s.size }

type failing struct{ err error }

func (f failing) ReadAt(p []byte, _ int64) (int, error) { return iotest.ErrReader(f.err).Read(p) }

func TestFileSourceTakesRegularFilesOnly(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "m.onnx"), fullModel(), 0o600))
	f, err := os.Open(filepath.Join(dir, "m.onnx"))
	require.NoError(t, err)
	defer f.Close()
	src, err := epmodel.FileSource(f)
	require.NoError(t, err)
	m, err := epmodel.Read(context.Background(), "m.onnx", src)
	require.NoError(t, err)
	require.Equal(t, mustRead(t, fullModel()), m)

	d, err := os.Open(dir)
	require.NoError(t, err)
	defer d.Close()
	_, err = epmodel.FileSource(d)
	require.Contains(t, formatError(t, err).Reason, "not a regular file")
}
