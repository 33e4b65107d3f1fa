package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestShowTensors(t *testing.T) {
	newStandIn(t).serve()
	out := call(t, "show", "batch1.onnx", "--tensors").out
	require.Regexp(t, `(?m)^a_ctx.bin: 1.0 MiB of build cdcdcdcdcdcd by StandInExecutionProvider, batch=1$`, out)
	require.Regexp(t, `(?m)^  4096 +256.0 KiB +f32 256x256 +all +layer0.weight +this file +<b&"4.onnx efefefefefef$`, out)
	require.Contains(t, out, "\n  25.0% of it are tensors that it names itself\n")
	require.Contains(t, out, "b_ctx.bin: 1.0 MiB of build efefefefefef by StandInExecutionProvider, packed\n  37.5% of it are weights of 4.onnx, found by their bytes; the rest has no names\n")
	require.Regexp(t, `(?m)^  64 +384.0 KiB in 2 ranges +float 512x256 as float16 tiles +33.3% +up +several files +-$`, out)
	require.Regexp(t, `(?m)^  128 +100 B +partition +- +layer +this file +-\n  256 +100 B +partition`, out, "what is not a part of something stands by itself")
	require.Regexp(t, `(?m)^  262144 +1.0 KiB +float 256 +- +bias +this file +-$`, out)
	require.Contains(t, out, "\n  all of it are weights of 4.onnx, found by their bytes\n")
	require.Contains(t, out, "b_ctx.onnx: 800 B of build efefefefefef by StandInExecutionProvider\n  no names: this graph has no tensors: the files beside it have them\n")
	require.Regexp(t, `(?m)^  0 +1.0 KiB +float 256 +- +bias +h0 of batch1.onnx cdcdcdcdcdcd at 0 +-$`, out)
	require.Regexp(t, `(?m)^  0 +1.0 KiB +float 256 +- +scale +h1 of no listed build at 0 +-$`, out)
	require.Contains(t, out, "and 7 files more, 7.0 MiB\n")
	var r layoutResult
	require.NoError(t, json.Unmarshal([]byte(call(t, "show", "batch1.onnx", "--tensors", "--json").out), &r))
	require.Equal(t, "layer0.weight", r.Files[0].Tensors[0].Name)
	require.Equal(t, "h0", r.Files[0].Tensors[0].Holder)
	require.Equal(t, "efefefefefefefef", r.Files[0].Tensors[0].With[0].Build)
	require.Nil(t, r.Files[0].Tensors[0].HeldBy, "it stands in its own file")
	require.Equal(t, "cdcdcdcdcdcdcdcd", r.Files[3].Tensors[0].HeldBy.Build)
	require.Equal(t, []string{"4.onnx", "float16 tiles"}, []string{r.Files[1].NamedBy, r.Files[1].Tensors[0].Form})
	require.EqualValues(t, 1<<18+1<<17, r.Files[1].NamedBytes)
	r = layoutResult{}
	require.Contains(t, call(t, "du", "--svg").out, "<svg ")
	require.NoError(t, json.Unmarshal([]byte(call(t, "du", "--svg", "--json").out), &r))
	require.Len(t, r.Files, 2)
}
