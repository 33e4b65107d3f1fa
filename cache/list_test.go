package cache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// A listing is given in pages, in one order, and each page reads no more than it shows.
func TestListHasPages(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	for seed := range uint64(5) {
		b.use(seed)
	}
	var keys []string
	next := ""
	for i, want := range []int{2, 2, 1} {
		page, err := b.cache.Queries.List(ctx, b.self(), &wire.List{After: next, Limit: 2}, nil)
		require.NoError(t, err)
		require.Len(t, page.Builds, want)
		require.Equal(t, i == 2, page.Next == "", "only the last page is marked as such")
		for _, one := range page.Builds {
			keys = append(keys, one.Build)
		}
		next = page.Next
	}
	var ordered []string
	require.NoError(t, b.cache.index.Each(ctx, func(b index.Build) error {
		ordered = append(ordered, b.BuildKey.String())
		return nil
	}))
	require.Equal(t, ordered, keys)
	page, err := b.cache.Queries.List(ctx, b.self(), &wire.List{Limit: 5}, nil)
	require.NoError(t, err)
	require.Len(t, page.Builds, 5)
	require.Empty(t, page.Next, "it was just full")
	_, err = b.cache.Queries.List(ctx, b.self(), &wire.List{After: "page 2"}, nil)
	require.Equal(t, apierr.BadRequest, apierr.ClassOf(err))
}
