package cache

import (
	"context"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/upkeep"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/index"
)

// soon bounds what a test waits for.
const soon = time.Minute

// rebuilding is a bench with a cache that rebuilds in the background, with no builds at first.
func rebuilding(t testing.TB, change func(*Options)) *bench {
	return newBenchWith(t, func(o *Options) {
		o.Rebuild = upkeep.RebuildOptions{CPUShare: 1}
		if change != nil {
			change(o)
		}
	})
}

// waitForRebuilds waits until nothing is queued or being made.
func (b *bench) waitForRebuilds() []upkeep.Rebuild {
	b.Helper()
	var left []upkeep.Rebuild
	require.Eventually(b, func() bool {
		left = b.cache.rebuilds.List()
		return !slices.ContainsFunc(left,
			func(r upkeep.Rebuild) bool {
				return r.State == upkeep.Queued ||
					r.State == upkeep.Running
			})
	}, soon, time.Millisecond)
	return left
}

func (b *bench) want(build *index.Build, why string) {
	b.cache.rebuilds.Enqueue(b.cache.recompiler.RebuildRequest(build,
		b.cache.runtimes.All()[0], why, nil))
}

// age makes all builds so old that they may be recompiled for the very same libraries.
func (b *bench) age() { b.later.Add(int64(upkeep.RefreshEvery + time.Hour)) }

// refresh wants a build recompiled though the current libraries made it.
func (b *bench) refresh(build *index.Build) {
	b.refreshWith(build, nil)
}

// refreshWith does so with the files of a request.
func (b *bench) refreshWith(build *index.Build, r *request.Request) {
	w := b.cache.recompiler.RebuildRequest(build, b.cache.runtimes.All()[0], "test", r)
	w.Refresh = true
	b.cache.rebuilds.Enqueue(w)
}

// kinds are the kinds of events in the history of a request, oldest first.
func (b *bench) kinds(key index.RequestKey) []string {
	b.Helper()
	events := b.cache.index.Journal.History(key)
	var out []string
	for _, e := range events {
		if e.Kind != event.Judged {
			out = append(out, e.Kind)
		}
	}
	return out
}

func TestAnotherSDKIsBuiltForInTheBackground(t *testing.T) {
	b := rebuilding(t, nil)
	first := b.acquire(b.request(b.model(1)))
	b.library("2.0")
	b.want(first.Build, "the SDK is 2.0 now")
	require.Empty(t, b.waitForRebuilds())
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, again.Outcome)
	require.Equal(t, "2.0", again.Build.EPs[0].SDKVersion)
	require.Equal(t, first.Build.Scope, again.Build.Scope)
	require.Equal(t, first.Build.UID, again.Build.UID)
	require.Equal(t, []string{"compiled", "rebuild", "rebuilt"}, b.kinds(first.RequestKey))
	require.EqualValues(t, 1, b.compiler.Idle.Load(), "at the lowest priority")
	b.library("1.0")
	require.Equal(t, first.Graph, b.acquire(b.request(b.model(1))).Graph, "the earlier build stays")

	b.want(first.Build, "the SDK is 1.0 now")
	require.Empty(t, b.waitForRebuilds())
	require.EqualValues(t, 2, b.compiler.Compiles.Load(), "what is there is not made again")
}

func TestDamagedBuildIsRecompiled(t *testing.T) {
	t.Parallel() // it waits
	b := rebuilding(t, nil)
	first := b.acquire(b.request(b.model(1)))
	files := b.read(first)
	b.cache.Store.Withhold(first.Build.ID, index.Damaged, "test")
	b.want(first.Build, "it is damaged")
	require.Empty(t, b.waitForRebuilds())
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, again.Outcome)
	require.Equal(t, files, b.read(again))
	require.Len(t, b.list(), 1, "the damaged build is gone")
}

// gate is a compiler with compiles that wait, and are noted.
type gate struct {
	compilers.Compiler
	mu    sync.Mutex
	order []string // the graphs that were to be written
	pass  chan struct{}
	hold  bool
}

func (g *gate) Compile(ctx context.Context, job compilers.Job,
	progress func(string)) (compilers.Result, error) {
	g.mu.Lock()
	g.order = append(g.order, job.Output)
	hold := g.hold
	g.mu.Unlock()
	if hold {
		select {
		case <-g.pass:
		case <-ctx.Done():
			return compilers.Result{}, ctx.Err()
		}
	}
	return g.Compiler.Compile(ctx, job, progress)
}

func (g *gate) holding(hold bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hold = hold
}

func (g *gate) begun() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.order)
}

// gated is a rebuilding bench with a gate.
func gated(t testing.TB, change func(*Options)) (*bench, *gate) {
	g := &gate{pass: make(chan struct{})}
	b := rebuilding(t, func(o *Options) {
		g.Compiler, o.Compiler = o.Compiler, g
		if change != nil {
			change(o)
		}
	})
	return b, g
}

func TestMostUsedFirst(t *testing.T) {
	b, g := gated(t, nil)
	var builds []*index.Build
	for seed := range uint64(4) {
		builds = append(builds, b.acquire(b.request(b.model(seed))).Build)
	}
	for seed, hits := range []int{1, 3, 0, 2} {
		for range hits {
			require.Equal(t, request.Hit, b.acquire(b.request(b.model(uint64(seed)))).Outcome)
		}
	}
	b.acquire(b.request(b.model(3)))
	b.acquire(b.request(b.model(3)))
	b.age()
	g.holding(true)
	b.refresh(builds[2])
	require.Eventually(t, func() bool { return len(g.begun()) == 5 }, soon, time.Millisecond)
	for _, i := range []int{0, 1, 3, 0, 1} {
		b.refresh(builds[i])
	}
	require.Len(t, b.cache.rebuilds.List(), 4, "none is queued twice")
	g.holding(false)
	close(g.pass)
	require.Empty(t, b.waitForRebuilds())
	var order []int
	for _, name := range g.begun()[4:] {
		order = append(order,
			slices.IndexFunc(builds, func(one *index.Build) bool { return one.Graph == name }))
	}
	require.Equal(t, []int{2, 3, 1, 0}, order)
}

func TestRebuildsDoNotBeginWhileARequestWaits(t *testing.T) {
	b, g := gated(t, nil)
	first := b.acquire(b.request(b.model(1)))
	b.age()
	g.holding(true)
	done := make(chan *request.Answer, 1)
	r := b.request(b.model(2))
	go func() {
		defer close(done)
		if a, err := b.cache.Acquire(context.Background(), r, nil); err == nil {
			done <- a
		}
	}()
	require.Eventually(t, func() bool { return len(g.begun()) == 2 }, soon, time.Millisecond)
	b.refresh(first.Build)
	require.Never(t, func() bool { return len(g.begun()) > 2 }, 100*time.Millisecond,
		10*time.Millisecond)
	require.Equal(t, upkeep.Queued, b.cache.rebuilds.List()[0].State)
	g.pass <- struct{}{}
	a := <-done
	require.NotNil(t, a)
	defer a.View.Close()
	g.pass <- struct{}{}
	require.Empty(t, b.waitForRebuilds(), "it goes on by itself when the request has its answer")
}

func TestRequestJoinsARebuildJob(t *testing.T) {
	b, g := gated(t, func(o *Options) { o.Jobs = 1 })
	first := b.acquire(b.request(b.model(1)))
	b.library("2.0")
	g.holding(true)
	b.want(first.Build, "the SDK is 2.0 now")
	require.Eventually(t, func() bool { return len(g.begun()) == 2 }, soon, time.Millisecond)
	require.False(t, b.cache.jobs.Busy())
	answers := make(chan *request.Answer, 2)
	ask := func(seed uint64) {
		r := b.request(b.model(seed))
		go func() {
			a, err := b.cache.Acquire(context.Background(), r, nil)
			if err != nil {
				a = nil
			}
			answers <- a
		}()
	}
	ask(7)
	require.Eventually(t, func() bool { return len(g.begun()) == 3 }, soon, time.Millisecond,
		"the only slot is for requests")
	ask(1)
	require.Eventually(t, func() bool { return b.waiters() == 3 }, soon, time.Millisecond)
	require.Len(t, g.begun(), 3, "the request for the same model joined")
	close(g.pass)
	for range 2 {
		a := <-answers
		require.NotNil(t, a)
		defer a.View.Close()
	}
	require.Empty(t, b.waitForRebuilds())
	require.EqualValues(t, 3, b.compiler.Compiles.Load())
	require.Zero(t, b.compiler.Idle.Load(), "whoever waits makes it urgent")
}

// A rebuild that is wanted during its compile, because the libraries changed in between, need not
// wait as after a failure.
func TestWantedAgainWhileBeingMade(t *testing.T) {
	b, g := gated(t, nil)
	first := b.acquire(b.request(b.model(1)))
	b.age()
	g.holding(true)
	b.refresh(first.Build)
	require.Eventually(t, func() bool { return len(g.begun()) == 2 }, soon, time.Millisecond)
	b.library("2.0")
	_, err := b.cache.runtimes.Content(context.Background(), b.cache.runtimes.All()[0],
		func(string) {})
	require.NoError(t, err)
	b.want(first.Build, "the SDK is 2.0 now")
	g.holding(false)
	close(g.pass)
	require.Empty(t, b.waitForRebuilds())
	require.Len(t, g.begun(), 3)
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
}

func TestWorkWaitsForTheWindow(t *testing.T) {
	now := time.Now()
	b := rebuilding(t, func(o *Options) {
		o.Rebuild.Window = now.Add(3*time.Hour).Format("15:04") + "-" + now.Add(5*time.Hour).
			Format("15:04")
	})
	first := b.acquire(b.request(b.model(1)))
	b.age()
	b.refresh(first.Build)
	require.Never(t, func() bool { return b.compiler.Compiles.Load() > 1 }, 100*time.Millisecond,
		10*time.Millisecond)
	require.Equal(t, upkeep.Queued, b.cache.rebuilds.List()[0].State)
	b.later.Add(int64(3 * time.Hour))
	b.cache.rebuilds.Wake()
	require.Empty(t, b.waitForRebuilds())
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
}

func TestShareOfTheProcessor(t *testing.T) {
	b := rebuilding(t, func(o *Options) { o.Rebuild.CPUShare = 0.25 })
	builds := []*index.Build{b.acquire(b.request(b.model(1))).Build,
		b.acquire(b.request(b.model(2))).Build}
	b.compiler.CPUSeconds = 600
	b.age()
	b.refresh(builds[0])
	require.Empty(t, b.waitForRebuilds())
	b.refresh(builds[1])
	rebuildCount := func() int { return len(b.cache.rebuilds.List()) }
	b.later.Add(int64(2390 * time.Second))
	b.cache.rebuilds.Wake()
	require.Never(t, func() bool { return rebuildCount() == 0 }, 100*time.Millisecond,
		10*time.Millisecond,
		"600 s of four times as many")
	b.later.Add(int64(10 * time.Second))
	b.cache.rebuilds.Wake()
	require.Empty(t, b.waitForRebuilds())
	require.EqualValues(t, 4, b.compiler.Compiles.Load())
}

func TestFailedRebuildIsRetriedAFewTimes(t *testing.T) {
	b := rebuilding(t, nil)
	first := b.acquire(b.request(b.model(1)))
	rt := b.cache.runtimes.All()[0]
	b.age()
	b.compiler.Fault = standin.Refuse
	want := func() { b.refresh(first.Build) }
	want()
	tried := func(n int64) {
		t.Helper()
		require.Eventually(t, func() bool {
			return b.compiler.Compiles.Load() == 1+n &&
				b.cache.rebuilds.List()[0].State != upkeep.Running
		}, soon, time.Millisecond)
	}
	tried(1)
	for i, pause := range []time.Duration{time.Minute, 10 * time.Minute} {
		wait := b.cache.rebuilds.List()[0].After.Sub(b.cache.now())
		require.InDelta(t, pause.Seconds(), wait.Seconds(), 30)
		b.later.Add(int64(pause))
		b.cache.rebuilds.Wake()
		tried(int64(i) + 2)
	}
	left := b.waitForRebuilds()
	require.Len(t, left, 1)
	require.Equal(t, upkeep.Failed, left[0].State)
	require.Contains(t, left[0].Text, "told to refuse")
	b.later.Add(int64(time.Hour))
	want()
	b.waitForRebuilds()
	tried(3)
	require.Equal(t, upkeep.Failed, b.cache.rebuilds.List()[0].State,
		"not again for the same libraries")
	b.compiler.Fault = standin.None
	b.library("3.0")
	_, err := b.cache.runtimes.Content(context.Background(), rt, func(string) {})
	require.NoError(t, err)
	want()
	require.Empty(t, b.waitForRebuilds())
	require.Equal(t, request.Hit, b.acquire(b.request(b.model(1))).Outcome)
}

func TestARefreshIsNoLoop(t *testing.T) {
	b := rebuilding(t, nil)
	a := b.acquire(b.request(b.model(1)))
	refresh := func() {
		w := b.cache.recompiler.RebuildRequest(b.acquire(b.request(b.model(1))).Build, nil,
			"not the best",
			nil)
		w.Refresh = true
		b.cache.rebuilds.Enqueue(w)
		require.Empty(t, b.waitForRebuilds())
	}
	refresh()
	require.EqualValues(t, 1, b.compiler.Compiles.Load(), "it is of today")
	b.later.Store(int64(25 * time.Hour))
	refresh()
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
	refresh()
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
	require.NotEqual(t, a.Graph, b.acquire(b.request(b.model(1))).Graph)
}

func TestSourceThatChanged(t *testing.T) {
	b := rebuilding(t, nil)
	graph := b.model(1)
	first := b.acquire(b.request(graph))
	require.Equal(t, index.Source{Kind: index.SourceReference, Path: graph.Name()},
		first.Build.Source)
	require.NoError(t, os.WriteFile(graph.Name(), compilertest.Dense(2, 8, 1), 0o644))
	b.library("2.0")
	b.want(first.Build, "the SDK is 2.0 now")
	left := b.waitForRebuilds()
	require.Len(t, left, 1)
	require.Equal(t, upkeep.Waiting, left[0].State)
	require.Equal(t, `the source model at "`+graph.Name()+`" has changed`, left[0].Text)
	require.Equal(t, []string{"compiled", "not rebuilt"}, b.kinds(first.RequestKey))
	b.want(first.Build, "again")
	require.Equal(t, upkeep.Waiting, b.cache.rebuilds.List()[0].State,
		"not looked for with each hit")

	asked := b.request(b.model(1))
	b.cache.rebuilds.Enqueue(b.cache.recompiler.RebuildRequest(first.Build, nil,
		"requested", asked))
	require.Empty(t, b.waitForRebuilds(), "a request brings it")
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
}

func TestRebuildServesWaitingRequests(t *testing.T) {
	b := rebuilding(t, func(o *Options) { o.KeepSource = build.KeepNone })
	first := b.acquire(b.request(b.model(1)))
	require.Equal(t, index.Source{Why: index.WhySwitchedOff}, first.Build.Source)
	b.library("2.0")
	b.want(first.Build, "the SDK is 2.0 now")
	require.Equal(t, upkeep.Waiting, b.waitForRebuilds()[0].State)
	require.Equal(t, []string{"compiled"}, b.kinds(first.RequestKey))
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
	require.Empty(t, b.cache.rebuilds.List())
}

func TestCloseInTheMiddle(t *testing.T) {
	b, g := gated(t, nil)
	first := b.acquire(b.request(b.model(1)))
	b.age()
	g.holding(true)
	b.refresh(first.Build)
	require.Eventually(t, func() bool { return len(g.begun()) == 2 }, soon, time.Millisecond)
	b.close()
	g.holding(false)
	b.open()
	require.Empty(t, b.cache.rebuilds.List())
	require.Equal(t, []string{"compiled", "rebuild"}, b.kinds(first.RequestKey))
	entries, err := os.ReadDir(b.state + "/staging")
	require.NoError(t, err)
	require.Empty(t, entries)
	b.refresh(first.Build)
	require.Empty(t, b.waitForRebuilds())
	require.NotEqual(t, first.Build.ID, b.list()[0].Build.ID)
}
