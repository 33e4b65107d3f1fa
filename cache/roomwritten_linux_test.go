package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
)

// A place that is for what is written already is known as such from when it is taken until it is given back.
func TestTheResultOfACompileIsWrittenAlready(t *testing.T) {
	b := newBench(t)
	j := &job{c: b.cache, scope: "shared", Attempt: &request.Attempt{Request: b.held(1)}}
	j.setAside(context.Background(), &jobs.About{Size: 4096})
	require.Positive(t, b.reserved())
	require.Zero(t, b.cache.store.Ledger().Reserved().Written, "a guess is not")

	out, build := t.TempDir(), &index.Build{Files: []index.File{{Name: "graph.onnx"}, {Name: "weights.bin"}}}
	require.NoError(t, os.WriteFile(filepath.Join(out, "graph.onnx"), make([]byte, 1), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(out, "weights.bin"), make([]byte, 3*cas.Block), 0o600))
	require.NoError(t, j.settle(context.Background(), build, out))
	sizes := []int64{1, 3 * cas.Block}
	require.EqualValues(t, 4*cas.Block+store.ManifestNeed, b.reserved())
	require.EqualValues(t, 4*cas.Block, b.cache.store.Ledger().Reserved().Written)
	require.EqualValues(t, 4*cas.Block, writtenOf(build, append(sizes, 1<<20)), "a copy of the model is yet to be made")

	now := b.account()
	goal := func(of store.Bounds, g store.Goal) (missing int64) {
		_, missing, err := b.cache.store.Collector().Allowance(of, g)
		require.NoError(t, err)
		return missing
	}
	require.EqualValues(t, store.ManifestNeed, goal(store.Bounds{Floor: 5000, Free: 5000}, store.Goal{}))
	require.EqualValues(t, store.ManifestNeed+5, goal(store.Bounds{Floor: 5000, Free: 5000}, store.Goal{Need: 60, Written: 55}))
	budget := now.Counted() + 1<<20
	left, _, err := b.cache.store.Collector().Allowance(store.Bounds{Budget: budget}, store.Goal{Need: 60, Written: 55})
	require.NoError(t, err)
	require.Equal(t, budget-now.Manifests-now.Held-b.reserved()-60, left, "to the budget it is new")

	j.room.Release()
	require.Zero(t, b.reserved())
	require.Zero(t, b.cache.store.Ledger().Reserved().Written)
}
