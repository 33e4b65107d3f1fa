package cache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
)

// failing is a request for a model that fails in the given way.
func (b *bench) failing(seed uint64, how standin.Fault) *request.Request {
	r := b.request(b.model(seed))
	fault(how)(r)
	return r
}

func (b *bench) failures(p request.Peer) []failure.Failure {
	list, err := b.cache.JobList.Failures(context.Background(), p)
	require.NoError(b, err)
	return list
}

// waits moves the clock on.
func (b *bench) waits(d time.Duration) { b.later.Add(int64(d)) }

func TestFailureReasons(t *testing.T) {
	cases := map[standin.Fault]struct {
		reason   failure.Reason
		facts    map[string]string
		says     string
		hint     string
		compiles int64
	}{
		standin.Crash: {failure.Crash, map[string]string{"signal": "SIGSEGV", "exit": "-1"},
			"compiler crashed (SIGSEGV)", "", 2},
		standin.Killed: {failure.WorkerDied, map[string]string{"signal": "SIGKILL"}, "killed", "",
			2},
		standin.Refuse: {failure.Refused, map[string]string{"code": "1"}, "told to refuse", "",
			1},
		standin.NoNodes: {failure.NoNode, nil, "took no node", "use the model as it is", 1},
		standin.Garbage: {failure.Invalid, nil, "graph", "", 1},
		standin.Links:   {failure.Invalid, nil, "link.bin", "", 1},
		standin.Huge:    {failure.OutputLimit, nil, "output limit reached", "[limits]", 1},
		standin.Hang:    {failure.Timeout, nil, "time limit reached", "[limits]", 1},
		standin.Mutilate: {failure.LoadCheck, map[string]string{"code": "10"}, "does not load", "",
			1},
	}
	for how, c := range cases {
		t.Run(string(how), func(t *testing.T) {
			b := newBench(t)
			b.compiler.Limits = compilers.Limits{Wall: 50 * time.Millisecond, Output: 1 << 20}
			e := b.refused(b.failing(1, how))
			require.Equal(t, apierr.CompileFailed, e.Class)
			require.Equal(t, c.reason, failure.FromError(e).Reason)
			require.Equal(t, string(c.reason), e.Facts["reason"])
			for key, value := range c.facts {
				require.Equal(t, value, e.Facts[key], key)
			}
			require.Contains(t, e.Text, c.says)
			require.Contains(t, e.Hint, c.hint)
			require.Equal(t, c.compiles, b.compiler.Compiles.Load(), "who died is tried once more")
		})
	}
}

func TestFailureIsAnsweredFromTheNegativeCache(t *testing.T) {
	b := newBench(t)
	first := b.refused(b.failing(1, standin.Crash))
	again := b.refused(b.failing(1, standin.Crash))
	require.EqualValues(t, 2, b.compiler.Compiles.Load(),
		"one crash, and one try more, of the first request")
	require.Equal(t, first.Class, again.Class)
	for key, value := range first.Facts {
		require.Equal(t, value, again.Facts[key], key)
	}
	require.Contains(t, again.Text, "failed once, last at ")
	require.Contains(t, again.Text, failure.FromError(first).Text)
	require.Equal(t, "1", again.Facts["failed"])
	require.Contains(t, again.Hint, "epcachectl jobs retry "+again.Facts["request_key"][:16])
	events, err := b.cache.Queries.Events(context.Background(), b.self(), time.Time{}, 0)
	require.NoError(t, err)
	require.Equal(t, []string{event.Failed}, entryKinds(events.Events),
		"what is answered from memory is no event")
}

// A failure that a wrong clock has dated keeps no model from being compiled, across restarts too.
func TestFailuresOutliveNoClockJump(t *testing.T) {
	b := newBench(t)
	tries := int64(0)
	for _, years := range []int{30, -20, 0} {
		b.later.Store(int64(time.Until(time.Now().AddDate(years, 0, 0))))
		b.reopen()
		for range 2 {
			b.refused(b.failing(1, standin.Refuse))
		}
		tries++
		require.Equal(t, tries, b.compiler.Compiles.Load(), "once for each clock")
	}
}

func TestCrashesAreTriedLaterAndLater(t *testing.T) {
	b := newBench(t)
	tries := int64(0)
	for _, pause := range []time.Duration{time.Minute, 2 * time.Minute, 4 * time.Minute} {
		b.refused(b.failing(1, standin.Crash))
		tries += 2
		require.Equal(t, tries, b.compiler.Compiles.Load())
		b.waits(pause - 5*time.Second)
		b.refused(b.failing(1, standin.Crash))
		require.Equal(t, tries, b.compiler.Compiles.Load(), "too early")
		b.waits(10 * time.Second)
	}
	require.Equal(t, 3, b.failures(b.self())[0].Count)
}

// All waiters of a compile get the same error after its worker died twice.
func TestAllWaitersGetTheFailure(t *testing.T) {
	b := newBench(t)
	b.compiler.Delay = 200 * time.Millisecond
	texts := make([]string, 16)
	var wg sync.WaitGroup
	for i := range texts {
		r := b.failing(1, standin.Killed)
		wg.Go(func() {
			_, err := b.cache.Acquire(context.Background(), r, nil)
			var e *apierr.Error
			if errors.As(err, &e) {
				texts[i] = e.Facts["reason"] + " " + failure.FromError(e).Text
			}
		})
	}
	wg.Wait()
	for _, text := range texts {
		require.Equal(t, texts[0], text)
		require.Contains(t, text, "worker died")
	}
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
}

func TestFailuresOutliveTheDaemon(t *testing.T) {
	b := newBench(t)
	b.refused(b.failing(1, standin.NoNodes))
	before := b.failures(b.self())
	b.reopen()
	require.Equal(t, before[0].Facts, b.failures(b.self())[0].Facts)
	e := b.refused(b.failing(1, standin.NoNodes))
	require.Contains(t, e.Text, "took no node")
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

// Unreadable rows are dropped, and do not prevent the start.
func TestDamagedFailuresAreDropped(t *testing.T) {
	b := newBench(t)
	b.refused(b.failing(1, standin.Refuse))
	rows, err := b.cache.index.Failures.All()
	require.NoError(t, err)
	require.Len(t, rows, 1)
	for key, raw := range rows {
		require.NoError(t, b.cache.index.Failures.Save([]byte("another"), raw))
		require.NoError(t, b.cache.index.Failures.Save([]byte(key), raw[:len(raw)/2]))
	}
	b.reopen()
	require.Empty(t, b.failures(b.self()))
	rows, err = b.cache.index.Failures.All()
	require.NoError(t, err)
	require.Empty(t, rows)
}

func TestAnotherConfigurationIsTried(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Conditions = "wall 1 s" })
	b.refused(b.failing(1, standin.Refuse))
	b.close()
	b.change = func(o *Options) { o.Conditions = "wall 2 s" }
	b.open()
	require.Empty(t, b.failures(b.self()))
	b.refused(b.failing(1, standin.Refuse))
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
}

func TestAnotherLibraryIsTried(t *testing.T) {
	b := newBench(t)
	b.refused(b.failing(1, standin.Refuse))
	b.library("2.0")
	b.refused(b.failing(1, standin.Refuse))
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
	b.waits(49 * time.Hour)
	b.cache.failures.Sweep()
	require.Empty(t, b.failures(b.self()), "what is of a library that is gone goes")
}

func TestRetry(t *testing.T) {
	b := newBench(t)
	e := b.refused(b.failing(1, standin.Refuse))
	key := failure.FromError(e).RequestKey.String()
	retry := func(p request.Peer, names ...string) ([]failure.Failure, error) {
		return b.cache.JobList.Retry(context.Background(), p, names, false)
	}
	_, err := retry(b.self(), "other.onnx")
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
	_, err = retry(request.Peer{UID: 2001}, key)
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err), "who never asked knows nothing of it")
	require.Len(t, b.failures(b.self()), 1)
	for i, name := range []string{"model.onnx", key[:16], failure.FromError(e).BuildKey.String(),
		failure.FromError(e).ModelDigest.String()[:8]} {
		gone, err := retry(b.self(), name)
		require.NoError(t, err)
		require.Len(t, gone, 1)
		b.refused(b.failing(1, standin.Refuse))
		require.EqualValues(t, i+2, b.compiler.Compiles.Load())
	}
	b.refused(b.failing(2, standin.Refuse))
	gone, err := b.cache.JobList.Retry(context.Background(), b.self(), nil, true)
	require.NoError(t, err)
	require.Len(t, gone, 2)
	require.Empty(t, b.failures(b.self()))
}

func TestFailuresCountInTheirScope(t *testing.T) {
	b := newBench(t)
	alice, bob := request.Peer{UID: 2001}, request.Peer{UID: 2002}
	ask := func(p request.Peer, change ...func(*request.Request)) {
		r := b.failing(1, standin.Refuse)
		r.Peer, r.Store = p, "user"
		for _, ch := range change {
			ch(r)
		}
		b.refused(r)
	}
	ask(alice)
	require.Empty(t, b.failures(bob))
	ask(bob)
	require.EqualValues(t, 2, b.compiler.Compiles.Load(),
		"what failed for one may be that user's fault")
	ask(alice)
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
	carol, dave := request.Peer{UID: 2003}, request.Peer{UID: 2004}
	shared := func(r *request.Request) { r.Store = "" }
	ask(carol, shared)
	ask(dave, shared, func(r *request.Request) { r.Name = "mine.onnx" })
	require.EqualValues(t, 3, b.compiler.Compiles.Load(),
		"what everybody may have fails for everybody")
	require.Equal(t, "mine.onnx", b.failures(dave)[0].ModelName, "others' names are theirs")
	ask(dave, shared, func(r *request.Request) { r.OnMiss = request.Refresh })
	require.EqualValues(t, 3, b.compiler.Compiles.Load(),
		"a refresh is for who asked first, and administrators")
	ask(carol, shared, func(r *request.Request) { r.OnMiss = request.Refresh })
	require.EqualValues(t, 4, b.compiler.Compiles.Load())
	ask(dave, func(r *request.Request) { r.OnMiss = request.Bypass })
	require.EqualValues(t, 5, b.compiler.Compiles.Load(), "a bypass asks no memory")
	require.Len(t, b.failures(b.self()), 3)
}

func TestSuccessForgetsFailures(t *testing.T) {
	b := newBench(t)
	b.compiler.Fault = standin.Crash
	b.refused(b.request(b.model(1)))
	require.Len(t, b.failures(b.self()), 1)
	b.compiler.Fault = standin.None
	b.waits(2 * time.Minute)
	require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
	require.Empty(t, b.failures(b.self()))
}

func TestExplanationsTellOfFailures(t *testing.T) {
	b := newBench(t)
	b.refused(b.failing(1, standin.Refuse))
	r := b.failing(1, standin.Refuse)
	r.OnMiss = request.Explain
	e := b.acquire(r).Explanation
	require.Equal(t, query.Failed, e.Decision)
	require.Contains(t, e.Reason, "told to refuse")
	require.Contains(t, e.Reason, "not retried before")
	require.NotContains(t, e.Reason, "never compiled")
	why, err := b.cache.Queries.Why(context.Background(), b.self(), "model.onnx")
	require.NoError(t, err)
	require.Equal(t, query.Failed, why.Decision)
	require.Contains(t, why.Reason, "told to refuse")
	r.OnMiss = request.Fail
	miss := b.refused(r)
	require.Equal(t, apierr.NotFound, miss.Class)
	require.Contains(t, miss.Text, "told to refuse")
	require.Equal(t, "refused", miss.Facts["reason"])
}

// A machine on which nothing compiles says nothing of models.
func TestBrokenSandboxIsNoModelsFault(t *testing.T) {
	for _, how := range []standin.Fault{standin.Crash, standin.Refuse, standin.NoNodes,
		standin.Killed} {
		t.Run(string(how), func(t *testing.T) {
			b := newBench(t)
			b.compiler.Fault, b.compiler.Broken = how, true
			e := b.refused(b.request(b.model(1)))
			require.Equal(t, apierr.Unavailable, e.Class)
			require.Equal(t, string(failure.Sandbox), e.Facts["reason"])
			require.Contains(t, e.Hint, "epcachectl doctor")
			require.Empty(t, b.failures(b.self()))
			b.compiler.Broken, b.compiler.Fault = false, standin.None
			require.Equal(t, request.Compiled, b.acquire(b.request(b.model(1))).Outcome)
		})
	}
}

func TestOneModelDoesNotWashOutTheHistory(t *testing.T) {
	b := newBench(t)
	for range 20 {
		r := b.failing(1, standin.Refuse)
		r.OnMiss = request.Bypass
		b.refused(r)
	}
	events, err := b.cache.Queries.Events(context.Background(), b.self(), time.Time{}, 0)
	require.NoError(t, err)
	require.Equal(t, []string{event.Failed}, entryKinds(events.Events))
}

// A model that the execution provider refuses it refuses an application too; one that reached the
// daemon's limits the application may try.
func TestClaimAfterRememberedFailure(t *testing.T) {
	b := newBench(t)
	b.compiler.Limits = compilers.Limits{Wall: 50 * time.Millisecond}
	claim := func(seed uint64, how standin.Fault) (*request.Answer, error) {
		r := b.failing(seed, how)
		b.refused(r)
		r.OnMiss, r.Connection = request.ForClaim, t.Context()
		return b.cache.Acquire(context.Background(), r, nil)
	}
	_, err := claim(1, standin.NoNodes)
	require.Equal(t, apierr.CompileFailed, apierr.ClassOf(err))
	require.ErrorContains(t, err, "failed once")
	a, err := claim(2, standin.Hang)
	require.NoError(t, err)
	require.Equal(t, request.Claimed, a.Outcome)
	require.NoError(t, b.cache.Claims.GiveUp(b.self(), a.Claim.ID, "", 0))
}

func TestRememberedFailureIsNotQueued(t *testing.T) {
	b := newBench(t)
	b.refused(b.failing(1, standin.Refuse))
	r := b.failing(1, standin.Refuse)
	r.OnMiss = request.Background
	require.Contains(t, b.refused(r).Text, "failed once")
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

// How long failures are remembered may be changed while the daemon runs.
func TestFailureOptionsAreReloaded(t *testing.T) {
	b := newBench(t)
	b.refused(b.failing(1, standin.Refuse))
	o := b.options()
	o.Failures = failure.Options{Refused: time.Hour}
	require.NoError(t, b.cache.Reload(o))
	b.refused(b.failing(2, standin.Refuse))
	b.waits(time.Hour + time.Second)
	b.refused(b.failing(2, standin.Refuse))
	require.EqualValues(t, 3, b.compiler.Compiles.Load())
}

func TestClassesOfReasons(t *testing.T) {
	for name, c := range map[string]struct {
		err    error
		reason failure.Reason
		class  apierr.Class
	}{
		"no worker": {fmt.Errorf("%w: no such file", compilers.ErrStart),
			failure.NoWorker, apierr.Unavailable},
		"processor time": {fmt.Errorf("x: %w: 1s", compilers.ErrCPU), failure.CPU,
			apierr.CompileFailed},
		"memory": {fmt.Errorf("x: %w: 5 bytes", compilers.ErrMemory), failure.Memory,
			apierr.CompileFailed},
		"files": {fmt.Errorf("x: %w", compilers.ErrOutputLimit), failure.OutputLimit,
			apierr.CompileFailed},
		"a link": {fmt.Errorf("x: %w", compilers.ErrOutput), failure.Invalid,
			apierr.CompileFailed},
		"talks nonsense": {fmt.Errorf("x: %w", compilers.ErrProtocol), failure.Invalid,
			apierr.CompileFailed},
		"not a model": {fmt.Errorf("graph: %w", &epmodel.FormatError{}), failure.Invalid,
			apierr.CompileFailed},
		"cancelled": {fmt.Errorf("x: %w", context.Canceled), "", apierr.Cancelled},
		"an unwanted option": {fmt.Errorf("x: %w", compilers.ErrOption), "",
			apierr.BadRequest},
		"a missing library": {fmt.Errorf("x: %w", compilers.ErrNotFound), "",
			apierr.Unavailable},
		"replaced during the request": {runtimes.ErrReplaced, "", apierr.Unavailable},
		"something else":              {os.ErrPermission, "", apierr.CompileFailed},
		"left without a word": {&compilers.ExitError{Code: 3}, failure.Crash,
			apierr.CompileFailed},
	} {
		t.Run(name, func(t *testing.T) {
			var e *apierr.Error
			require.ErrorAs(t, request.CompileError(c.err, "before\nlast words\n", "model"), &e)
			require.Equal(t, c.class, e.Class)
			if c.reason == "" {
				require.Nil(t, failure.FromError(e), "it is no failure of a compile's")
				return
			}
			require.Equal(t, c.reason, failure.FromError(e).Reason)
		})
	}
}
