package cache

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/store"
)

// perBuild is what a build of the stand-in compiler takes: a graph, a sidecar and a manifest, less
// than a block each.
const perBuild = 3 * cas.Block

func withSpace(o store.SpaceOptions) func(*Options) { return func(all *Options) { all.Space = o } }

// held is a request of a client that keeps the descriptor, as the Python package does.
func (b *bench) held(seed uint64) *request.Request {
	r := b.request(b.model(seed))
	r.KeepsView = true
	return r
}

// use gets a model and lets it go.
func (b *bench) use(seed uint64) *request.Answer {
	b.Helper()
	a := b.acquire(b.held(seed))
	require.NoError(b, a.View.Close())
	return a
}

func (b *bench) account() store.Account {
	b.Helper()
	now, err := b.cache.Store.Account()
	require.NoError(b, err)
	return now
}

func (b *bench) within(budget int64) {
	b.Helper()
	require.Eventually(b, func() bool { now := b.account(); return now.Counted() <= budget }, soon,
		time.Millisecond)
}

// blobs counts what lies among the objects.
func (b *bench) blobs() (n int) {
	b.Helper()
	require.NoError(b,
		b.cache.cas.Walk(context.Background(),
			func(cas.Digest, int64, int64) error { n++; return nil }))
	return n
}

func TestTheStoreKeepsToItsBudgetByItself(t *testing.T) {
	const budget = 8 * perBuild
	b := newBenchWith(t, withSpace(store.SpaceOptions{Budget: store.Amount{Bytes: budget}}))
	built := make(map[index.BuildID]bool)
	for seed := range uint64(30) {
		a := b.use(seed)
		require.Equal(t, request.Compiled, a.Outcome)
		if len(a.Warnings) == 0 {
			built[a.Build.ID] = true
		}
		require.LessOrEqual(t, b.account().Disk, int64(budget+perBuild),
			"one artefact above at most")
	}
	b.within(budget)
	require.GreaterOrEqual(t, len(built), 20, "the collector keeps up")
	left := b.list()
	require.GreaterOrEqual(t, len(left), 6, "and leaves what fits")
	for _, l := range left {
		delete(built, l.Build.ID)
	}
	for id := range built {
		tombstones := b.cache.index.Journal.Tombstones(
			func(g *index.Tombstone) bool { return g.BuildID == id })
		require.Len(t, tombstones, 1, "nothing that was acknowledged goes without a word")
		require.Contains(t, tombstones[0].Reason,
			"to free space (budget): least valuable for its size")
	}
	require.Positive(t, b.cache.index.Counters.All()["evicted"])
	require.Eventually(t, func() bool { return 2*len(b.list()) == b.blobs() }, soon,
		time.Millisecond, "the collector may still be at work")
}

func TestBuildAboveTheBudgetIsServedAndNotStored(t *testing.T) {
	b := newBenchWith(t, withSpace(store.SpaceOptions{Budget: store.Amount{Bytes: perBuild - 1}}))
	a := b.acquire(b.held(1))
	require.Equal(t, request.Compiled, a.Outcome)
	require.Len(t, b.read(a), 2)
	require.Len(t, a.Warnings, 1)
	require.Contains(t, a.Warnings[0],
		fmt.Sprintf("not stored: it takes %s on disk, and the whole budget is %s",
			bytesize.Text(perBuild+cas.Block), bytesize.Text(perBuild-1)))
	require.Empty(t, b.list())
	require.Zero(t, b.blobs(), "nothing of it was stored")
	require.Equal(t, []string{event.Unkept}, b.kinds(a.RequestKey))
	require.Contains(t, b.explain(b.held(1)).Reason, "and not stored: it takes")
}

func TestReservationsAddUp(t *testing.T) {
	b := newBenchWith(t, withSpace(store.SpaceOptions{Budget: store.Amount{Bytes: 1 << 20}}))
	ctx, c := context.Background(), b.cache
	first, err := c.Store.Reserve(ctx, 1, false, 600<<10)
	require.NoError(t, err)
	second, err := c.Store.Reserve(ctx, 1, false, 600<<10)
	require.NoError(t, err, "one may go above")
	third, err := c.Store.Reserve(ctx, 1, false, 1)
	require.ErrorContains(t, err, "of the budget of 1.0 MiB are used: 0 B by builds, 0 B by "+
		"removed builds that are still open, 1.2 MiB by builds being stored")
	require.Equal(t, apierr.NoSpace, apierr.ClassOf(err))
	require.NoError(t, first.Resize(ctx, false, 10<<10), "what is smaller than was thought")
	require.NoError(t, third.Resize(ctx, false, 1))
	_, err = c.Store.Reserve(ctx, 1, false, 2<<20)
	require.ErrorContains(t, err, "it takes 2.0 MiB on disk, and the whole budget is 1.0 MiB")
	for range 2 {
		first.Release()
		second.Release()
		third.Release()
	}
	require.Zero(t, b.reserved())
	require.Empty(t, c.Store.Ledger().Reserved().ByUser)
}

// reserved returns how many bytes on disk are set aside.
func (b *bench) reserved() int64 { return b.cache.Store.Ledger().Reserved().Disk }

// A reservation evicts for itself what may be evicted, and is admitted or refused then: it does not
// depend on the collector's own goroutine, and waits for no clock.
func TestReservationsEvictForThemselves(t *testing.T) {
	b := newBench(t)
	ctx, c := context.Background(), b.cache
	for seed := range uint64(3) {
		b.use(seed)
	}
	leased := b.acquire(b.held(7))
	b.later.Add(int64(time.Hour))
	b.reloadAbove(2 * perBuild)
	require.Len(t, b.list(), 4)

	place, err := c.Store.Reserve(ctx, 1, true, perBuild)
	require.NoError(t, err)
	require.Equal(t, leased.Build.ID, b.list()[0].Build.ID)
	now := b.account()
	require.LessOrEqual(t, now.Counted(), int64(2*perBuild), "above it by this one at most")
	for _, g := range c.index.Journal.Tombstones(nil) {
		require.Contains(t, g.Reason, "to free space (budget): least valuable for its size")
	}
	require.Len(t, c.index.Journal.Tombstones(nil), 4-len(b.list()),
		"each eviction has its tombstone")
	before := b.reserved()
	_, err = c.Store.Reserve(ctx, 1, true, perBuild)
	require.Equal(t, apierr.NoSpace, apierr.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "; remaining: 1 build of 8.0 KiB: in use")
	require.Equal(t, before, b.reserved())
	place.Release()
	require.NoError(t, leased.View.Close())
}

// Reservations at the same time take turns in evicting: what one evicts, another does not evict
// again, and none of them is admitted above the budget by more than one artefact.
func TestReservationsShareEvictions(t *testing.T) {
	b := newBench(t)
	for seed := range uint64(12) {
		b.use(seed)
	}
	b.later.Add(int64(time.Hour))
	const budget = 8 * perBuild
	b.reloadAbove(budget)
	var group errgroup.Group
	for range 6 {
		group.Go(func() error {
			_, err := b.cache.Store.Reserve(context.Background(), 1, true,
				perBuild-store.ManifestNeed)
			return err
		})
	}
	require.NoError(t, group.Wait())
	reserved := b.reserved()
	require.EqualValues(t, 6*perBuild, reserved)
	now := b.account()
	require.LessOrEqual(t, now.Counted()+reserved, int64(budget+perBuild))
}

// reloadAbove sets a budget, and keeps the collector's own goroutine from its rounds: it leaves
// them to the reservations that wait.
func (b *bench) reloadAbove(budget int64) {
	b.Helper()
	_, done := b.cache.Store.Ledger().CountLacking(0, 0)
	b.Cleanup(done)
	next := b.options()
	next.Space = store.SpaceOptions{Budget: store.Amount{Bytes: budget}}
	require.NoError(b, b.cache.Reload(next))
}

func TestPinnedBuildsFillTheBudget(t *testing.T) {
	t.Parallel() // it waits
	const budget = 3 * perBuild
	b := newBenchWith(t, withSpace(store.SpaceOptions{Budget: store.Amount{Bytes: budget}}))
	for seed := range uint64(3) {
		a := b.use(seed)
		_, err := b.cache.Pin(context.Background(), request.Peer{UID: b.cache.uid},
			[]string{a.Build.BuildKey.String()}, false)
		require.NoError(t, err)
	}
	b.use(7)
	b.within(budget)
	require.Len(t, b.list(), 3, "the pinned ones")
}

func TestTheFloorStaysFree(t *testing.T) {
	b := newBenchWith(t, withSpace(store.SpaceOptions{Floor: store.Amount{Percent: 100}}))
	a := b.use(1)
	require.Contains(t, a.Warnings[0], "must stay free")
	require.Empty(t, b.list())
}

func TestUnusedBuildsAreEvicted(t *testing.T) {
	b := newBenchWith(t, withSpace(store.SpaceOptions{MaxUnused: 48 * time.Hour}))
	b.use(1)
	for range 3 {
		b.plan(-1)
		b.later.Add(int64(47 * time.Hour / 3))
	}
	b.use(2)
	b.plan(-1)
	b.later.Add(int64(2 * time.Hour))
	b.cache.Store.Ledger().WakeCollector()
	require.Eventually(t, func() bool { return len(b.list()) == 1 }, soon, time.Millisecond)
	tombstones := b.cache.index.Journal.Tombstones(nil)
	require.Len(t, tombstones, 1)
	require.Contains(t, tombstones[0].Reason, "longer than max_unused (2d)")
}

// A clock that was never set, or jumps by years, makes no build too old, and keeps none from being
// served. After that builds get old as before, used with whatever clock.
func TestClockJumpsEvictNothing(t *testing.T) {
	b := newBenchWith(t, withSpace(store.SpaceOptions{MaxUnused: 48 * time.Hour}))
	b.plan(-1)
	b.use(1)
	jump := func(to time.Time) {
		b.later.Store(int64(time.Until(to)))
		require.Empty(t, b.plan(-1).Steps)
		require.Equal(t, request.Hit, b.use(1).Outcome)
	}
	now, unset := time.Now(), time.Unix(60, 0)
	jump(now.AddDate(30, 0, 0))
	jump(now)
	jump(unset)
	b.use(2) // made and used only then
	jump(unset.Add(time.Hour))
	b.reopen()
	jump(now.Add(time.Hour))
	for range 3 {
		b.later.Add(int64(20 * time.Hour))
		require.Len(t, b.list(), 2)
		require.Equal(t, request.Hit, b.use(1).Outcome)
		b.plan(-1)
	}
	b.collect(b.plan(-1))
	require.Len(t, b.list(), 1, "the other one is too old by now")
	require.Equal(t, request.Hit, b.use(1).Outcome)
}

// A user's quota is for that user's builds alone.
func TestAQuotaTakesFromItsUserAlone(t *testing.T) {
	b := newBench(t)
	size := int64(0)
	for _, f := range b.use(100).Build.Files {
		size += f.Size
	}
	next := b.options()
	next.Space = store.SpaceOptions{UserBytes: store.Amount{Bytes: 3*size + size/2}}
	require.NoError(t, b.cache.Reload(next))
	for seed := range uint64(5) {
		r := b.held(seed)
		r.Peer, r.Store = request.Peer{UID: b.cache.uid + 1}, "user"
		require.NoError(t, b.acquire(r).View.Close())
	}
	own := func() (n int) {
		for _, l := range b.list() {
			if l.Build.UID == b.cache.uid+1 {
				n++
			}
		}
		return n
	}
	// A build that was answered without being stored may be kept only now, and another one is
	// evicted for it. A list that began before the eviction may still have that.
	require.Eventually(t,
		func() bool { return b.cache.jobs.Count() == 0 && own() == 3 && len(b.list()) == 4 }, soon,
		time.Millisecond)
	require.Len(t, b.list(), 4, "and the other user's")
	tombstones := b.cache.index.Journal.Tombstones(nil)
	require.NotEmpty(t, tombstones, "its earlier builds made room for the later ones")
	for _, g := range tombstones {
		require.Regexp(t, "(has|would have) more than its quota of", g.Reason)
	}
	r := b.held(50)
	r.Peer, r.Store = request.Peer{UID: b.cache.uid + 1}, "user"
	next.Space.UserBytes = store.Amount{Bytes: size / 2}
	require.NoError(t, b.cache.Reload(next))
	a := b.acquire(r)
	require.Contains(t, a.Warnings[0], fmt.Sprintf("uid %d has", b.cache.uid+1))
}

func TestAnotherBudgetIsKeptToAtOnce(t *testing.T) {
	b := newBench(t)
	for seed := range uint64(5) {
		b.use(seed)
	}
	next := b.options()
	next.Space = store.SpaceOptions{Budget: store.Amount{Bytes: 3 * perBuild}}
	require.NoError(t, b.cache.Reload(next))
	b.within(3 * perBuild)
}
