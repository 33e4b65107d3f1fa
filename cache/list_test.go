package cache

import (
	"context"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/refusal"
)

// A listing is given in pages, in one order, and each page reads no more than it shows.
func TestAListIsGivenInPages(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	for seed := range uint64(5) {
		b.use(seed)
	}
	var ids []string
	next := ""
	for i, want := range []int{2, 2, 1} {
		page, after, err := b.cache.List(ctx, b.self(), ListFilter{After: next, Limit: 2})
		require.NoError(t, err)
		require.Len(t, page, want)
		require.Equal(t, i == 2, after == "", "only the last page is told to be that")
		for _, l := range page {
			ids = append(ids, l.Build.ID.String())
		}
		next = after
	}
	require.True(t, slices.IsSorted(ids))
	require.Len(t, slices.Compact(ids), 5)
	page, after, err := b.cache.List(ctx, b.self(), ListFilter{Limit: 5})
	require.NoError(t, err)
	require.Len(t, page, 5)
	require.Empty(t, after, "it was just full")
	_, _, err = b.cache.List(ctx, b.self(), ListFilter{After: "page 2"})
	require.Equal(t, refusal.BadRequest, refusal.ClassOf(err))
}
