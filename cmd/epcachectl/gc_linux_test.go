package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
)

func TestGC(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	require.Equal(t, `would remove tiny.onnx +1: build cdcdcdcdcdcd of StandInExecutionProvider, `+
		`would free 4.0 KiB: why
kept, pinned: 1 build, 4.0 KiB
kept, needed by builds outside the plan: 1.0 KiB
4.0 KiB of 8.0 KiB would be freed: 1 build removed, 0 packed, 0 unpacked copies dropped
still 1.0 KiB above 3.0 KiB: the remaining builds are pinned or in use
`, call(t, "gc", "3KiB", "-n").out)
	require.Empty(t, b.changed())
	require.Equal(t, exit.Short, call(t, "gc", "3KiB", "-n").code,
		"less may go than should")
	require.Equal(t, exit.Short, call(t, "gc", "3KiB", "-n", "--json").code,
		"a script gets it too")
	out := parseJSON(t, call(t, "gc", "-n", "--json"))
	require.Equal(t,
		[]any{jsonout.Object{"reason": "pinned", "builds": 1.0, "bytes": 4096.0,
			"keys": []any{"ab"}},
			jsonout.Object{"reason": "needed by builds outside the plan", "builds": 0.0,
				"bytes": 1024.0, "keys": []any{}}},
		jsonAt(t, out, "kept"))
	out = parseJSON(t, call(t, "gc", "1.5MiB", "--json"))
	require.Equal(t, "removed", jsonAt(t, out, "steps", 0, "outcome"))
	require.Equal(t, []string{"collect 1572864"}, b.changed())
	out = parseJSON(t, call(t, "gc", "--json"))
	require.Equal(t, false, jsonAt(t, out, "dry_run"))
	require.Equal(t, "remove", jsonAt(t, out, "steps", 0, "action"))
	require.Equal(t, []string{"collect 1572864", "collect as configured"}, b.changed(),
		"without SIZE the configuration's bounds count")
	for _, size := range []string{"", "x", "-1", "1GB", "NaN", "9999999TiB"} {
		require.Equal(t, exit.BadUsage, call(t, "gc", size).code, size)
	}
}
