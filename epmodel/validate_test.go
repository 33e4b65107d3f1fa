package epmodel_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/epmodel"
)

func TestValidate(t *testing.T) {
	files := map[string]int64{"a.bin": 100, "sub/b.bin": 100, "w.bin": 4096, "m.xml": 10,
		"m.bin": 10, "empty.bin": 0}
	ctx := func(a ...msg) msg { return contextNode("n", a...) }
	graph := func(nodes ...msg) msg {
		g := msg{}
		for _, n := range nodes {
			g = g.sub(1, n)
		}
		return model(g)
	}
	weights := func(kv ...string) msg {
		return model(msg{}.sub(5, external("w", 3, kv...)).
			sub(1, ctx(attrS("ep_cache_context", "bytes"))))
	}
	file := func(name string) msg {
		return ctx(attrI("embed_mode", 0),
			attrS("ep_cache_context", name))
	}
	cases := map[string]struct {
		model msg
		want  string // "" is sound
	}{
		"sidecar":                   {graph(file("a.bin")), ""},
		"sidecar in a subdirectory": {graph(file("sub/b.bin")), ""},
		"xml and bin":               {graph(file("m.xml")), ""},
		"embedded":                  {graph(ctx(attrS("ep_cache_context", "bytes"))), ""},
		"second node shares the main": {graph(file("a.bin"),
			ctx(attrI("main_context", 0), attrI("embed_mode", 0))), ""},
		"dlc":                          {graph(ctx(attrS("ep_dlc_context", "a.bin"))), ""},
		"external data to the end":     {weights("location", "w.bin", "offset", "4084"), ""},
		"more external data than used": {weights("location", "w.bin", "length", "4096"), ""},
		"external data fits exactly": {weights("location", "w.bin", "offset", "4084", "length",
			"12"), ""},

		"weights map as a model spells": {graph(ctx(attrS("ep_cache_context", "x"),
			attrS("weights_metadata_map", `{"w":{"location":".//sub/./b.bin"}}`))), ""},
		"weights map in and out again": {graph(ctx(attrS("ep_cache_context", "x"),
			attrS("weights_metadata_map", `{"w":{"location":"sub/../a.bin"}}`))),
			"is not a clean relative name"},

		"no EPContext node": {graph(node("", "Relu", "r"), node("", "Conv", "c")),
			"no EPContext node: 2 nodes (1 Conv, 1 Relu)"},
		"another domain": {graph(node("", "EPContext", "n",
			attrS("ep_cache_context", "x"))), `of the domain ""`},
		"embed_mode 2": {graph(ctx(attrI("embed_mode", 2),
			attrS("ep_cache_context", "x"))), "embed_mode"},
		"main_context -1": {graph(ctx(attrI("main_context", -1),
			attrS("ep_cache_context", "x"))), "main_context"},
		"no context, embedded": {graph(ctx()), "neither bytes nor a file"},
		"no context, sidecar": {graph(ctx(attrI("embed_mode", 0))),
			"neither bytes nor a file"},
		"empty context": {graph(ctx(attrS("ep_cache_context", ""))),
			"neither bytes nor a file"},
		"no main anywhere": {graph(ctx(attrI("main_context", 0))),
			"none has main_context 1"},
		"main of another EP only": {graph(file("a.bin"),
			node("com.microsoft", "EPContext", "q", attrS("source", "OtherEP"),
				attrI("main_context", 0))), `another node of "OtherEP"`},
		"file missing": {graph(file("c.bin")),
			`file "c.bin" is not one of the build's files`},
		"bin of the xml missing": {graph(file("sub/x.xml")), "is not one of the build's files"},
		"file empty":             {graph(file("empty.bin")), "is empty"},
		"absolute":               {graph(file("/a.bin")), "absolute"},
		"leaves the directory":   {graph(file("../a.bin")), "lies outside the artefact"},
		"leaves the directory and comes in": {graph(file("sub/../a.bin")),
			"is not a clean relative name"},
		"backslash":         {graph(file(`sub\b.bin`)), "not a clean relative name"},
		"dot":               {graph(file("./a.bin")), "not a clean relative name"},
		"double slash":      {graph(file("sub//b.bin")), "not a clean relative name"},
		"control character": {graph(file("a\n.bin")), "control characters"},
		"dlc leaves the directory": {graph(ctx(attrS("ep_dlc_context", "../m.dlc"))),
			"ep_dlc_context"},
		"weights map leaves the directory": {graph(ctx(attrS("ep_cache_context", "x"),
			attrS("weights_metadata_map", `{"w":{"location":"../w.bin"}}`))),
			"weights_metadata_map"},
		"weights map: file missing": {graph(ctx(attrS("ep_cache_context", "x"),
			attrS("weights_metadata_map", `{"w":{"location":"source.data"}}`))),
			"is not one of the build's files"},
		"external data not carried": {weights("location", "source.data"),
			`file "source.data" is not one`},
		"external data too short": {weights("location", "w.bin", "offset", "4085", "length",
			"12"), `tensor "w": 12 bytes from offset 4085 of "w.bin": beyond its end at 4096`},
		"external data ends too early": {weights("location", "w.bin", "offset", "4085"),
			`tensor "w": needs 12 bytes, and has 11 from offset 4085 of "w.bin", ` +
				`which ends at 4096`},
		"external length 0, too early": {weights("location", "w.bin", "offset", "4085", "length",
			"0"), `needs 12 bytes, and has 11`},
		"external length too short": {weights("location", "w.bin", "length", "11"),
			`needs 12 bytes, and has 11 from offset 0`},
		"external offset beyond": {weights("location", "w.bin", "offset", "4097"),
			`tensor "w": offset 4097`},
		"external data in odd spelling": {weights("location", "./w.bin"),
			"not a clean relative name"},
		"in a subgraph, missing": {model(msg{}.sub(1, file("a.bin")).
			sub(1, node("", "If", "i", attrG("then_branch", msg{}.sub(1, file("gone.bin")))))),
			`file "gone.bin"`},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			err := epmodel.Validate(mustRead(t, c.model), files)
			if c.want == "" {
				require.NoError(t, err)
				return
			}
			require.Contains(t, formatError(t, err).Error(), c.want)
		})
	}
}
