package cache

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/views"
)

func TestSecondRequestHits(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Compiled, first.Outcome)
	second := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, second.Outcome)
	require.Equal(t, first.RequestKey, second.RequestKey)
	require.Equal(t, b.read(first), b.read(second))
	require.Equal(t, compilers.Optimal, second.Compatibility.Verdict)
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

func TestHitSurvivesRestart(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	files := b.read(first)
	b.reopen()
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, again.Outcome)
	require.Equal(t, files, b.read(again))
	require.Equal(t, first.Graph, again.Graph,
		"the view of the earlier run is sound, and serves on")
	require.EqualValues(t, 1, b.compiler.Fingerprints.Load(), "what was probed outlives the daemon")
}

func TestOnMiss(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.OnMiss = request.Fail
	require.Equal(t, apierr.NotFound, b.refused(r).Class)
	r.OnMiss = request.KeyOnly
	status, err := b.cache.Queries.Status(t.Context(), b.self())
	require.NoError(t, err)
	require.Zero(t, status.Misses, "a request that compiles nothing is not a miss")
	key := b.acquire(r)
	require.Equal(t, request.Key, key.Outcome)
	require.Nil(t, key.View)
	require.Contains(t, key.Record, standin.EP)
	r.OnMiss = request.Wait
	first := b.acquire(r)
	require.Equal(t, key.RequestKey, first.RequestKey)
	require.NotZero(t, first.Build.BuildKey)
	r.OnMiss = request.Refresh
	fresh := b.acquire(r)
	require.Equal(t, request.Compiled, fresh.Outcome)
	require.NotEqual(t, first.Graph, fresh.Graph, "a new build has a new view")
	require.Equal(t, b.read(first), b.read(fresh), "who holds the old view goes on with it")
	require.Len(t, b.list(), 1, "the new build has taken the old one's place")
	r.OnMiss = request.Bypass
	alone := b.acquire(r)
	require.Equal(t, request.Compiled, alone.Outcome)
	require.Equal(t, b.read(fresh), b.read(alone))
	require.EqualValues(t, 3, b.compiler.Compiles.Load())
	require.Len(t, b.list(), 1, "nothing of a bypass is kept")
	require.True(t, alone.Unkept)
	require.False(t, first.Unkept)
}

func TestUnkeptBuildIsRemovedWithItsHolder(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.Store = "none"
	a := b.acquire(r)
	require.Empty(t, b.list())
	b.later.Store(int64(time.Hour))
	b.cache.views.Sweep()
	require.NotEmpty(t, b.read(a), "held")
	require.NoError(t, a.View.Close())
	b.cache.views.Sweep()
	require.NoDirExists(t, a.Path)
}

// A client that has only the path of an unkept build has a minute to open it, because each request
// makes another one.
func TestUnkeptBuildIsRemovedAfterAMinute(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.Store, r.KeepsView = "none", false
	a := b.acquire(r)
	require.NoError(t, a.View.Close())
	b.later.Store(int64(views.HandOver - time.Second))
	b.cache.views.Sweep()
	require.DirExists(t, a.Path)
	b.later.Store(int64(views.HandOver + time.Minute))
	b.cache.views.Sweep()
	require.NoDirExists(t, a.Path)
}

func TestAnotherLibraryIsAnotherBuild(t *testing.T) {
	b := newBench(t)
	first := b.acquire(b.request(b.model(1)))
	b.library("2.0")
	second := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Compiled, second.Outcome)
	require.Contains(t, second.Why, "SDK 1.0")
	require.Contains(t, second.Why, "2.0 says of a build")
	require.Contains(t, second.Why, "unsupported")
	require.Equal(t, first.RequestKey, second.RequestKey)
	require.NotEqual(t, first.Build.BuildKey, second.Build.BuildKey)
	b.library("1.0")
	back := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, back.Outcome,
		"the earlier build serves again when the SDK is back")
	require.Equal(t, b.read(first), b.read(back))
}

func TestAskingForTheKeyFirst(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.OnMiss = request.KeyOnly
	b.acquire(r)
	r.OnMiss = request.Wait
	require.NotZero(t, b.acquire(r).Build.BuildKey,
		"a plan that was made for its key lacks the build key")
}
