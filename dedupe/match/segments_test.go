package match

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// The search for the target's own copies gets all segments in order, whichever goroutine scans
// them.
func TestSegmentsAreHandedOnInOrder(t *testing.T) {
	src := source(bytes.Repeat(randomBytes(121, 200<<10), 16)) // three MiB and some
	ctx := context.Background()
	bad := errors.New("enough")
	var busy atomic.Bool
	next := int64(0)
	each := func(s segment) error {
		require.False(t, busy.Swap(true), "one at a time")
		defer busy.Store(false)
		require.NotEmpty(t, s.anchors)
		require.Equal(t, next, s.anchors[0].at/segmentSize)
		next++
		return nil
	}
	require.NoError(t, scanAll(ctx, src, scanOptions{level: denseLevel, each: each}))
	require.Equal(t, int64(4), next)
	next = 0
	require.ErrorIs(t,
		scanAll(ctx, src, scanOptions{level: denseLevel, each: func(s segment) error {
			if next == 2 {
				return bad
			}
			return each(s)
		}}), bad)
	require.Equal(t, int64(2), next, "nothing comes behind what could not be taken")
}

// A table that was made for fewer anchors grows, and loses neither positions nor their order.
func TestTableGrows(t *testing.T) {
	const size, keys = 1 << 30, 5000
	small, large := newTable(0, size), newTable(2*keys, size)
	require.Less(t, len(small.slots), len(large.slots))
	noise := randomBytes(122, 8*keys)
	for round := range int64(2) {
		for k := range int64(keys) {
			// as keys of a level are
			a := anchor{product(noise[8*k:]) &^ (1<<10 - 1), round*keys + k}
			small.insert(a)
			large.insert(a)
		}
	}
	require.Equal(t, len(large.slots), len(small.slots))
	for name, table := range map[string]*table{"grown": small, "made": large} {
		lost := 2 * keys
		for k := range int64(keys) {
			found := table.lookup(product(noise[8*k:])&^(1<<10-1), nil)
			require.Subset(t, []int64{k, keys + k}, found, name)
			require.True(t, slices.IsSorted(found), "%s: in the order in which they came", name)
			lost -= len(found)
		}
		require.Less(t, lost, keys/100, name) // for which there was no free slot nearby
	}
}
