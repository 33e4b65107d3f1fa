package cache

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

func (b *bench) usage(p request.Peer, entries ...string) *wire.UsageReply {
	b.Helper()
	u, err := b.cache.Queries.Usage(context.Background(), p, &wire.Usage{Entries: entries}, nil)
	require.NoError(b, err)
	require.Empty(b, u.Next)
	return u
}

// The account is what the file system says, whatever happens.
func (b *bench) exact() {
	b.Helper()
	found, err := b.cache.Check(context.Background(), request.Peer{UID: b.cache.uid},
		&wire.Check{Space: true}, nil)
	require.NoError(b, err)
	require.Empty(b, found.Findings)
	for _, l := range found.Space {
		if l.AccountedBytes != nil {
			require.Equal(b, l.DiskBytes, l.GetAccountedBytes(), l.Name)
		}
	}
}

func TestTheAccountIsExact(t *testing.T) {
	b := newBench(t)
	b.exact()
	held := b.acquire(b.held(1))
	b.use(2)
	embedded := b.held(1)
	embedded.Embed = true
	b.acquire(embedded)
	b.exact()
	_, err := b.cache.Remove(context.Background(), request.Peer{UID: b.cache.uid},
		[]string{held.Build.BuildKey.String()}, false, false)
	require.NoError(t, err)
	require.EqualValues(t, 2*cas.Block, b.account().UnlinkedOpen)
	b.exact()
	b.reopen()
	require.Eventually(t, func() bool { return b.account().UnlinkedOpen == 2*cas.Block }, soon,
		time.Millisecond, "found again soon after the start")
	b.exact()
	require.NoError(t, held.View.Close())

	<-b.cache.sweptUnpacked // a start removes strangers
	stranger := filepath.Join(b.state, "objects", "ab", "ab"+held.ModelDigest.String()[2:])
	require.NoError(t, os.MkdirAll(filepath.Dir(stranger), 0o700))
	require.NoError(t, os.WriteFile(stranger, make([]byte, 5000), 0o444))
	found, err := b.cache.Check(context.Background(), request.Peer{UID: b.cache.uid},
		&wire.Check{Space: true}, nil)
	require.NoError(t, err)
	require.EqualValues(t, 2*cas.Block, found.Space[0].DiskBytes-found.Space[0].GetAccountedBytes(),
		"%v", found.Space[0])
	require.Len(t, found.Findings, 1)
	require.Equal(t,
		[]string{"space", filepath.Base(stranger),
			"8192 bytes on disk that no build needs; the next start removes them"},
		[]string{found.Findings[0].Kind, found.Findings[0].Object, found.Findings[0].Detail})
	require.NoError(t, os.Remove(stranger))
	_, err = b.cache.Check(context.Background(), request.Peer{UID: b.cache.uid + 1},
		&wire.Check{Space: true}, nil)
	require.Equal(t, apierr.NotAllowed, apierr.ClassOf(err))
}

// A sparse file takes less than its size, and counts so.
func TestHolesCountNothing(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.KeepSource = build.KeepCopy })
	a := b.use(1)
	require.Len(t, a.Build.Source.Files, 1)
	b.exact()
	d := a.Build.Source.Files[0].Digest
	require.NoError(t, b.cache.cas.Quarantine(d, "a test"))
	require.NoError(t, b.cache.index.Remeasure(d))
	b.exact()
	b.use(1)
}

func TestUsageReportsOwnAndSharedBytes(t *testing.T) {
	b := newBench(t)
	one := b.use(1).Build
	two := b.use(2).Build
	u := b.usage(request.Peer{UID: b.cache.uid})
	require.Len(t, u.Builds, 2)
	for _, l := range u.Builds {
		require.EqualValues(t, 2*cas.Block, l.OwnBytes+l.SharedBytes)
		require.EqualValues(t, 2*cas.Block, l.OwnBytes, "nothing is shared")
	}
	require.Len(t, u.Users, 1)
	logical := one.Files[0].Size + one.Files[1].Size + two.Files[0].Size + two.Files[1].Size
	want := &wire.UsageSum{Name: rights.OwnScope(request.Peer{UID: b.cache.uid}), Builds: 2,
		LogicalBytes: logical, OwnBytes: 4 * cas.Block, DiskBytes: 4 * cas.Block}
	require.True(t, proto.Equal(want, u.Users[0]), "%v", u.Users[0])
	require.Len(t, u.Eps, 1)

	// The same model for another user's own: equal bytes, kept once.
	r := b.held(1)
	r.Peer, r.Store = request.Peer{UID: b.cache.uid + 1}, "user"
	r.OnMiss = request.Refresh
	own := b.acquire(r).Build
	require.Equal(t, one.Files, own.Files, "the stand-in makes the same bytes of the same model")
	u = b.usage(request.Peer{UID: b.cache.uid}, own.ID.String(), one.ID.String())
	require.Len(t, u.Builds, 2)
	for _, l := range u.Builds {
		require.Zero(t, l.OwnBytes)
		require.EqualValues(t, 2*cas.Block, l.SharedBytes)
	}
	require.Len(t, u.Shared, 2)
	all := one.Files[0].Size + one.Files[1].Size
	require.Equal(t, all, u.SharedBytes)
	require.Less(t, b.usage(request.Peer{UID: b.cache.uid}, two.ID.String(), one.ID.String()).
		SharedBytes, all, "another model is another")

	u = b.usage(r.Peer)
	require.Len(t, u.Builds, 1, "others' are not listed")
	require.EqualValues(t, 2*cas.Block, u.Builds[0].OwnBytes, "nor what they share")
	_, err := b.cache.Queries.Usage(context.Background(), r.Peer, &wire.Usage{After: "x-1"}, nil)
	require.Equal(t, apierr.BadRequest, apierr.ClassOf(err))
}

// Builds that are evicted and soon recompiled show that the budget is too small, and which one
// would do.
func TestThrashingIsSeen(t *testing.T) {
	const budget = 2 * perBuild
	b := newBenchWith(t, withSpace(store.SpaceOptions{Budget: store.Amount{Bytes: budget}}))
	const seen = "entries that were evicted in the last 7 days 5 were compiled again"
	var advice []query.Advice
	// where the collector is late a build is not kept, and does not count
	for round := 0; round < 3 || !strings.Contains(advice[0].Text, seen); round++ {
		require.Less(t, round, 100, "%v", advice)
		for seed := range uint64(5) {
			b.use(seed)
			b.within(budget)
			b.later.Add(int64(time.Second))
		}
		advice = b.cache.Queries.Doctor().SpaceAdvice(b.self())
	}
	require.Equal(t, query.SeverityWarning, advice[0].Severity)
	require.Contains(t, advice[0].Hint, "the budget is too small: ")
	next := b.options()
	// what the hint says, and manifests
	next.Space.Budget = store.Amount{Bytes: budget + b.cache.Queries.Doctor().Thrashing().
		Bytes + 5*cas.Block}
	require.NoError(t, b.cache.Reload(next))
	for seed := range uint64(5) {
		b.use(seed)
	}
	before := b.compiler.Compiles.Load()
	for seed := range uint64(5) {
		b.use(seed)
	}
	require.Equal(t, before, b.compiler.Compiles.Load(),
		"with the budget of the hint nothing is compiled twice")
	b.later.Add(int64(8 * 24 * time.Hour))
	require.Equal(t, query.SeverityOK, b.cache.Queries.Doctor().SpaceAdvice(b.self())[0].Severity)
}

// Removals by request or for a user's quota do not count as evictions for the budget.
func TestEvictionsThatTheBudgetDidNotAskForAreNoThrashing(t *testing.T) {
	b := newBenchWith(t, withSpace(store.SpaceOptions{Budget: store.Amount{Bytes: 100 * perBuild}}))
	again := func() {
		for seed := range uint64(5) {
			b.use(seed)
		}
		b.later.Add(int64(time.Hour))
	}
	again()
	b.collect(b.plan(0))
	require.Empty(t, b.list())
	again()
	next := b.options()
	next.Space.UserBytes = store.Amount{Bytes: 1}
	require.NoError(t, b.cache.Reload(next))
	require.Eventually(t, func() bool { return len(b.list()) == 0 }, patience, time.Millisecond,
		"the daemon collects by itself")
	next.Space.UserBytes = store.Amount{}
	require.NoError(t, b.cache.Reload(next))
	again()
	require.Len(t, b.cache.index.Journal.Tombstones(nil), 10)
	require.Zero(t, b.cache.Queries.Doctor().Thrashing())
	require.Equal(t, query.SeverityOK, b.cache.Queries.Doctor().SpaceAdvice(b.self())[0].Severity)
}

// A blob in the quarantine is no misaccounted space though a client still holds a view of it.
func TestTheAccountIsExactAfterAQuarantine(t *testing.T) {
	b := newBench(t)
	held := b.acquire(b.held(1))
	b.exact()
	require.NoError(t, b.cache.Store.Repair(context.Background(),
		held.Build.Files[1].Digest, "a test"))
	b.exact()
	require.NoError(t, held.View.Close())
	b.exact()
}
