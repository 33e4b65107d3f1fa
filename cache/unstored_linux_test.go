package cache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
)

// fullStore is a store that is above its budget with builds that are all leased.
type fullStore struct {
	*bench
	leased []*request.Answer
}

func newFullStore(t *testing.T) *fullStore {
	b := newBench(t)
	return &fullStore{b, []*request.Answer{b.acquire(b.held(100)), b.acquire(b.held(101))}}
}

// bound sets a budget below what the store takes now.
func (f *fullStore) bound() {
	f.Helper()
	next, now := f.options(), f.account()
	next.Space = store.SpaceOptions{Budget: store.Amount{Bytes: now.Counted() - 1}}
	require.NoError(f, f.cache.Reload(next))
}

// free ends the leases.
func (f *fullStore) free() {
	f.Helper()
	for _, a := range f.leased {
		require.NoError(f, a.View.Close())
	}
}

// A compile that finds the store full of leased builds is answered from staging and not stored. An
// event and why say so, with the numbers; the same request compiles again, and is stored as soon as
// a build may be evicted.
func TestResultsWithoutSpaceAreServedAndNotStored(t *testing.T) {
	f := newFullStore(t)
	f.bound()
	before, compiles := f.account(), f.compiler.Compiles.Load()
	for times := int64(1); times <= 2; times++ {
		a := f.acquire(f.held(1))
		require.Equal(t, request.Compiled, a.Outcome)
		require.True(t, a.Unkept)
		require.Len(t, f.read(a), 2)
		require.Len(t, a.Warnings, 1)
		require.Contains(t, a.Warnings[0], "not stored: it takes ")
		require.Contains(t, a.Warnings[0], "; of the budget of ")
		require.Contains(t, a.Warnings[0], "raise budget in [space]")
		require.Equal(t, compiles+times, f.compiler.Compiles.Load())
		require.Equal(t, before, f.account(), "nothing of it is in the store")
		require.Len(t, f.list(), 2)
		require.Empty(t, f.jobs(0), "nothing is left to do")
		require.Contains(t, f.explain(f.held(1)).Reason, "and not stored: it takes ")
		if times == 2 {
			require.Equal(t, []string{event.Unkept, event.Unkept}, f.kinds(a.RequestKey))
		}
	}
	space, err := f.cache.Queries.Space()
	require.NoError(t, err)
	require.EqualValues(t, 2, space.Unkept)
	require.Zero(t, space.ReservedBytes)

	f.free()
	require.False(t, f.acquire(f.held(1)).Unkept)
	require.Equal(t, request.Hit, f.acquire(f.held(1)).Outcome)
}

// A put for which a store full of leased builds has no space is refused with NO_SPACE and the
// numbers. Its claim stays, so that the same put is stored as soon as a build may be evicted.
func TestPutsWithoutSpaceAreRefused(t *testing.T) {
	f := newFullStore(t)
	claimed := newClaimed(f.bench, func(r *request.Request) { r.KeepsView = true })
	f.bound()
	before := f.account()
	put := func() (*request.Answer, error) {
		return f.cache.Claims.Put(context.Background(), request.Peer{UID: stranger}, claimed.put,
			nil)
	}
	_, err := put()
	require.Equal(t, apierr.NoSpace, apierr.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "it takes ")
	require.ErrorContains(t, err, "; of the budget of ")
	require.Equal(t, before, f.account())
	require.Len(t, f.list(), 2)

	f.free()
	a, err := put()
	require.NoError(t, err)
	require.Equal(t, request.Taken, a.Outcome)
	require.NotNil(t, a.View)
}
