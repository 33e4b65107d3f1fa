package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestShowTensors(t *testing.T) {
	newStandIn(t).serve()
	out := call(t, "show", "batch1.onnx", "--tensors").out
	require.Regexp(t,
		`(?m)^a_ctx.bin: 1.0 MiB of build cdcdcdcdcdcd by StandInExecutionProvider, batch=1$`, out)
	require.Regexp(t,
		`(?m)^  4096 +256.0 KiB +f32 256x256 +all +layer0.weight +this file +<b&"4.onnx `+
			`efefefefefef$`, out)
	require.Contains(t, out, "\n  25.0% of it are named tensors\n")
	require.Contains(t, out, "b_ctx.bin: 1.0 MiB of build efefefefefef by "+
		"StandInExecutionProvider, packed\n  37.5% of it are named tensors\n")
	require.Regexp(t,
		`(?m)^  64 +128.0 KiB +float 512x256 +all +up +h0 of batch1.onnx cdcdcdcdcdcd at 4160 `+
			`+batch1.onnx cdcdcdcdcdcd$`, out)
	require.Regexp(t,
		`(?m)^  128 +100 B +partition +- +layer +this file +-\n  256 +100 B +partition`, out)
	require.Regexp(t, `(?m)^  262144 +1.0 KiB +float 256 +- +bias +this file +-$`, out)
	require.Contains(t, out, "\n  all of it are named tensors\n")
	require.Contains(t, out, "b_ctx.onnx: 800 B of build efefefefefef by "+
		"StandInExecutionProvider\n  no names: this graph has no tensors: they are in the files "+
		"beside it\n")
	require.Regexp(t,
		`(?m)^  0 +1.0 KiB +float 256 +- +bias +h0 of batch1.onnx cdcdcdcdcdcd at 0 +-$`, out)
	require.Regexp(t, `(?m)^  0 +1.0 KiB +float 256 +- +scale +h1 of no listed build at 0 +-$`, out)
	require.Contains(t, out, "and 7 files more, 7.0 MiB\n")
	r := parseJSON(t, call(t, "show", "batch1.onnx", "--tensors", "--json"))
	require.Equal(t, "a_ctx.bin", jsonAt(t, r, "files", 0, "name"))
	require.Equal(t, "layer0.weight", jsonAt(t, r, "files", 0, "tensors", 0, "name"))
	require.EqualValues(t, 0, jsonAt(t, r, "files", 0, "tensors", 0, "holder"))
	require.Equal(t, "h0", jsonAt(t, r, "holders", 0))
	require.Equal(t, "cdcdcdcdcdcdcdcd", jsonAt(t, r, "held_by", 0, "build"))
	require.Equal(t, []any{0.0}, jsonAt(t, r, "files", 0, "tensors", 0, "with"))
	require.Equal(t, "efefefefefefefef", jsonAt(t, r, "files", 0, "sharers", 0, "build"))
	require.EqualValues(t, 1<<18+1<<17, jsonAt(t, r, "files", 1, "named_bytes"))
	require.Contains(t, call(t, "du", "--svg").out, "<svg ")
	require.Len(t, jsonAt(t, parseJSON(t, call(t, "du", "--svg", "--json")), "files"), 2)
}
