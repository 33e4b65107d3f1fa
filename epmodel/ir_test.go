package epmodel_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// irNode is an EPContext node of OpenVINO's with its context in a file, unless the attributes say
// otherwise.
func irNode(file string, attributes ...msg) msg {
	all := append([]msg{attrS("source", "OpenVINOExecutionProvider"), attrI("embed_mode", 0),
		attrS("ep_cache_context", file)}, attributes...)
	return node("com.microsoft", "EPContext", "n", all...)
}

func wraps(xml string) msg { return model(msg{}.sub(1, irNode(xml))) }

// Models that only wrap OpenVINO's own format have its files as external data; all others that have
// EPContext nodes are compiled.
func TestReadTellsModelsThatWrapIR(t *testing.T) {
	for name, locations := range map[string][]string{
		"model.xml": {"model.bin", "model.xml"}, "sub/a.b.xml": {"sub/a.b.bin", "sub/a.b.xml"},
		"model.bin": nil, "model.XML": nil, "/model.xml": nil, "../model.xml": nil, "": nil,
		"xml": nil,
	} {
		m := mustRead(t, wraps(name))
		require.Equal(t, locations != nil, m.WrapsIR(), name)
		require.Equal(t, locations, m.Locations(), name)
	}
	for what, b := range map[string]msg{
		"inside the graph": model(msg{}.sub(1,
			node("com.microsoft", "EPContext", "n", attrS("source", "OpenVINOExecutionProvider"),
				attrS("ep_cache_context", "model.xml")))), // embed_mode is 1 where it is left out
		"another node's":    model(msg{}.sub(1, irNode("model.xml", attrI("main_context", 0)))),
		"beside a binary":   model(msg{}.sub(1, irNode("model.xml")).sub(1, irNode("part.bin"))),
		"another EP's":      sidecar("model.xml"),
		"no EPContext node": model(msg{}.sub(5, inGraph("w", "abcdefgh"))),
	} {
		require.False(t, mustRead(t, b).WrapsIR(), what)
	}
}

// Every byte of the files counts, whatever the graph says.
func TestDigestCoversFilesOfIR(t *testing.T) {
	files := func(xml,
		bin string) map[string]string {
		return map[string]string{"m.xml": xml, "m.bin": bin}
	}
	d := mustDigest(t, wraps("m.xml"), files("<net/>", "weights"))
	require.Equal(t, d, mustDigest(t, wraps("m.xml"), files("<net/>", "weights")))
	require.NotEqual(t, d, mustDigest(t, wraps("m.xml"), files("<Net/>", "weights")))
	require.NotEqual(t, d, mustDigest(t, wraps("m.xml"), files("<net/>", "Weights")))
	require.NotEqual(t, d, mustDigest(t, wraps("m.xml"), files("<net/>", "")))
	_, err := digest(t, wraps("m.xml"), map[string]string{"m.xml": "<net/>"})
	require.ErrorContains(t, err, `"m.bin"`)
	both := func(offset string) msg {
		return model(msg{}.sub(1, irNode("m.xml")).
			sub(5, external("w", 1, "location", "m.bin", "offset", offset, "length", "4")))
	}
	require.NotEqual(t, mustDigest(t, both("0"), files("<net/>", "weights")),
		mustDigest(t, both("0"), files("<net/>", "weightS")),
		"all of a file that a tensor is in a part of")
}
