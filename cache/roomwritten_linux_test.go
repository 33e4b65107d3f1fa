package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// What a compile has written lies on the disk already, and is not written again: it fits above the floor where nothing else would, nor does
// anything go for it there. To the budget it is new.
func TestWhatIsWrittenAlreadyNeedsNoFreeSpace(t *testing.T) {
	s := newPlaces()
	admits := func(b bounds, r *reservation) error {
		_, err := s.admit(&roomNow{bounds: b}, r, 60, 0)
		return err
	}
	near := bounds{floor: 100, free: 110}
	require.ErrorContains(t, admits(near, &reservation{}), "110 B are free, of which 0 B are set aside for what is being stored and 100 B are to stay free")
	require.ErrorContains(t, admits(near, &reservation{written: 40}), "are to stay free", "20 are to come")
	require.NoError(t, admits(near, &reservation{written: 50}))
	require.NoError(t, admits(near, &reservation{written: 1000}))
	require.ErrorContains(t, admits(bounds{floor: 100, free: 99}, &reservation{written: 60}), "are to stay free", "the floor itself is kept to")
	require.ErrorContains(t, admits(bounds{budget: 50}, &reservation{written: 60}), "the budget for all is 50 B")

	s.reserved, s.written = 500, 495 // others'
	require.NoError(t, admits(near, &reservation{written: 55}))
	require.ErrorContains(t, admits(near, &reservation{written: 54}), "5 B are set aside", "what is written of the others' is in no use to ask for")
	guess := &reservation{disk: 60} // was set aside before the compile, as what has to be written
	s.reserved, s.written = 60, 0
	require.NoError(t, admits(bounds{floor: 100, free: 160}, guess))
	guess.written = 60
	require.NoError(t, admits(bounds{floor: 100, free: 100}, guess))

	waits, now := newPlaces(), &account{disk: 500}
	waits.await(60, 55)
	above := func(b bounds) bool { is, _ := waits.above(&b, now, false); return is }
	require.False(t, above(bounds{floor: 100, free: 105}))
	require.True(t, above(bounds{floor: 100, free: 104}))
}

// A place that is for what is written already is known as such from when it is taken until it is given back.
func TestTheResultOfACompileIsWrittenAlready(t *testing.T) {
	b := newBench(t)
	j := &job{c: b.cache, scope: "shared", attempt: &attempt{Request: b.held(1)}}
	j.setAside(context.Background(), &jobFacts{size: 4096})
	require.Positive(t, j.room.disk)
	require.Zero(t, b.cache.places.written, "a guess is not")

	out, build := t.TempDir(), &index.Build{Files: []index.File{{Name: "graph.onnx"}, {Name: "weights.bin"}}}
	require.NoError(t, os.WriteFile(filepath.Join(out, "graph.onnx"), make([]byte, 1), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(out, "weights.bin"), make([]byte, 3*cas.Block), 0o600))
	require.NoError(t, j.settle(context.Background(), build, out))
	sizes := []int64{1, 3 * cas.Block}
	require.EqualValues(t, 4*cas.Block+manifestNeed, b.cache.places.reserved)
	require.EqualValues(t, 4*cas.Block, b.cache.places.written)
	require.EqualValues(t, 4*cas.Block, writtenOf(build, append(sizes, 1<<20)), "a copy of the model is yet to be made")

	now := b.account()
	goal := func(of bounds, g Goal) (missing int64) {
		_, missing, err := b.cache.roomFor(of, g)
		require.NoError(t, err)
		return missing
	}
	require.EqualValues(t, manifestNeed, goal(bounds{floor: 5000, free: 5000}, Goal{}))
	require.EqualValues(t, manifestNeed+5, goal(bounds{floor: 5000, free: 5000}, Goal{need: 60, written: 55}))
	budget := now.counted() + 1<<20
	left, _, err := b.cache.roomFor(bounds{budget: budget}, Goal{need: 60, written: 55})
	require.NoError(t, err)
	require.Equal(t, budget-now.manifests-now.held-b.cache.places.reserved-60, left, "to the budget it is new")

	j.room.release()
	require.Zero(t, b.cache.places.reserved)
	require.Zero(t, b.cache.places.written)
}
