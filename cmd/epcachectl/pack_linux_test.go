package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPackAndUnpack(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	require.Equal(t, `tiny.onnx: build cdcdcdcdcdcd of StandInExecutionProvider: would be packed, which would free 4.0 KiB
other.onnx: build efefefefefef of StandInExecutionProvider: kept: in use; packing would free 2.0 KiB once that is over
and 3 more
1 build would be packed, which would free 4.0 KiB; 3.0 KiB more, as far as is known, of builds that are in use or were given out lately, once they are not
`, call(t, "pack", "--all", "-n").out)
	require.Empty(t, b.changed())
	require.Contains(t, call(t, "unpack", "x").out, "1 build unpacked, which takes 8.0 KiB\n")
	var out packResult
	require.NoError(t, json.Unmarshal([]byte(call(t, "pack", "--all", "--json").out), &out))
	require.Equal(t, "packed", out.Builds[0].State)
	require.Equal(t, "pack", out.Builds[0].Action)
	require.EqualValues(t, 4096, out.FreedBytes)
	require.EqualValues(t, 3072, out.LaterBytes)
	require.EqualValues(t, 2048, out.Builds[1].LaterBytes)
	var planned packResult
	require.NoError(t, json.Unmarshal([]byte(call(t, "unpack", "x", "-n", "--json").out), &planned))
	require.True(t, planned.DryRun)
	require.Equal(t, "unpacked", planned.Builds[0].State)
	require.Empty(t, planned.Builds[0].Why)
	require.Equal(t, "unpack", planned.Builds[0].Action)
	require.Equal(t, "unpack", planned.Builds[1].Action)
	require.Equal(t, "kept", planned.Builds[1].State)
	require.Equal(t, "in use", planned.Builds[1].Why)
	require.Equal(t, []string{`unpacked ["x"] false`, `packed [] true`}, b.changed())
	for _, args := range [][]string{{"pack"}, {"unpack"}, {"pack", "--all", "x"}, {"pack", "--compress", "x"}} {
		require.Equal(t, exitUsage, call(t, args...).code, args)
	}
}
