package main

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
)

// together starts 64 processes that are connected and have the model open, and not asked yet. Every
// eighth will read the bytes that it gets.
func together(d *epcached, model string) []*asker {
	askers := make([]*asker, 64)
	for i := range askers {
		askers[i] = d.askerFor(order{Socket: d.socket, Model: model, Unread: i%8 != 0})
	}
	return askers
}

// requireEqual requires that every process got the same build with the same bytes, and was sent
// how.
func requireEqual(t *testing.T, askers []*asker) map[string]int {
	t.Helper()
	outcomes := make(map[string]int)
	var first told
	for i, a := range askers {
		got := a.got()
		require.Empty(t, got.Error)
		outcomes[got.Outcome]++
		got.Outcome, got.At = "", time.Time{}
		require.NotEmpty(t, got.Files)
		if i == 0 {
			first = got
		}
		require.Equal(t, first, got)
	}
	return outcomes
}

func TestSixtyFourProcessesOneCompile(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeDir(t, openVINO)).start(t)
	askers := together(d, writeLargeModel(t, t.TempDir()))
	for _, a := range askers {
		a.begin()
	}
	outcomes := requireEqual(t, askers)
	require.Equal(t, 1, outcomes["compiled"], "%v", outcomes)
	require.EqualValues(t, 1, d.status().Compiles)
	require.Len(t, d.list(), 1)
}

func TestCompileSurvivesKilledClients(t *testing.T) {
	t.Parallel()
	d := stoppingSite(t).start(t)
	dir := t.TempDir()
	// so that the next worker is the compile's, and none that probes
	get(t, d.dial(), writeModel(t, dir, 2))
	askers := together(d, writeStopping(t, dir, 1))
	askers[0].begin()
	askers[0].until("phase compiling")
	resume := d.freeze()
	for _, a := range askers[1:] {
		a.begin()
	}
	for _, a := range askers[1:] {
		a.until("phase compiling")
	}
	killed := append([]int{0}, rand.Perm(63)[:20]...)
	before := d.status().Connections
	for i := range killed {
		if i > 0 {
			killed[i]++ // of those behind the first
		}
		require.NoError(t, askers[killed[i]].cmd.Process.Kill())
	}
	require.Eventually(t, func() bool { return d.status().Connections == before-21 }, patience,
		pollEvery, "the daemon has seen that they are gone")
	resume()
	var others []*asker
	for i, a := range askers {
		if !slices.Contains(killed, i) {
			others = append(others, a)
		}
	}
	require.Equal(t, map[string]int{"waited": 43}, requireEqual(t, others), "killed: %v", killed)
	require.EqualValues(t, 2, d.status().Compiles, "with the one before")
}

// writeLargeModel writes a model of 128 MiB.
func writeLargeModel(t testing.TB, dir string) string {
	const n = 1 << 12
	m := compilertest.DenseModel(1, 1, 1)
	m.Inputs[0].Shape, m.Outputs[0].Shape = []any{1, n}, []any{1, 2 * n}
	m.Initializers[0].Shape = []int64{n, 2 * n}
	m.Initializers[0].Raw = bytes.Repeat(tinymodel.Floats(1, n), 2*n)
	path := filepath.Join(dir, "large.onnx")
	require.NoError(t, os.WriteFile(path, m.Encode(), 0o644))
	return path
}

// When all waiting clients are gone, their worker is ended, because its result is of no use.
func TestAllClientsOfACompileAreKilled(t *testing.T) {
	t.Parallel()
	d := stoppingSite(t).start(t)
	dir := t.TempDir()
	get(t, d.dial(), writeModel(t, dir, 2))
	a := d.asker(writeStopping(t, dir, 1))
	a.begin()
	a.until("phase compiling")
	d.freeze()
	require.NoError(t, a.cmd.Process.Kill())
	require.Eventually(t, func() bool { return len(keepersOf(d.pid())) == 0 }, patience, pollEvery)
	require.Eventually(t, func() bool { return d.status().Jobs == 0 }, patience, pollEvery)
	require.Eventually(t, func() bool { return len(entriesOf(t, d.state, "staging")) == 0 },
		patience, pollEvery)
	require.Len(t, d.list(), 1)
}

// BenchmarkSixtyFourProcesses has 64 processes ask at once for a model of 128 MiB that is not
// compiled yet, and measures how long after the first answer the last one arrives.
func BenchmarkSixtyFourProcesses(b *testing.B) {
	var spread time.Duration
	rounds := 0
	for b.Loop() {
		d := newSite(b, runtimeDir(b, openVINO)).start(b)
		model := writeLargeModel(b, b.TempDir())
		askers := make([]*asker, 64)
		for i := range askers {
			askers[i] = d.askerFor(order{Socket: d.socket, Model: model, Unread: true})
		}
		for _, a := range askers {
			a.begin()
		}
		var first, last time.Time
		for _, a := range askers {
			got := a.got()
			require.Empty(b, got.Error)
			if first.IsZero() || got.At.Before(first) {
				first = got.At
			}
			if got.At.After(last) {
				last = got.At
			}
		}
		require.EqualValues(b, 1, d.status().Compiles)
		spread, rounds = spread+last.Sub(first), rounds+1
		d.stop()
	}
	b.ReportMetric(float64(spread.Microseconds())/1000/float64(rounds), "first-to-last-ms")
}
