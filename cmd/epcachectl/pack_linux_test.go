package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPackAndUnpack(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	require.Equal(t, `tiny.onnx: build cdcdcdcdcdcd of StandInExecutionProvider: would be packed, frees 4.0 KiB
other.onnx: build efefefefefef of StandInExecutionProvider: kept: somebody has it
and 3 more
1 build would be packed, frees 4.0 KiB
`, call(t, "pack", "--all", "-n").out)
	require.Empty(t, b.changed())
	require.Contains(t, call(t, "unpack", "x").out, "1 build unpacked, takes 8.0 KiB\n")
	var out packResult
	require.NoError(t, json.Unmarshal([]byte(call(t, "pack", "--all", "--json").out), &out))
	require.Equal(t, "packed", out.Builds[0].Outcome)
	require.EqualValues(t, 4096, out.FreedBytes)
	require.Equal(t, []string{`unpacked ["x"] false`, `packed [] true`}, b.changed())
	require.Contains(t, call(t, "pack", "--compress", "--all", "-n").out, "would be compressed, frees 4.0 KiB\n")
	require.NoError(t, json.Unmarshal([]byte(call(t, "pack", "--compress", "x", "--json").out), &out))
	require.Equal(t, "compressed", out.Builds[0].Outcome)
	require.Equal(t, []string{`unpacked ["x"] false`, `packed [] true`, `compressed ["x"] false`}, b.changed())
	for _, args := range [][]string{{"pack"}, {"unpack"}, {"pack", "--all", "x"}} {
		require.Equal(t, exitUsage, call(t, args...).code, args)
	}
}
