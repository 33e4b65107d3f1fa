package cache

import (
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/views"
)

// stored is a bench with n builds without leases, and with paths too old to be in use.
func stored(t *testing.T, n uint64) (*bench, []index.Build) {
	b := newBench(t)
	var out []index.Build
	for seed := range n {
		a := b.acquire(b.request(b.model(seed + 1)))
		out = append(out, *a.Build)
		require.NoError(t, a.View.Close())
		b.later.Add(int64(time.Hour))
	}
	return b, out
}

func (b *bench) plan(to int64) *store.Collection {
	b.Helper()
	plan, err := b.cache.PlanCollection(context.Background(), request.Peer{UID: b.cache.uid},
		store.Goal{Bytes: &to}, nil)
	require.NoError(b, err)
	return plan
}

func (b *bench) collect(plan *store.Collection) {
	b.Helper()
	require.NoError(b, b.cache.Store.Collector().
		Collect(context.Background(), plan, func(int64, int64) {}))
}

func TestAPlanChangesNothingAndIsCarriedOutAsItIs(t *testing.T) {
	b, builds := stored(t, 3)
	plan := b.plan(0)
	require.Len(t, b.list(), 3)
	require.Len(t, plan.Steps, 3)
	require.Equal(t, plan.Used, plan.Freed)
	b.collect(plan)
	require.Empty(t, b.list())
	require.Equal(t, plan.Used, plan.Freed)
	for i := range plan.Steps {
		require.Equal(t, "removed", plan.Steps[i].Outcome)
	}
	require.Len(t, b.cache.index.Journal.Tombstones(nil), len(builds))
	b.reopen()
	require.Len(t, b.cache.index.Journal.Tombstones(nil), len(builds), "after a restart as well")
	why, err := b.cache.Queries.Why(context.Background(), request.Peer{UID: b.cache.uid},
		builds[0].BuildKey.String())
	require.NoError(t, err)
	require.Contains(t, why.Reason, "evicted on ")
}

// Two collections choose the same builds at the same time: these are removed and recorded once.
func TestConcurrentCollectionsOfTheSameBuilds(t *testing.T) {
	b, builds := stored(t, 2)
	plan, other := b.plan(0), b.plan(0)
	other.Freed = 0 // nothing is done yet
	b.collect(plan)
	require.NoError(t, b.cache.Store.Collector().EvictAll(context.Background(), other, other.Steps))
	for i := range other.Steps {
		require.Equal(t, "kept: it was removed already", other.Steps[i].Outcome)
	}
	tombstones := b.cache.index.Journal.Tombstones(nil)
	require.Len(t, tombstones, len(builds))
	require.EqualValues(t, len(builds), b.cache.index.Counters.All()["evicted"])
}

func TestEvictionSkipsLeasedPinnedAndUsedBuilds(t *testing.T) {
	b, builds := stored(t, 4)
	ctx := context.Background()
	_, err := b.cache.Pin(ctx, request.Peer{UID: b.cache.uid},
		[]string{builds[0].BuildKey.String()}, false)
	require.NoError(t, err)
	held := b.acquire(b.request(b.model(2)))
	require.Equal(t, builds[1].ID, held.Build.ID)
	b.later.Add(int64(time.Hour)) // the lease alone keeps it

	plan := b.plan(0)
	require.Len(t, plan.Steps, 2)
	require.Equal(t,
		[]evict.Kept{{Reason: "pinned", Builds: 1, Bytes: plan.Kept[0].Bytes,
			First: []index.BuildID{builds[0].ID}},
			{Reason: "in use", Builds: 1, Bytes: plan.Kept[1].Bytes,
				First: []index.BuildID{builds[1].ID}}}, plan.Kept)
	require.Positive(t, plan.Short)
	r := b.request(b.model(3))
	r.KeepsView = true // so that the use alone keeps it, and not the time that paths are given
	used := b.acquire(r)
	require.NoError(t, used.View.Close())
	b.collect(plan)
	require.Equal(t, []string{"removed", "kept: used after the plan was made"},
		outcomes(plan, builds[3].ID, builds[2].ID))
	left := make(map[index.BuildID]bool)
	for _, l := range b.list() {
		left[l.Build.ID] = true
	}
	require.Equal(t,
		map[index.BuildID]bool{builds[0].ID: true, builds[1].ID: true, builds[2].ID: true}, left)
}

// While a reservation waits, builds that were used meanwhile are evicted too, if they have no
// lease.
func TestReservationEvictsBuildsUsedMeanwhile(t *testing.T) {
	for hurry, outcome := range map[bool]string{false: "kept: used after the plan was made",
		true: "removed"} {
		b, builds := stored(t, 1)
		plan, err := b.cache.PlanCollection(context.Background(), b.self(),
			store.Goal{Bytes: new(int64), Urgent: hurry}, nil)
		require.NoError(t, err)
		b.later.Add(int64(time.Hour))
		again := b.acquire(b.request(b.model(1)))
		require.Equal(t, request.Hit, again.Outcome)
		require.NoError(t, again.View.Close())
		b.later.Add(int64(time.Hour))
		b.collect(plan)
		require.Equal(t, []string{outcome}, outcomes(plan, builds[0].ID))
	}
}

// outcomes are those of some builds.
func outcomes(plan *store.Collection, ids ...index.BuildID) (out []string) {
	for _, id := range ids {
		for i := range plan.Steps {
			if plan.Steps[i].ID == id {
				out = append(out, plan.Steps[i].Outcome)
			}
		}
	}
	return out
}

func TestEvictionStopsAtTheGoal(t *testing.T) {
	b, builds := stored(t, 3)
	plan := b.plan(b.plan(0).Used - 1)
	require.Len(t, plan.Steps, 1)
	require.Zero(t, plan.Short)
	b.collect(plan)
	require.Len(t, b.list(), len(builds)-1)
}

func TestEvictionSkipsRecentlyGivenPaths(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	require.NoError(t, a.View.Close())
	require.Empty(t, b.plan(0).Steps)
	b.later.Add(int64(views.PathGrace + time.Second))
	require.Len(t, b.plan(0).Steps, 1)
}

func TestUsersCollectTheirOwn(t *testing.T) {
	b, _ := stored(t, 1)
	other := request.Peer{UID: b.cache.uid + 1}
	r := b.request(b.model(9))
	r.Peer, r.Store = other, "user"
	own := b.acquire(r)
	require.NoError(t, own.View.Close())
	b.later.Add(int64(time.Hour))
	to := int64(0)
	plan, err := b.cache.PlanCollection(context.Background(), other, store.Goal{Bytes: &to}, nil)
	require.NoError(t, err)
	require.Len(t, plan.Steps, 1)
	require.Equal(t, own.Build.ID, plan.Steps[0].ID)
	require.EqualValues(t, 1, plan.Considered)
}

// To a user's quota count the shared builds, too, that came of the user's requests. The user may
// not collect those, and the caller gets an error.
func TestPlanOfAUserCountsBuildsOfOthers(t *testing.T) {
	b, _ := stored(t, 1)
	other := request.Peer{UID: b.cache.uid + 1}
	var own, shared *request.Answer
	for seed, store := range map[uint64]string{9: "user", 10: "shared"} {
		r := b.request(b.model(seed))
		r.Peer, r.Store = other, store
		a := b.acquire(r)
		require.NoError(t, a.View.Close())
		if store == "user" {
			own = a
		} else {
			shared = a
		}
	}
	b.later.Add(int64(time.Hour))
	require.NotEqual(t, own.Build.Scope, shared.Build.Scope)
	// the collector leaves its rounds to the waiter
	_, done := b.cache.Store.Ledger().CountLacking(0, 0)
	defer done()
	plan := func(quota int64) *store.Collection {
		settings := b.cache.settings.Load().store
		settings.Space.UserBytes = store.Amount{Bytes: quota}
		b.cache.Store.SetSettings(settings)
		plan, err := b.cache.PlanCollection(context.Background(), other, store.Goal{}, nil)
		require.NoError(t, err)
		return plan
	}
	logical := func(a *request.Answer) (sum int64) {
		for _, f := range a.Build.Files {
			sum += f.Size
		}
		return sum
	}
	require.Empty(t, plan(logical(own)+logical(shared)).Steps, "it is within the quota")
	var above *store.Collection
	require.Eventually(t, func() bool { // the daemon itself may still read a file of the build
		above = plan(logical(shared))
		return len(above.Steps) == 1
	}, soon, time.Millisecond, "the two of them are above it")
	require.Equal(t, own.Build.ID, above.Steps[0].ID)
	require.Empty(t, above.Kept, "what stays is within it")
	far := plan(logical(shared) - 1)
	require.Len(t, far.Steps, 1)
	require.Len(t, far.Kept, 1)
	require.Regexp(t, "^shared, so only administrators may remove it, though uid [0-9]+ has "+
		"more than its quota of ", far.Kept[0].Reason)
	require.EqualValues(t, 1, far.Kept[0].Builds)
}

// syncing is a file system that says which directory or file it is about to sync.
type syncing struct {
	cas.OS
	synced func(path string)
}

func (s *syncing) Sync(f *os.File) error { s.synced(f.Name()); return s.OS.Sync(f) }

func (s *syncing) SyncDir(path string) error { s.synced(path); return s.OS.SyncDir(path) }

// Builds are evicted together: their tombstones are synced before the first manifest is removed. A
// client that asks for one of them from then on is refused, and begins again.
func TestAnEvictionIsDecidedBeforeItsTombstones(t *testing.T) {
	b, _ := stored(t, 3)
	var wanted atomic.Pointer[index.BuildID] // as soon as the journal is about to be synced
	b.change = func(o *Options) {
		o.fs = &syncing{synced: func(path string) {
			if filepath.Base(path) != "journal" {
				return
			}
			if id := wanted.Swap(nil); id != nil {
				_, err := b.cache.Store.BeginServing(*id)
				assert.ErrorIs(t, err, store.ErrRemoved)
			}
		}}
	}
	b.reopen()
	plan := b.plan(0)
	require.Len(t, plan.Steps, 3)
	plan.Goal = plan.Used - plan.Steps[0].Frees - plan.Steps[1].Frees
	first := plan.Steps[0].ID
	wanted.Store(&first)
	b.collect(plan)
	require.Equal(t, []string{"removed", "removed", "kept: enough space is free by now"},
		outcomes(plan, plan.Steps[0].ID, plan.Steps[1].ID, plan.Steps[2].ID))
	require.Zero(t, plan.Short)
	require.Len(t, b.list(), 1)
	require.Len(t, b.cache.index.Journal.Tombstones(nil), 2)
}
