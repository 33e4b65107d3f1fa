package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestGC(t *testing.T) {
	b := newStandIn(t)
	b.serve()
	require.Equal(t, `would remove tiny.onnx +1: build cdcdcdcdcdcd of StandInExecutionProvider, would free 4.0 KiB: why
kept, pinned: 1 build, 4.0 KiB
kept, needed by builds that are not planned for: 1.0 KiB
4.0 KiB of 8.0 KiB would be freed: 1 build removed, 0 packed, 0 unpacked forms dropped
1.0 KiB above 3.0 KiB: nothing more may go
`, call(t, "gc", "--to", "3KiB", "-n").out)
	require.Empty(t, b.changed())
	require.Equal(t, exitShort, call(t, "gc", "--to", "3KiB", "-n").code, "less may go than should")
	require.Equal(t, exitShort, call(t, "gc", "--to", "3KiB", "-n", "--json").code, "a script is told so too")
	var out gcResult
	require.NoError(t, json.Unmarshal([]byte(call(t, "gc", "-n", "--json").out), &out))
	require.Equal(t, []keptResult{{Reason: "pinned", Builds: 1, Bytes: 4096, Keys: []string{"ab"}}, {Reason: "needed by builds that are not planned for", Bytes: 1024, Keys: []string{}}}, out.Kept)
	require.NoError(t, json.Unmarshal([]byte(call(t, "gc", "--to", "1.5MiB", "--json").out), &out))
	require.Equal(t, "removed", out.Steps[0].Outcome)
	require.Equal(t, []string{"collect 1572864"}, b.changed())
	require.NoError(t, json.Unmarshal([]byte(call(t, "gc", "--json").out), &out))
	require.False(t, out.DryRun)
	require.Equal(t, "remove", out.Steps[0].Action)
	require.Equal(t, []string{"collect 1572864", "collect as configured"}, b.changed(), "without --to the configuration's bounds count")
	for _, size := range []string{"", "x", "-1", "1GB", "NaN", "9999999TiB"} {
		require.Equal(t, exitUsage, call(t, "gc", "--to", size).code, size)
	}
}
