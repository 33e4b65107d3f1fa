package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
)

func TestPackAndUnpack(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	require.Equal(t, `tiny.onnx: build cdcdcdcdcdcd of StandInExecutionProvider: `+
		`would be packed, which would free 4.0 KiB
other.onnx: build efefefefefef of StandInExecutionProvider: kept: in use; `+
		`packing would free 2.0 KiB later
and 3 more
1 build would be packed, which would free 4.0 KiB; about 3.0 KiB more when other builds are no `+
		`longer in use
`, call(t, "pack", "--all", "-n").out)
	require.Empty(t, b.changed())
	require.Contains(t, call(t, "unpack", "x").out, "1 build unpacked, which takes 8.0 KiB\n")
	out := parseJSON(t, call(t, "pack", "--all", "--json"))
	require.Equal(t, "packed", jsonAt(t, out, "builds", 0, "outcome"))
	require.EqualValues(t, 4096, jsonAt(t, out, "freed_bytes"))
	require.EqualValues(t, 3072, jsonAt(t, out, "later_bytes"))
	require.EqualValues(t, 2048, jsonAt(t, out, "builds", 1, "later_bytes"))
	planned := parseJSON(t, call(t, "unpack", "x", "-n", "--json"))
	require.Equal(t, true, jsonAt(t, planned, "dry_run"))
	require.Equal(t, "unpacked", jsonAt(t, planned, "builds", 0, "outcome"))
	require.Equal(t, "kept: in use", jsonAt(t, planned, "builds", 1, "outcome"))
	require.Equal(t, []string{`unpacked ["x"] false`, `packed [] true`}, b.changed())
	for _, args := range [][]string{{"pack"}, {"unpack"}, {"pack", "--all", "x"},
		{"pack", "--compress", "x"}} {
		require.Equal(t, exit.BadUsage, call(t, args...).code, args)
	}
}
