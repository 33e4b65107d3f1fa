package cache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

// What blobs may take is the budget without what counts besides: manifests, removed builds that somebody has open, what is being stored, and what is waited for.
func TestTheGoalIsWhatTheBudgetLeaves(t *testing.T) {
	b := newBench(t)
	held := b.acquire(b.held(1))
	b.use(2)
	_, err := b.cache.Remove(context.Background(), b.self(), []string{held.Build.BuildKey.String()}, false, false)
	require.NoError(t, err)
	now := b.account()
	require.Positive(t, now.held)
	require.Positive(t, now.manifests)
	set := func(reserved int64) {
		b.cache.places.mu.Lock()
		defer b.cache.places.mu.Unlock()
		b.cache.places.reserved = reserved
	}
	set(1000)
	defer set(0)
	const budget = 1 << 20
	goal := func(of bounds, g Goal) [2]int64 {
		bytes, missing, err := b.cache.roomFor(of, g)
		require.NoError(t, err)
		return [2]int64{bytes, missing}
	}
	left := int64(budget) - now.manifests - now.held - 1000 - 300
	require.Equal(t, [2]int64{left, 0}, goal(bounds{budget: budget}, Goal{need: 300}))
	require.Equal(t, [2]int64{left - budget/slackPart, 0}, goal(bounds{budget: budget}, Goal{need: 300, slack: true}))
	require.Equal(t, [2]int64{0, 0}, goal(bounds{budget: 1}, Goal{}))
	require.Equal(t, [2]int64{-1, 0}, goal(bounds{}, Goal{need: 300}))
	require.Equal(t, [2]int64{-1, 2300}, goal(bounds{floor: 5000, free: 4000}, Goal{need: 300}))
	require.Equal(t, [2]int64{-1, 2300 + 5000/slackPart}, goal(bounds{floor: 5000, free: 4000}, Goal{need: 300, slack: true}))
	require.Equal(t, [2]int64{-1, 0}, goal(bounds{floor: 2700, free: 4000}, Goal{need: 300, slack: true}))
	require.NoError(t, held.View.Close())
}

// What goes to keep some of the disk free says nothing of the budget.
func TestWhatGoesForTheFloorIsNotForTheBudget(t *testing.T) {
	b := newBench(t)
	b.use(1)
	b.later.Add(int64(time.Hour))
	b.change = withSpace(SpaceOptions{Budget: Amount{Bytes: 1 << 40}, Floor: Amount{Percent: 100}})
	b.reopen()
	b.cache.places.want()
	require.Eventually(t, func() bool { return len(b.list()) == 0 }, patience, time.Millisecond)
	ghosts := b.cache.index.Journal.Tombstones(func(*index.Tombstone) bool { return true })
	require.Len(t, ghosts, 1)
	require.False(t, ghosts[0].ForBudget)
}
