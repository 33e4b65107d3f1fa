package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// together starts eight processes that are connected and have the model open, and not asked yet.
func together(d *epcached, model string) []*asker {
	askers := make([]*asker, 8)
	for i := range askers {
		askers[i] = d.asker(model)
	}
	return askers
}

// requireEqual requires that every process got the same build with the same bytes, and was told how.
func requireEqual(t *testing.T, askers []*asker) map[string]int {
	t.Helper()
	outcomes := make(map[string]int)
	var first told
	for i, a := range askers {
		got := a.got()
		require.Empty(t, got.Error)
		outcomes[got.Outcome]++
		got.Outcome = ""
		require.NotEmpty(t, got.Files)
		if i == 0 {
			first = got
		}
		require.Equal(t, first, got)
	}
	return outcomes
}

func TestEightProcessesOneCompile(t *testing.T) {
	d := newSite(t, runtimeFolder(t, openVINO)).start(t)
	askers := together(d, writeModel(t, t.TempDir(), 1))
	for _, a := range askers {
		a.begin()
	}
	outcomes := requireEqual(t, askers)
	require.Equal(t, 1, outcomes["compiled"], "%v", outcomes)
	require.EqualValues(t, 1, d.status().Compiles)
	require.Len(t, d.list(), 1)
}

func TestFirstOfEightIsKilled(t *testing.T) {
	d := newSite(t, runtimeFolder(t, openVINO)).start(t)
	dir := t.TempDir()
	get(t, d.dial(), writeModel(t, dir, 2)) // so that the next worker is the compile's, and none that probes
	askers := together(d, writeModel(t, dir, 1))
	first, others := askers[0], askers[1:]
	first.begin()
	first.until("phase compiling")
	thaw := d.freeze()
	for _, a := range others {
		a.begin()
	}
	for _, a := range others {
		a.until("phase compiling")
	}
	before := d.status().Connections
	require.NoError(t, first.cmd.Process.Kill())
	require.Eventually(t, func() bool { return d.status().Connections == before-1 }, patience, pollEvery, "the daemon has seen that the first one is gone")
	thaw()
	outcomes := requireEqual(t, others)
	require.Equal(t, map[string]int{"waited": 7}, outcomes)
	require.EqualValues(t, 2, d.status().Compiles, "with the one before")
}

// When everybody who waited is gone, so is the worker: nobody wants its result.
func TestAllAskersKilled(t *testing.T) {
	d := newSite(t, runtimeFolder(t, openVINO)).start(t)
	dir := t.TempDir()
	get(t, d.dial(), writeModel(t, dir, 2))
	a := d.asker(writeModel(t, dir, 1))
	a.begin()
	a.until("phase compiling")
	d.freeze()
	require.NoError(t, a.cmd.Process.Kill())
	require.Eventually(t, func() bool { return len(keepersOf(d.pid())) == 0 }, patience, pollEvery)
	require.Eventually(t, func() bool { return d.status().Jobs == 0 }, patience, pollEvery)
	require.Eventually(t, func() bool { return len(entriesOf(t, d.state, "staging")) == 0 }, patience, pollEvery)
	require.Len(t, d.list(), 1)
}
