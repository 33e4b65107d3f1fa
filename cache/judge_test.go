package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

// opinion is a compiler with execution providers that have a verdict, and with load checks that end
// as configured.
type opinion struct {
	*standin.Compiler
	verdict compilers.Verdict
	err     error
	// outcome of load checks of what others made; "": the stand-in's own; "none": they do not end
	load   string
	broken atomic.Bool // the smallest artefact there is loads no better
	checks atomic.Int64
}

func (o *opinion) Compatibility(_ context.Context, _ compilers.Runtime, _ compilers.EP,
	infos []string) ([]compilers.Verdict, error) {
	o.Verdicts.Add(1)
	out := make([]compilers.Verdict, len(infos))
	for i := range out {
		out[i] = o.verdict
	}
	return out, o.err
}

func (o *opinion) Check(ctx context.Context, job compilers.CheckJob) (compilers.CheckResult,
	error) {
	o.checks.Add(1)
	control := filepath.Base(job.Graph) == "probe_ctx.onnx"
	// "out": what was compiled just now
	if o.load == "" || filepath.Base(filepath.Dir(job.Graph)) == "out" ||
		control && !o.broken.Load() {
		return o.Compiler.Check(ctx, job)
	}
	if o.load == "none" {
		return compilers.CheckResult{}, compilers.ErrTimeout
	}
	return compilers.CheckResult{Outcome: o.load, Code: 10, Text: "incompatible magic"}, nil
}

func newOpinion(t *testing.T, o *opinion, policy request.Policy) *bench {
	b := newBench(t)
	o.Compiler = b.compiler
	b.close()
	b.wrap, b.policies = o, map[string]request.Policy{"": policy}
	b.open()
	return b
}

// ONNX Runtime would fail to load such a build with this entry, so it is compiled again instead of
// being served.
func TestOnlyOptimalBuildsAreServedWhereTheRequestSaysSo(t *testing.T) {
	b := newOpinion(t, &opinion{verdict: compilers.PreferRecompilation},
		request.Policy{PreferRecompilation: request.PolicyServe})
	ask := func(value string, onMiss request.OnMiss) *request.Request {
		r := b.request(b.model(1))
		r.OnMiss = onMiss
		r.SessionOptions = map[string]string{"session.fail_on_suboptimal_compiled_model": value,
			"session.log_id": "mine"}
		return r
	}
	first := b.acquire(ask("1", request.Wait))
	require.Equal(t, request.Compiled, first.Outcome)
	require.Empty(t, first.SessionOptions, "they are the application's own")
	require.Equal(t, b.acquire(b.request(b.model(1))).Build.ID, first.Build.ID,
		"one request key with and without them")
	b.library("2.0")
	require.Equal(t, compilers.PreferRecompilation,
		b.acquire(ask("0", request.Wait)).Compatibility.Verdict)
	e := b.refused(ask("1", request.Fail))
	require.Equal(t, apierr.Stale, e.Class)
	require.Contains(t, e.Error(), "fail_on_suboptimal_compiled_model")
	again := b.acquire(ask("1", request.Wait))
	require.Equal(t, request.Compiled, again.Outcome)
	require.Equal(t, compilers.Optimal, again.Compatibility.Verdict)
	require.Equal(t, again.Build.ID, b.acquire(b.request(b.model(1))).Build.ID)
}

func TestVerdicts(t *testing.T) {
	refused := &compilers.RefusedError{Doing: "compatibility", Code: 1,
		Text: "only supports OrtHardwareDeviceType_NPU"}
	cases := map[string]struct {
		opinion *opinion
		policy  request.Policy
		outcome string
		verdict compilers.Verdict
		source  string
	}{
		"optimal": {&opinion{verdict: compilers.Optimal}, request.Policy{},
			request.Hit, compilers.Optimal, judge.SourceEP},
		"prefer": {&opinion{verdict: compilers.PreferRecompilation},
			request.Policy{}, request.Hit, compilers.PreferRecompilation, judge.SourceEP},
		"prefer, served as it is": {&opinion{verdict: compilers.PreferRecompilation},
			request.Policy{PreferRecompilation: request.PolicyServe}, request.Hit,
			compilers.PreferRecompilation, judge.SourceEP},
		"prefer, refused by policy": {&opinion{verdict: compilers.PreferRecompilation},
			request.Policy{PreferRecompilation: request.PolicyRefuse}, request.Compiled,
			compilers.Optimal, judge.SourceLibrary},
		"unsupported": {&opinion{verdict: compilers.Unsupported},
			request.Policy{}, request.Compiled, compilers.Optimal, judge.SourceLibrary},
		"unknown, and loads": {&opinion{load: compilers.Passed}, request.Policy{},
			request.Hit, compilers.PreferRecompilation, judge.SourceLoadCheck},
		"unknown, and does not load": {&opinion{load: compilers.Failed}, request.Policy{},
			request.Compiled, compilers.Optimal, judge.SourceLibrary},
		"unknown, and cannot be tried": {&opinion{load: compilers.NotCheckable}, request.Policy{},
			request.Compiled, compilers.Optimal, judge.SourceLibrary},
		"unknown, and refused by policy": {&opinion{load: compilers.Passed},
			request.Policy{Unknown: request.PolicyRefuse}, request.Compiled, compilers.Optimal,
			judge.SourceLibrary},
		"unknown, and served as it is": {&opinion{load: compilers.Failed},
			request.Policy{Unknown: request.PolicyServe}, request.Hit, compilers.Unknown, ""},
		"cannot say, and loads": {&opinion{err: refused, load: compilers.Passed},
			request.Policy{}, request.Hit, compilers.PreferRecompilation, judge.SourceLoadCheck},
		"crashes over it, and loads": {&opinion{err: errors.New("worker crashed"),
			load: compilers.Passed}, request.Policy{}, request.Hit, compilers.PreferRecompilation,
			judge.SourceLoadCheck},
		"says optimal, and nobody tries": {&opinion{verdict: compilers.Optimal,
			load: compilers.Failed}, request.Policy{}, request.Hit, compilers.Optimal,
			judge.SourceEP},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			o := c.opinion
			b := newOpinion(t, o, c.policy)
			first := b.acquire(b.request(b.model(1)))
			b.library("2.0")
			second := b.acquire(b.request(b.model(1)))
			require.Equal(t, c.outcome, second.Outcome)
			require.Equal(t, c.verdict, second.Compatibility.Verdict)
			require.Equal(t, c.source, second.Compatibility.Source)
			require.NotEmpty(t, second.Compatibility.Reason)
			require.Equal(t, b.runtime, second.Compatibility.Runtime)
			if c.outcome == request.Hit {
				require.Equal(t, first.Build.ID, second.Build.ID)
			}

			checks, verdicts := o.checks.Load(), o.Verdicts.Load()
			third := b.acquire(b.request(b.model(1)))
			require.Equal(t, request.Hit, third.Outcome)
			require.Equal(t, second.Build.ID, third.Build.ID)
			b.reopen()
			require.Equal(t, second.Build.ID, b.acquire(b.request(b.model(1))).Build.ID)
			require.Equal(t, checks, o.checks.Load(), "what was tried once is known")
			if o.err == nil {
				require.Equal(t, verdicts, o.Verdicts.Load(), "a string is judged once")
			}
		})
	}
}

// earlierORT is an ONNX Runtime that writes an earlier format of graphs than the one of the builds.
type earlierORT struct {
	*opinion
	ir atomic.Int64
}

func (e *earlierORT) Fingerprint(ctx context.Context, r compilers.Runtime, eps []compilers.EP,
	own *compilers.Job) ([]compilers.Fingerprint, error) {
	marks, err := e.opinion.Fingerprint(ctx, r, eps, own)
	for i := range marks {
		marks[i].IRVersion = e.ir.Load()
	}
	return marks, err
}

// ONNX Runtime is not part of the key. An earlier one may not load the graph that a later one
// wrote, whatever the execution provider says, so the build is loaded once.
func TestBuildOfALaterONNXRuntimeIsLoaded(t *testing.T) {
	for load, outcome := range map[string]string{compilers.Passed: request.Hit,
		compilers.Failed: request.Compiled, compilers.NotCheckable: request.Compiled} {
		t.Run(load, func(t *testing.T) {
			e := &earlierORT{opinion: &opinion{verdict: compilers.Optimal, load: load}}
			b := newOpinion(t, e.opinion, request.Policy{})
			b.wrap = e
			b.reopen()
			first := b.acquire(b.request(b.model(1)))
			e.ir.Store(first.Build.IRVersion - 1)
			_, err := b.cache.Queries.Probe(b.Context(), b.self(), runtimes.Ref{}, true)
			require.NoError(t, err)
			checks := e.checks.Load()
			a := b.acquire(b.request(b.model(1)))
			require.Equal(t, outcome, a.Outcome, a.Why)
			require.Equal(t, outcome == request.Hit, a.Build.ID == first.Build.ID)
			require.Equal(t, compilers.Optimal, a.Compatibility.Verdict)
			require.Greater(t, e.checks.Load(), checks)
			if outcome == request.Hit {
				checks = e.checks.Load()
				b.acquire(b.request(b.model(1)))
				require.Equal(t, checks, e.checks.Load(), "once")
			}
		})
	}
}

// Build keys do not cover ONNX Runtime. Where no load can be tested, a graph of a later one is
// served neither as a hit nor to a request that waited for its compile.
func TestGraphsOfALaterONNXRuntimeAreNotServedUnloaded(t *testing.T) {
	later := filepath.Join(t.TempDir(), "later")
	_, err := standin.Library(later, standin.LaterIR,
		standin.SDK{Version: "1.0", Hardware: "sim-1"})
	require.NoError(t, err)
	g := &gate{pass: make(chan struct{}), hold: true}
	b := newBenchWith(t, func(o *Options) {
		b := o.Compiler.(*standin.Compiler)
		b.CheckFault = func(compilers.CheckJob) *compilers.CheckResult {
			return &compilers.CheckResult{Outcome: compilers.NotCheckable}
		}
		g.Compiler, o.Compiler = b, g
		o.Runtimes = append(o.Runtimes, compilers.Runtime{Directory: later})
	})
	ask := func(dir string, seed uint64) *request.Request {
		r := b.request(b.model(seed))
		r.Runtime = runtimes.Ref{Directory: dir}
		return r
	}
	first := b.ask(b.Context(), ask(later, 1))
	b.begins(g, 1)
	before := b.waiters()
	waits := b.ask(b.Context(), ask(b.runtime, 1))
	require.Eventually(t, func() bool { return b.waiters() > before }, soon, soon/1000)
	close(g.pass)
	made := b.served(first)
	require.EqualValues(t, 10, made.Build.IRVersion)
	own := b.served(waits)
	require.EqualValues(t, 9, own.Build.IRVersion)
	require.Equal(t, made.Build.BuildKey, own.Build.BuildKey)
	require.Equal(t, request.Hit, b.acquire(ask(b.runtime, 1)).Outcome)
	require.Equal(t, request.Hit, b.acquire(ask(later, 1)).Outcome)

	require.EqualValues(t, 10, b.acquire(ask(later, 2)).Build.IRVersion)
	asked := ask(b.runtime, 2)
	asked.OnMiss = request.Fail
	e := b.refused(asked)
	require.Equal(t, apierr.Stale, e.Class)
	require.Contains(t, e.Text, "IR version 10")
	require.EqualValues(t, 9, b.acquire(ask(b.runtime, 2)).Build.IRVersion)
}

// After an update an application may ask for all its models at once: no more of them are loaded
// than compiles would run.
func TestLoadChecksAreBounded(t *testing.T) {
	b := newBench(t)
	b.close()
	c := &counting{Compiler: b.compiler}
	b.wrap, b.change = c, func(o *Options) { o.Jobs = 1 }
	b.open()
	var files []*os.File
	for seed := range uint64(6) {
		files = append(files, b.model(seed))
		b.acquire(b.request(files[seed]))
	}
	b.library("1.0.1")
	c.most.Store(0)
	var all sync.WaitGroup
	for _, f := range files {
		all.Go(func() {
			a, err := b.cache.Acquire(context.Background(), b.request(f), nil)
			if err == nil {
				err = a.View.Close()
			}
			assert.NoError(t, err)
		})
	}
	all.Wait()
	require.EqualValues(t, 1, c.most.Load())
}

// counting is a compiler that counts the checks of stored builds that run at the same time.
type counting struct {
	*standin.Compiler
	now, most atomic.Int64
}

func (c *counting) Compatibility(context.Context, compilers.Runtime, compilers.EP,
	[]string) ([]compilers.Verdict, error) {
	return []compilers.Verdict{compilers.Unknown}, nil
}

func (c *counting) Check(ctx context.Context, job compilers.CheckJob) (compilers.CheckResult,
	error) {
	if filepath.Base(filepath.Dir(job.Graph)) != "out" {
		n := c.now.Add(1)
		defer c.now.Add(-1)
		for most := c.most.Load(); n > most &&
			!c.most.CompareAndSwap(most, n); most = c.most.Load() {
		}
		time.Sleep(10 * time.Millisecond) // so that others would run meanwhile
	}
	return c.Compiler.Check(ctx, job)
}

// An earlier build that cannot be tried is served all the same.
func TestEarlierBuildThatCannotBeTried(t *testing.T) {
	t.Run("its load check does not end", func(t *testing.T) {
		b := newOpinion(t, &opinion{load: "none"}, request.Policy{})
		b.acquire(b.request(b.model(1)))
		b.library("2.0")
		a := b.acquire(b.request(b.model(1)))
		require.Equal(t, request.Compiled, a.Outcome)
		require.Contains(t, a.Why, compilers.ErrTimeout.Error())
	})
	t.Run("it is damaged", func(t *testing.T) {
		b := newOpinion(t, &opinion{load: compilers.Passed}, request.Policy{})
		first := b.acquire(b.request(b.model(1)))
		b.library("2.0")
		require.NoError(t, os.Remove(b.blob(first)))
		b.views()
		a := b.acquire(b.request(b.model(1)))
		require.Equal(t, request.Compiled, a.Outcome)
		require.Contains(t, a.Why, "damaged")
		require.Equal(t, index.Damaged, b.cache.index.Journal.StateOf(first.Build.ID).Name)
	})
}

func TestUnsupportedIsStaleWithoutACompile(t *testing.T) {
	b := newOpinion(t, &opinion{verdict: compilers.Unsupported}, request.Policy{})
	b.acquire(b.request(b.model(1)))
	b.library("2.0")
	r := b.request(b.model(1))
	r.OnMiss = request.Fail
	e := b.refused(r)
	require.Equal(t, apierr.Stale, e.Class)
	require.Contains(t, e.Text, "unsupported")
	require.Contains(t, e.Text, "2.0 says of a build")
	r.Graph = b.model(2)
	require.Equal(t, apierr.NotFound, b.refused(r).Class, "there is none, not even a stale one")
}

func TestPolicyToFailWhereUnsupported(t *testing.T) {
	b := newOpinion(t, &opinion{verdict: compilers.Unsupported},
		request.Policy{Unsupported: request.PolicyFail})
	b.acquire(b.request(b.model(1)))
	b.library("2.0")
	r := b.request(b.model(1))
	require.Equal(t, apierr.Stale, b.refused(r).Class)
	r.OnMiss = request.Refresh
	require.Equal(t, request.Compiled, b.acquire(r).Outcome)
}

// The best for the caller's runtime is served, not the newest, and not the first that would do.
func TestBestBuildFirst(t *testing.T) {
	b := newBench(t)
	for _, sdk := range []string{"2.0", "1.1", "1.0"} {
		b.library(sdk)
		r := b.request(b.model(1))
		r.OnMiss = request.Refresh
		require.Equal(t, sdk, b.acquire(r).Build.EPs[0].SDKVersion)
	}
	for _, sdk := range []string{"1.1", "1.0", "2.0"} {
		b.library(sdk)
		a := b.acquire(b.request(b.model(1)))
		require.Equal(t, request.Hit, a.Outcome)
		require.Equal(t, sdk, a.Build.EPs[0].SDKVersion)
	}
	b.library("1.2")
	a := b.acquire(b.request(b.model(1)))
	require.Equal(t, compilers.PreferRecompilation, a.Compatibility.Verdict)
	require.Equal(t, "1.0", a.Build.EPs[0].SDKVersion, "among equals the newest")
}

// The SDK changes during a compile: its result is dropped, and the caller gets the new SDK's.
func TestChangeDuringACompile(t *testing.T) {
	b := newBench(t)
	b.close()
	b.wrap = &interrupted{Compiler: b.compiler, during: func() { b.library("2.0") }}
	b.open()
	a := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Compiled, a.Outcome)
	require.Equal(t, "2.0", a.Build.EPs[0].SDKVersion)
	require.Len(t, b.list(), 1)
	require.Equal(t, "1 succeeded in the last day, and 0 failed",
		adviceOn(t, b.cache.Queries.Doctor().LatelyAdvice(b.self()), "compiles").Text)
	require.Zero(t, b.cache.index.Counters.All()["failures"])
}

// interrupted does something once in the middle of the first compile.
type interrupted struct {
	*standin.Compiler
	once   atomic.Bool
	during func()
}

func (i *interrupted) Compile(ctx context.Context, job compilers.Job,
	progress func(string)) (compilers.Result, error) {
	result, err := i.Compiler.Compile(ctx, job, progress)
	if i.once.CompareAndSwap(false, true) {
		i.during()
	}
	return result, err
}

// A driver says nothing in the libraries: its version is read where the configuration says.
func TestDriverIsAnotherOne(t *testing.T) {
	b := newBench(t)
	b.close()
	file := filepath.Join(t.TempDir(), "version")
	require.NoError(t, os.WriteFile(file, []byte("31.0.1\nmore\n"), 0o644))
	b.drivers = []runtimes.DriverSource{{EP: standin.EP, File: file}}
	b.open()
	first := b.acquire(b.request(b.model(1)))
	require.Equal(t, "31.0.1", first.Build.EPs[0].DriverVersion)
	prints := b.compiler.Fingerprints.Load()

	require.NoError(t, os.WriteFile(file, []byte("32.0.1\n"), 0o644))
	b.cache.runtimes.WatchMachine(context.Background())
	second := b.acquire(b.request(b.model(1)))
	require.Equal(t, request.Hit, second.Outcome, "nothing says that the driver matters here")
	require.Greater(t, b.compiler.Fingerprints.Load(), prints,
		"another driver may make another fingerprint")
	require.Equal(t, runtimes.Driver{Version: "32.0.1", Source: "file " + file},
		b.probed().Drivers[standin.EP])
}

func TestChangedLibrariesAreNamed(t *testing.T) {
	for name, running := range map[string]bool{"running": true, "stopped": false} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.acquire(b.request(b.model(1)))
			b.assessed(func(f runtimes.Facts) bool { return len(f.Changes) == 0 && !f.At.IsZero() })
			if !running {
				b.close()
			}
			b.library("2.0")
			if !running {
				b.open()
			}
			f := b.assessed(func(f runtimes.Facts) bool { return len(f.Changes) > 0 })
			require.Contains(t, f.Changes, standin.EP+" SDK: 2.0, was 1.0")
			require.False(t, f.Previous.IsZero())
			require.Eventually(t,
				func() bool {
					return b.list()[0].row.Compatibility == compilers.Unsupported.String()
				}, soon, time.Millisecond)
			require.Equal(t, judge.SourceEP, b.list()[0].row.CompatibilitySource)
		})
	}
}

// probed is what is known of the runtime.
func (b *bench) probed() runtimes.Facts {
	return b.cache.runtimes.Probe(context.Background(), b.cache.runtimes.All()[0])
}

// assessed waits for the background to have looked at the runtime.
func (b *bench) assessed(when func(runtimes.Facts) bool) (f runtimes.Facts) {
	b.Helper()
	require.Eventually(b, func() bool {
		f = b.probed()
		return !f.Assessed.IsZero() && when(f)
	}, soon, time.Millisecond)
	return f
}

// A change is noticed without any request.
func TestChangesAreNoticedWithoutARequest(t *testing.T) {
	b := newBench(t)
	b.acquire(b.request(b.model(1)))
	b.assessed(func(runtimes.Facts) bool { return true })
	b.library("2.0")
	require.Eventually(t,
		func() bool { return b.list()[0].row.Compatibility == compilers.Unsupported.String() },
		soon, time.Millisecond)
	require.Contains(t, kinds(b.events(b.self())), event.Changed)
}

// A build is judged for its own options, not for the defaults: they decide what the hardware is.
func TestJudgedWithItsOwnOptions(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.EPs[0].Options = map[string]string{"hardware": "sim-2"}
	a := b.acquire(r)
	b.library("1.1")
	require.Eventually(t,
		func() bool { return b.list()[0].row.CompatibilitySource == judge.SourceEP }, soon,
		time.Millisecond)
	require.Equal(t, compilers.PreferRecompilation.String(), b.list()[0].row.Compatibility)
	require.Equal(t, a.Build.ID, b.list()[0].Build.ID)
}

// failing is a compiler that cannot compile with some libraries.
type failing struct {
	*standin.Compiler
	ill atomic.Bool
}

func (f *failing) Fingerprint(ctx context.Context, r compilers.Runtime, eps []compilers.EP,
	own *compilers.Job) ([]compilers.Fingerprint, error) {
	if f.ill.Load() {
		return nil, errors.New("experimental function missing")
	}
	return f.Compiler.Fingerprint(ctx, r, eps, own)
}

func TestLibrariesThatCannotCompileCauseNoEvents(t *testing.T) {
	b := newBench(t)
	b.close()
	f := &failing{Compiler: b.compiler}
	b.wrap = f
	b.open()
	b.acquire(b.request(b.model(1)))
	f.ill.Store(true)
	b.library("1.1")
	require.Eventually(t, func() bool {
		return strings.Contains(b.list()[0].row.CompatibilityReason,
			"experimental function missing")
	}, soon, time.Millisecond)
	require.Equal(t, compilers.Unknown.String(), b.list()[0].row.Compatibility)
	b.refused(b.request(b.model(1)))
}

// A machine on which nothing loads says nothing of builds: once it is mended they are judged as
// ever.
func TestJudgementsNeedALoadableRuntime(t *testing.T) {
	o := &opinion{}
	b := newOpinion(t, o, request.Policy{})
	first := b.acquire(b.request(b.model(1)))
	b.library("2.0")
	explained := func() *wire.Candidate {
		r := b.request(b.model(1))
		r.OnMiss = request.Explain
		return b.acquire(r).Explanation.Candidates[0]
	}
	o.load = compilers.Failed
	o.broken.Store(true)
	c := explained()
	require.Equal(t, first.Build.BuildKey.String(), c.Build.Build)
	require.Equal(t, compilers.Unknown.String(), c.Build.Compatibility, c.Reason)
	require.Contains(t, c.Reason, "no build loads here")
	b.reopen() // a build that could not be tried is judged again
	o.broken.Store(false)
	require.Equal(t, compilers.Unsupported.String(), explained().Build.Compatibility)
}
