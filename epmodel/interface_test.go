package epmodel_test

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/epmodel"
)

// input is a ValueInfoProto of a float tensor.
func input(name string, dims ...int64) msg {
	shape := msg{}
	for _, d := range dims {
		shape = shape.sub(1, msg{}.num(1, d))
	}
	return msg{}.str(1, name).sub(2, msg{}.sub(1, msg{}.num(1, 1).sub(2, shape)))
}

// reads is a node that reads these values.
func reads(op string, names ...string) msg {
	n := msg{}
	for _, name := range names {
		n = n.str(1, name)
	}
	return n.str(2, "y").str(4, op)
}

// described is a model of IR version ir, with a description.
func described(ir int64, graph msg) msg {
	return msg{}.num(1, ir).str(2, "pytorch").str(3, "2.9").str(4, "org.acme").num(5, 7).
		str(6, "a model").sub(7, graph).sub(14, pair("labels", "a,b"))
}

// restore returns the compiled graph with the interface of its source.
func restore(t *testing.T, source, compiled msg) ([]byte, bool, error) {
	t.Helper()
	ctx := context.Background()
	i, err := epmodel.ReadInterface(ctx, "m.onnx", bytes.NewReader(source))
	require.NoError(t, err)
	s, loads, err := i.Restore(ctx, mustRead(t, compiled), bytes.NewReader(compiled))
	if s == nil || err != nil {
		return nil, loads, err
	}
	b, err := written(s)
	require.NoError(t, err)
	again, _, err := i.Restore(ctx, mustRead(t, b), bytes.NewReader(b))
	require.NoError(t, err)
	require.Nil(t, again, "what is restored lacks nothing")
	return b, loads, nil
}

func TestRestoredDescriptionFollowsTheCompiledGraph(t *testing.T) {
	graph := msg{}.sub(11, input("x", 2)).sub(12, input("y", 2))
	compiled := model(graph).sub(14, pair("ep_compatibility_info.TestEP", "1"))
	b, loads, err := restore(t, described(9, graph), compiled)
	require.NoError(t, err)
	require.False(t, loads)
	tail := msg{}.str(2, "pytorch").str(3, "2.9").str(4, "org.acme").num(5, 7).str(6, "a model").
		sub(14, pair("labels", "a,b"))
	require.Equal(t, append(bytes.Clone(compiled), tail...), b)
	m := mustRead(t, b)
	require.Equal(t, map[string]string{"labels": "a,b", "ep_compatibility_info.TestEP": "1"},
		m.Metadata)

	b, _, err = restore(t, model(graph), compiled)
	require.NoError(t, err)
	require.Nil(t, b, "a source without a description")
	b, _, err = restore(t, described(9, graph), msg{}.str(2, "other").sub(7, graph).num(1, 9))
	require.NoError(t, err)
	require.Equal(t, append(msg{}.sub(7, graph).num(1, 9), tail...), msg(b),
		"the source's value replaces another one")
}

func TestRestoredInitializersCanBeOverridden(t *testing.T) {
	k, m := inGraph("k", "abcd"), inGraph("m", "efgh")
	graph := msg{}.sub(1, reads("Add", "x", "k")).sub(1, reads("Mul", "y", "m")).
		sub(5, m).sub(5, k).
		sub(11, input("k", 1)).sub(11, input("x", 2)).sub(11, input("m", 1)).sub(12, input("y", 2))
	compiled := model(msg{}.sub(1, contextNode("n", attrS("ep_cache_context", "abc"))).
		sub(5, k).sub(5, m).sub(11, input("x", 2)).sub(12, input("y", 2)))
	b, loads, err := restore(t, model(graph), compiled)
	require.NoError(t, err)
	require.True(t, loads)
	var names []string
	for _, v := range mustRead(t, b).Inputs {
		names = append(names, v.Name)
	}
	require.Equal(t, []string{"x", "k", "m"}, names, "in the source's order")
	require.Len(t, mustRead(t, b).Contexts, 1)

	old := bytes.Replace(model(graph), []byte{8, 9}, []byte{8, 3}, 1)
	b, _, err = restore(t, old, compiled)
	require.NoError(t, err)
	require.Nil(t, b, "before IR 4 they are constants")

	without := model(msg{}.sub(5, k).sub(11, input("x", 2)).sub(12, input("y", 2)))
	_, _, err = restore(t, model(graph), without)
	require.ErrorIs(t, err, epmodel.ErrDiffers)
	require.EqualError(t, err, `the compiled model differs from its source: the initializer "m", `+
		"which a program may override in the source model, is compiled into it")
}

func TestCompiledModelsThatDifferFromTheirSource(t *testing.T) {
	source := msg{}.sub(11, input("a", 2)).sub(11, input("b", 2)).sub(12, input("y", 2)).
		sub(12, input("z", 2))
	values := func(num int, of ...msg) msg {
		other := msg{}.sub(12, input("y", 2)).sub(12, input("z", 2))
		if num == 12 {
			other = msg{}.sub(11, input("a", 2)).sub(11, input("b", 2))
		}
		for _, v := range of {
			other = append(other, msg{}.sub(11, v)...)
			if num == 12 {
				other = append(other[:len(other)-len(msg{}.sub(11, v))], msg{}.sub(12, v)...)
			}
		}
		return other
	}
	for want, compiled := range map[string]msg{
		`it lacks the input "b" of the model`: values(11, input("a", 2)),
		`it lacks the input "a" of the model`: values(11),
		`it has an input "c", which the model does not have there`: values(11, input("a", 2),
			input("b", 2), input("c", 2)),
		`it has an input "b", which the model does not have there`: values(11, input("b", 2),
			input("a", 2)),
		`its input "b" has another shape than the model's`: values(11, input("a", 2),
			input("b", 3)),
		`its output "z" has another type than the model's`: values(12, input("y", 2),
			bytes.Replace(input("z", 2), []byte{8, 1, 18}, []byte{8, 10, 18}, 1)),
	} {
		_, _, err := restore(t, model(source), model(compiled))
		require.ErrorIs(t, err, epmodel.ErrDiffers)
		require.ErrorContains(t, err, ": "+want)
	}
	_, _, err := restore(t, model(source), model(values(12, input("y", 2), input("z", 3))))
	require.NoError(t, err, "shapes of outputs are statements that ONNX Runtime does not hold")
	free := msg{}.str(1, "a").sub(2, msg{}.sub(1, msg{}.num(1, 1).
		sub(2, msg{}.sub(1, msg{}.str(2, "batch")))))
	b, _, err := restore(t, model(msg{}.sub(11, free)), model(msg{}.sub(11, input("a", 4))))
	require.NoError(t, err, "a request may fix a free dimension")
	require.Nil(t, b)
}

func TestOuterValuesThatBodiesReadBecomeOutputsUntilRestored(t *testing.T) {
	inner := msg{}.sub(1, reads("Add", "d", "v", "", "own")).sub(12, input("y", 2))
	body := msg{}.sub(1, reads("Mul", "w", "x", "k").sub(5, attrG("body", inner)))
	graph := msg{}.sub(5, inGraph("w", "abcd")).sub(5, inGraph("v", "efgh")).
		sub(5, inGraph("unread", "ijkl")).
		sub(1, msg{}.str(2, "k").str(4, "Constant")).sub(1, msg{}.str(2, "d").str(4, "Relu")).
		sub(1, reads("If", "x", "unread").sub(5, attrG("then_branch", body))).
		sub(11, input("x", 2)).sub(12, input("y", 2)).sub(12, input("v", 2))
	source, ctx := model(graph), context.Background()
	plan, exposed, err := epmodel.ExposeOuter(ctx, mustRead(t, source), bytes.NewReader(source))
	require.NoError(t, err)
	require.Equal(t, map[string]bool{"d": true, "k": true, "w": true}, exposed,
		"v is an output already, x an input")
	copied, err := written(plan)
	require.NoError(t, err)
	var names []string
	for _, v := range mustRead(t, copied).Outputs {
		names = append(names, v.Name)
	}
	require.Equal(t, []string{"y", "v", "d", "k", "w"}, names)

	i, err := epmodel.ReadInterface(ctx, "m.onnx", bytes.NewReader(source))
	require.NoError(t, err)
	_, _, err = i.Restore(ctx, mustRead(t, copied), bytes.NewReader(copied))
	require.ErrorContains(t, err, `it has an output "d", which the model does not have there`)
	i.Exposed = exposed
	s, loads, err := i.Restore(ctx, mustRead(t, copied), bytes.NewReader(copied))
	require.NoError(t, err)
	require.True(t, loads)
	b, err := written(s)
	require.NoError(t, err)
	require.Equal(t, source, msg(b), "the same bytes again")

	none := model(msg{}.sub(1, reads("Add", "x")).sub(11, input("x", 2)))
	plan, _, err = epmodel.ExposeOuter(ctx, mustRead(t, none), bytes.NewReader(none))
	require.NoError(t, err)
	require.Nil(t, plan, "no node has a body")
}
