package cache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
)

// The goal for blobs is the budget less all else that counts: manifests, removed builds that a
// client has open, builds being stored, and waiting reservations.
func TestEvictionGoalIsDerivedFromTheBudget(t *testing.T) {
	b := newBench(t)
	held := b.acquire(b.held(1))
	b.use(2)
	_, err := b.cache.Remove(context.Background(), b.self(), []string{held.Build.BuildKey.String()},
		false, false)
	require.NoError(t, err)
	now := b.account()
	require.Positive(t, now.UnlinkedOpen)
	require.Positive(t, now.Manifests)
	set, err := b.cache.Store.Reserve(context.Background(), 1, false)
	require.NoError(t, err)
	defer set.Release()
	reserved := b.reserved()
	require.Positive(t, reserved)
	const budget = 1 << 20
	goal := func(of store.Bounds, g store.Goal) [2]int64 {
		bytes, missing, err := b.cache.Store.Collector().AllowedBytes(of, g)
		require.NoError(t, err)
		return [2]int64{bytes, missing}
	}
	left := int64(budget) - now.Manifests - now.UnlinkedOpen - reserved - 300
	require.Equal(t, [2]int64{left, 0}, goal(store.Bounds{Budget: budget}, store.Goal{Need: 300}))
	require.Equal(t, [2]int64{left - budget/store.SlackPart, 0},
		goal(store.Bounds{Budget: budget}, store.Goal{Need: 300, Slack: true}))
	require.Equal(t, [2]int64{0, 0}, goal(store.Bounds{Budget: 1}, store.Goal{}))
	require.Equal(t, [2]int64{-1, 0}, goal(store.Bounds{}, store.Goal{Need: 300}))
	require.Equal(t, [2]int64{-1, 1300 + reserved},
		goal(store.Bounds{Floor: 5000, Free: 4000}, store.Goal{Need: 300}))
	require.Equal(t, [2]int64{-1, 1300 + reserved + 5000/store.SlackPart},
		goal(store.Bounds{Floor: 5000, Free: 4000}, store.Goal{Need: 300, Slack: true}))
	require.Equal(t, [2]int64{-1, 0},
		goal(store.Bounds{Floor: 3700 - reserved, Free: 4000}, store.Goal{Need: 300, Slack: true}))
	require.NoError(t, held.View.Close())
}

// Evictions for the free space of the disk do not count as evictions for the budget.
func TestEvictionForTheFloorIsNotCountedForTheBudget(t *testing.T) {
	b := newBench(t)
	b.use(1)
	b.later.Add(int64(time.Hour))
	b.change = withSpace(store.SpaceOptions{Budget: store.Amount{Bytes: 1 << 40},
		Floor: store.Amount{Percent: 100}})
	b.reopen()
	b.cache.Store.Ledger().WakeCollector()
	require.Eventually(t, func() bool { return len(b.list()) == 0 }, patience, time.Millisecond)
	tombstones := b.cache.index.Journal.Tombstones(func(*index.Tombstone) bool { return true })
	require.Len(t, tombstones, 1)
	require.False(t, tombstones[0].ForBudget)
	require.Contains(t, tombstones[0].Reason, " to free space (free_floor): ")

	advice := b.spaceAdvice(b.self(), "in the last 7 days: 1")
	require.Equal(t, query.SeverityWarning, advice.Severity)
	require.Contains(t, advice.Text, "builds evicted for free_floor (")
	require.Contains(t, advice.Hint, "lower free_floor")
	b.later.Add(int64(8 * 24 * time.Hour))
	require.Zero(t, b.spaceAdvice(b.self(), "in the last 7 days"))
}
