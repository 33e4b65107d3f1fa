package epmodel_test

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/epmodel"
)

// msg is an encoded message, put together field by field so that tests can write what no serializer
// would.
type msg []byte

func (m msg) str(n protowire.Number, s string) msg {
	return protowire.AppendString(protowire.AppendTag(m, n, protowire.BytesType), s)
}

func (m msg) sub(n protowire.Number, s msg) msg { return m.str(n, string(s)) }

func (m msg) num(n protowire.Number, v int64) msg {
	return protowire.AppendVarint(protowire.AppendTag(m, n, protowire.VarintType), uint64(v))
}

func (m msg) f32(n protowire.Number, v uint32) msg {
	return protowire.AppendFixed32(protowire.AppendTag(m, n, protowire.Fixed32Type), v)
}

// model wraps a graph.
func model(graph msg) msg {
	return msg{}.num(1, 9).sub(7, graph).
		sub(8, msg{}.str(1, "").num(2, 17))
}

// pair is a StringStringEntryProto.
func pair(k, v string) msg { return msg{}.str(1, k).str(2, v) }

// external is a float tensor of n elements with external data under the given keys.
func external(name string, n int64, kv ...string) msg {
	t := msg{}.num(1, n).num(2, 1).str(8, name)
	for i := 0; i < len(kv); i += 2 {
		t = t.sub(13, pair(kv[i], kv[i+1]))
	}
	return t.num(14, 1)
}

// inGraph is a float tensor with raw_data in the graph.
func inGraph(name string, data string) msg {
	return msg{}.num(1, int64(len(data)/4)).num(2, 1).str(8, name).str(9, data)
}

// node is a NodeProto; attributes come last.
func node(domain, op, name string, attributes ...msg) msg {
	n := msg{}.str(1, "x").str(2, "y").str(3, name).str(4, op).str(7, domain)
	for _, a := range attributes {
		n = n.sub(5, a)
	}
	return n
}

func attrS(name, v string) msg       { return msg{}.str(1, name).str(4, v).num(20, 3) }
func attrI(name string, v int64) msg { return msg{}.str(1, name).num(3, v).num(20, 2) }
func attrT(name string, t msg) msg   { return msg{}.str(1, name).sub(5, t).num(20, 4) }
func attrG(name string, g msg) msg   { return msg{}.str(1, name).sub(6, g).num(20, 5) }
func attrs(name string, t ...string) msg {
	m := msg{}.str(1, name)
	for _, s := range t {
		m = m.str(9, s)
	}
	return m.num(20, 8)
}

// contextNode is an EPContext node of "TestEP".
func contextNode(name string, attributes ...msg) msg {
	return node("com.microsoft", "EPContext", name,
		append([]msg{attrS("source", "TestEP")}, attributes...)...)
}

// sidecar is the usual artefact: one node with its context in file.
func sidecar(file string) msg {
	return model(msg{}.sub(1,
		contextNode("n", attrI("embed_mode", 0), attrS("ep_cache_context", file))))
}

func read(b msg) (*epmodel.Model, error) {
	return epmodel.Read(context.Background(), "m.onnx", bytes.NewReader(b))
}

func mustRead(t *testing.T, b msg) *epmodel.Model {
	t.Helper()
	m, err := read(b)
	require.NoError(t, err)
	return m
}

// tensors returns every tensor of a model that takes little memory.
func tensors(t *testing.T, b msg) (all []epmodel.Initializer) {
	t.Helper()
	_, err := epmodel.Tensors(context.Background(), "m.onnx", bytes.NewReader(b),
		func(one *epmodel.Initializer) {
			all = append(all, *one)
		})
	require.NoError(t, err)
	return all
}

// formatError asserts that err is about the input, and gives it.
func formatError(t *testing.T, err error) *epmodel.FormatError {
	t.Helper()
	var f *epmodel.FormatError
	require.ErrorAs(t, err, &f)
	return f
}
