package cache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/evict"
)

// While a reservation waits builds are evicted and not packed, as many as it needs.
func TestWaitingReservationDoesNotWaitForPacking(t *testing.T) {
	b := newBench(t)
	b.similarBuilds(3)
	b.later.Add(int64(time.Hour))
	counts := func(short int64, hurry bool) map[evict.Action]uint64 {
		to := b.plan(0).Used - short
		p, err := b.cache.PlanCollection(context.Background(), b.self(),
			store.Goal{Bytes: &to, Urgent: hurry}, nil)
		require.NoError(t, err)
		return map[evict.Action]uint64{evict.PackBuild: p.Count(evict.PackBuild),
			evict.Evict: p.Count(evict.Evict)}
	}
	require.Equal(t, map[evict.Action]uint64{evict.PackBuild: 1, evict.Evict: 0}, counts(1, false))
	require.Equal(t, map[evict.Action]uint64{evict.PackBuild: 0, evict.Evict: 1}, counts(1, true))
	require.Equal(t, map[evict.Action]uint64{evict.PackBuild: 0, evict.Evict: 2},
		counts(3<<19, true))
}

// Packing that has begun ends when a reservation begins to wait, if the plan is the daemon's own.
func TestPackingYieldsToReservations(t *testing.T) {
	b := newBench(t)
	builds, _ := b.similar(2)
	step := &evict.Step{Action: evict.PackBuild, ID: builds[1].ID, Last: b.cache.now()}
	ctx, own, byHand := context.Background(),
		&store.Collection{Plan: evict.Plan{Goal: -1}, Yields: true},
		&store.Collection{Plan: evict.Plan{Goal: -1}}
	require.NoError(t, b.cache.Store.Collector().UntilUsed(own, step)(ctx))
	_, done := b.cache.Store.Ledger().CountLacking(1, 0)
	require.ErrorIs(t, b.cache.Store.Collector().UntilUsed(own, step)(ctx),
		store.ErrReservationWaits)
	require.ErrorIs(t, b.cache.Store.Collector().RunShrinkStep(ctx, own, step),
		store.ErrReservationWaits)
	require.NoError(t, b.cache.Store.Collector().RunShrinkStep(ctx, byHand, step))
	require.Equal(t, "packed", step.Outcome)
	done()
	require.NoError(t, b.cache.Store.Collector().UntilUsed(own, step)(ctx))
}

// A reservation that fails because no build may be evicted reports which builds are protected, with
// numbers.
func TestRefusedReservationNamesProtectedBuilds(t *testing.T) {
	b := newBench(t)
	for seed := range uint64(2) {
		a := b.use(seed)
		_, err := b.cache.Pin(context.Background(), b.self(), []string{a.Build.BuildKey.String()},
			false)
		require.NoError(t, err)
	}
	held := b.acquire(b.held(7))
	next, now := b.options(), b.account()
	next.Space = store.SpaceOptions{Budget: store.Amount{Bytes: now.Counted() - 1}}
	require.NoError(t, b.cache.Reload(next))
	_, err := b.cache.Store.Reserve(context.Background(), 1, true, 1)
	require.Equal(t, apierr.NoSpace, apierr.ClassOf(err))
	require.ErrorContains(t, err,
		"; remaining: 1 build of 8.0 KiB: in use; 2 builds of 16.0 KiB: pinned")
	require.NoError(t, held.View.Close())
	place, err := b.cache.Store.Reserve(context.Background(), 1, true, 1)
	require.NoError(t, err, "the one that nobody holds any more goes")
	place.Release()
	require.Len(t, b.list(), 2)
}
