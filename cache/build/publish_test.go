package build

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
)

// openJob returns a job over a store, that reserves space and compiles nothing.
func openJob(t *testing.T, space store.SpaceOptions) *Job {
	log := slog.New(slog.DiscardHandler)
	st, err := store.Open(t.TempDir(), store.Options{Log: log, Now: time.Now,
		Settings: store.Settings{Space: space}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, st.Close()) })
	bd := New(Options{Store: st, Settings: func() Settings { return Settings{} },
		Jobs: jobs.New(jobs.Options{Costs: jobs.NewCosts(&st.Index().Memos, log), Now: time.Now})})
	at := &request.Attempt{Request: &request.Request{Peer: request.Peer{UID: 1000}}}
	return &Job{bd: bd, scope: "shared", Attempt: at}
}

// The output of a compile is a guess: it reserves space ahead, which does not count to its user's
// quota.
func TestAGuessDoesNotCountToAQuota(t *testing.T) {
	j := openJob(t, store.SpaceOptions{UserBytes: store.Amount{Bytes: 1}})
	j.reserveEstimate(t.Context(), &jobs.Description{Size: 4096})
	defer j.reservation.Release()
	reserved := j.bd.Store.Ledger().Reserved()
	require.Positive(t, reserved.Disk)
	require.Zero(t, reserved.ByUser[j.Peer.UID])
}

// A reservation for files that are written already counts as written until it is released.
func TestTheResultOfACompileIsWrittenAlready(t *testing.T) {
	j := openJob(t, store.SpaceOptions{})
	st := j.bd.Store
	j.reserveEstimate(t.Context(), &jobs.Description{Size: 4096})
	require.Positive(t, st.Ledger().Reserved().Disk)
	require.Zero(t, st.Ledger().Reserved().Written, "a guess is not")

	out := t.TempDir()
	build := &index.Build{Files: []index.File{{Name: "graph.onnx"}, {Name: "weights.bin"}}}
	require.NoError(t, os.WriteFile(filepath.Join(out, "graph.onnx"), make([]byte, 1), 0o600))
	weights := make([]byte, 3*cas.Block)
	require.NoError(t, os.WriteFile(filepath.Join(out, "weights.bin"), weights, 0o600))
	require.NoError(t, j.resizeReservation(t.Context(), build, out))
	sizes := []int64{1, 3 * cas.Block}
	reserved := st.Ledger().Reserved()
	require.EqualValues(t, 4*cas.Block+store.ManifestNeed, reserved.Disk)
	require.EqualValues(t, 4*cas.Block, reserved.Written)
	require.EqualValues(t, 4*cas.Block, writtenBytes(build, append(sizes, 1<<20)), "a copy is not")

	now, err := st.Account()
	require.NoError(t, err)
	goal := func(of store.Bounds, g store.Goal) (missing int64) {
		_, missing, err := st.Collector().AllowedBytes(of, g)
		require.NoError(t, err)
		return missing
	}
	bounds := store.Bounds{Floor: 5000, Free: 5000}
	require.EqualValues(t, store.ManifestNeed, goal(bounds, store.Goal{}))
	require.EqualValues(t, store.ManifestNeed+5, goal(bounds, store.Goal{Need: 60, Written: 55}))
	budget := now.Counted() + 1<<20
	left, _, err := st.Collector().
		AllowedBytes(store.Bounds{Budget: budget}, store.Goal{Need: 60, Written: 55})
	require.NoError(t, err)
	require.Equal(t, budget-now.Manifests-now.UnlinkedOpen-reserved.Disk-60, left,
		"to the budget it is new")

	j.reservation.Release()
	require.Zero(t, st.Ledger().Reserved().Disk)
	require.Zero(t, st.Ledger().Reserved().Written)
}
