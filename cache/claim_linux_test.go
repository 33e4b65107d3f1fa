package cache

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/internal/apierr"
)

// application is one that has libraries of its own, which the daemon does not know.
type application struct {
	*bench
	uid     uint32
	dir     string
	spec    compilers.Runtime
	worker  *standin.Compiler
	leave   context.CancelFunc
	connect context.Context
}

func (b *bench) application(uid uint32, version string) *application {
	a := &application{bench: b, uid: uid, dir: b.TempDir(), worker: standin.New()}
	var err error
	a.spec, err = standin.Library(a.dir, "1.30.0",
		standin.SDK{Version: version, Hardware: "sim-1"})
	require.NoError(b, err)
	a.connect, a.leave = context.WithCancel(context.Background())
	b.Cleanup(a.leave)
	return a
}

// ask is a request for the application's own libraries.
func (a *application) ask(model *os.File) *request.Request {
	r := a.request(model)
	r.Peer, r.OnMiss, r.Connection = request.Peer{UID: a.uid}, request.ForClaim, a.connect
	lib := a.spec.EPs[0]
	r.Runtime = runtimes.Ref{ORTVersion: "1.30.0",
		EPLibraries: []runtimes.LibraryRef{{EP: lib.EP, Path: lib.Path,
			File: a.openFile(lib.Path)}}}
	return r
}

// claim asks for a claim that is given at once.
func (a *application) claim(r *request.Request) *request.Answer {
	a.Helper()
	got := a.bench.acquire(r)
	require.Equal(a, request.Claimed, got.Outcome)
	require.NotNil(a, got.Claim)
	return got
}

// compile does what the claim is for, and gives the files in the order in which they are put.
func (a *application) compile(r *request.Request, claim *request.Claim) *claims.Put {
	a.Helper()
	dir := a.TempDir()
	result, err := a.worker.Compile(context.Background(),
		compilers.Job{Runtime: a.spec,
			EPs:   []compilers.EP{{Name: standin.EP, Library: a.spec.EPs[0].Path}},
			Model: r.Graph.Name(), Dir: dir, Output: claim.Output, Embed: r.Embed}, nil)
	require.NoError(a, err)
	put := &claims.Put{Claim: claim.ID, ORTVersion: a.spec.ORTVersion, CompileSeconds: 1000,
		MadeBy: []claims.MadeBy{{EP: standin.EP, Version: "0.9"}}}
	for _, name := range result.Files {
		put.Files = append(put.Files,
			claims.PutFile{Name: name, File: a.openFile(filepath.Join(dir, name))})
	}
	return put
}

func (a *application) put(put *claims.Put) *request.Answer {
	a.Helper()
	got, err := a.cache.Claims.Put(context.Background(), request.Peer{UID: a.uid}, put, nil)
	require.NoError(a, err)
	a.Cleanup(func() { got.View.Close() })
	return got
}

// asked sends the request, which is to wait.
func (b *bench) asked(r *request.Request) <-chan waitResult {
	out := make(chan waitResult, 1)
	before := b.waiters()
	go func() {
		a, err := b.cache.Acquire(context.Background(), r, nil)
		if a != nil && a.View != nil {
			b.Cleanup(func() { a.View.Close() })
		}
		out <- waitResult{a, err}
	}()
	require.Eventually(b, func() bool { return b.waiters() > before }, soon, time.Millisecond)
	return out
}

type waitResult struct {
	answer *request.Answer
	err    error
}

func TestAnApplicationCompilesForItself(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	claim := app.claim(r)
	require.Regexp(t, `^[0-9a-f]{16}_ctx\.onnx$`, claim.Claim.Output)
	require.Equal(t, compilers.RouteCompileAPI, claim.Claim.Route)
	require.WithinDuration(t, time.Now().Add(30*time.Minute), claim.Claim.Deadline, time.Minute)
	require.Contains(t, claim.ProviderOptions, standin.EP)

	put := app.compile(r, claim.Claim)
	got := app.put(put)
	require.Equal(t, request.Taken, got.Outcome)
	require.True(t, got.Build.Put)
	require.Equal(t, rights.OwnScope(r.Peer), got.Build.Scope)
	require.Equal(t, compilers.NotCheckable, got.Build.LoadCheck)
	facts := got.Build.EPs[0]
	require.Equal(t, []string{"7.1", "sim-1", "standin:7.1:sim-1", "0.9"},
		[]string{facts.SDKVersion, facts.HardwareArchitecture, facts.CompatibilityString,
			facts.Version})
	require.Less(t, got.Build.CompileSeconds, 60.0, "no more than the claim has lasted")

	again := b.acquire(r)
	require.Equal(t, request.Hit, again.Outcome)
	require.Equal(t, got.Graph, again.Graph)
	require.Equal(t, b.read(got), b.read(again))
	require.Contains(t, again.Compatibility.Reason, "uid 4242")
	require.Zero(t, b.compiler.Compiles.Load(), "the daemon compiled nothing")
	require.Zero(t, b.compiler.Checks.Load())

	b.reopen()
	require.Equal(t, request.Hit, b.acquire(r).Outcome)
}

// An artefact that an application put is served only to its user's applications with the same
// libraries.
func TestPutIsServedToItsUserOnly(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	model := b.model(1)
	r := app.ask(model)
	app.put(app.compile(r, app.claim(r).Claim))
	equal := b.application(stranger, "7.1")
	for name, c := range map[string]struct {
		ask func() *request.Request
		hit bool
	}{
		"the same": {func() *request.Request { return app.ask(model) }, true},
		"on_miss wait": {
			func() *request.Request { r := app.ask(model); r.OnMiss = request.Wait; return r },
			true},
		"on_miss fail": {
			func() *request.Request { r := app.ask(model); r.OnMiss = request.Fail; return r },
			true},
		"another user": {func() *request.Request { r := app.ask(model); r.Peer.UID++; return r },
			false},
		"another version": {func() *request.Request {
			return b.application(stranger, "7.2").
				ask(model)
		}, false},
		"another place": {func() *request.Request { return equal.ask(model) }, false},
		"another ORT": {
			func() *request.Request {
				r := app.ask(model)
				r.Runtime.ORTVersion = "1.31.0"
				return r
			}, false},
		"another model": {func() *request.Request { return app.ask(b.model(2)) }, false},
		"another option": {func() *request.Request {
			r := app.ask(model)
			r.EPs[0].Options = map[string]string{"level": "3"}
			return r
		}, false},
		"another device": {
			func() *request.Request {
				r := app.ask(model)
				r.EPs[0].Devices = devices("NPU")
				return r
			}, false},
		"the daemon's libs": {
			func() *request.Request { r := app.ask(model); r.Runtime = runtimes.Ref{}; return r },
			false},
	} {
		t.Run(name, func(t *testing.T) {
			r := c.ask()
			if r.OnMiss == request.ForClaim {
				r.OnMiss = request.Fail
			}
			a, err := b.cache.Acquire(context.Background(), r, nil)
			if !c.hit {
				require.Equal(t, apierr.NotFound, apierr.ClassOf(err), "%v", err)
				return
			}
			require.NoError(t, err)
			defer a.View.Close()
			require.Equal(t, request.Hit, a.Outcome)
		})
	}
}

// An SDK in the files beside an execution provider's library counts, whatever the library itself
// says.
func TestLibrariesBesideCount(t *testing.T) {
	b := newBench(t)
	app, moved := b.application(stranger, "7.1"), b.application(stranger, "7.1")
	model := b.model(1)
	sdk := func(text string) *os.File {
		path := filepath.Join(t.TempDir(), "libsdk.so")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		return b.openFile(path)
	}
	ask := func(app *application, text string) *request.Request {
		r := app.ask(model)
		r.Runtime.EPLibraries[0].Beside = map[string]*os.File{"libsdk.so": sdk(text)}
		return r
	}
	r := ask(app, "one")
	app.put(app.compile(r, app.claim(r).Claim))
	require.Equal(t, request.Hit, b.acquire(ask(app, "one")).Outcome)
	require.Equal(t, request.Hit, b.acquire(ask(moved, "one")).Outcome,
		"all of it is known, so another place is no matter")
	other := ask(app, "two")
	other.OnMiss = request.Fail
	require.Equal(t, apierr.NotFound, b.refused(other).Class)
}

func TestAllWaitForTheClaim(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	claim := app.claim(r)
	require.Equal(t, 1, b.cache.jobs.Count())
	wait := app.ask(r.Graph)
	wait.OnMiss = request.Wait
	waiting := []<-chan waitResult{b.asked(app.ask(r.Graph)), b.asked(wait),
		b.asked(app.ask(r.Graph))}
	listed, err := b.cache.JobList.Visible(context.Background(), r.Peer)
	require.NoError(t, err)
	require.Len(t, listed, 1)
	require.Equal(t, []any{jobs.Claimed, 3, uint32(stranger)},
		[]any{listed[0].State, listed[0].Waiting, listed[0].UID})

	got := app.put(app.compile(r, claim.Claim))
	for _, w := range waiting {
		one := <-w
		require.NoError(t, one.err)
		require.Equal(t, request.Waited, one.answer.Outcome)
		require.Equal(t, got.Graph, one.answer.Graph)
		require.Contains(t, one.answer.Why, "uid 4242")
	}
	require.Zero(t, b.cache.jobs.Count())
}

// The daemon cannot load what it does not have the libraries for. It must not take its own for
// them: what those say of another's build is nothing.
func TestReportOfAPutIsNotTriedWithOtherLibraries(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	made := app.put(app.compile(r, app.claim(r).Claim))
	// As of a provider that is part of the application's ONNX Runtime: no library is named.
	d, err := b.cache.Report(context.Background(), r.Peer,
		reports.Report{Build: made.Build.BuildKey.String(), Code: 11, Text: "out of luck",
			ORTVersion: "1.30.0", Graph: made.Graph}, runtimes.Ref{ORTVersion: "1.30.0"})
	require.NoError(t, err)
	require.Equal(t, reports.DecidedCompileYourself, d.Decision,
		"the same compile would make the same")
	require.Equal(t, reports.WithheldFromYou, d.State)
	require.Contains(t, d.Text, "could not be tested with your runtime")
	refused := b.refused(app.ask(b.model(1)))
	require.Equal(t, apierr.Stale, refused.Class, "for a day")
	b.later.Add(int64(reports.WithholdTime + time.Second))
	require.Equal(t, request.Hit, app.bench.acquire(app.ask(b.model(1))).Outcome)
}

// The next claimant gets the claim when it ends without a result, with the reason of that end.
func TestHandOver(t *testing.T) {
	ends := map[string]struct {
		end  func(b *bench, first *application, claim *request.Claim)
		says string
	}{
		"given up": {func(b *bench, first *application, claim *request.Claim) {
			require.NoError(b,
				b.cache.Claims.GiveUp(request.Peer{UID: stranger}, claim.ID,
					"the vendor's compiler\x00 crashed", 11))
		}, "the vendor's compiler crashed (code 11)"},
		"connection gone": {func(_ *bench, first *application, _ *request.Claim) { first.leave() },
			"its connection ended"},
		"bad artefact": {func(b *bench, first *application, claim *request.Claim) {
			put := first.compile(first.ask(b.model(1)), claim)
			put.Files = put.Files[:1]
			_, err := b.cache.Claims.Put(context.Background(), request.Peer{UID: stranger}, put,
				nil)
			require.Equal(b, apierr.BadRequest, apierr.ClassOf(err), "%v", err)
		}, "the submitted build is refused"},
	}
	for name, c := range ends {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			first := b.application(stranger, "7.1")
			r := first.ask(b.model(1))
			claim := first.claim(r)
			second := *first
			second.connect = context.Background()
			waiter := second.ask(r.Graph)
			waiter.OnMiss = request.Wait
			waits := b.asked(waiter)
			next := b.asked(second.ask(r.Graph))
			last := b.asked(second.ask(r.Graph))
			c.end(b, first, claim.Claim)
			one := <-next
			require.NoError(t, one.err)
			require.Equal(t, request.Claimed, one.answer.Outcome)
			require.Contains(t, one.answer.Why, c.says)
			require.NotEqual(t, claim.Claim.ID, one.answer.Claim.ID)
			require.Equal(t, claim.Claim.Output, one.answer.Claim.Output)
			_, err := b.cache.Claims.Put(context.Background(), r.Peer,
				first.compile(r, claim.Claim), nil)
			require.Equal(t, apierr.NotFound, apierr.ClassOf(err),
				"what was claimed before is over: %v", err)
			second.put(second.compile(r, one.answer.Claim))
			for _, w := range []<-chan waitResult{waits, last} {
				got := <-w
				require.NoError(t, got.err)
				require.Equal(t, request.Waited, got.answer.Outcome)
			}
		})
	}
}

// A request that only waits gets the reason why there is no build, if the daemon cannot compile it
// either.
func TestClaimWithoutClaimantsTellsWaitersTheReason(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	claim := app.claim(r)
	wait := app.ask(r.Graph)
	wait.OnMiss = request.Wait
	waits := b.asked(wait)
	require.NoError(t, b.cache.Claims.GiveUp(r.Peer, claim.Claim.ID, "out of memory", 6))
	got := <-waits
	require.Equal(t, apierr.CompileFailed, apierr.ClassOf(got.err))
	require.ErrorContains(t, got.err, "out of memory (code 6)")
	require.Equal(t, apierr.Unavailable, b.refused(wait).Class,
		"and nobody waits for a claim that there is not")
	require.Equal(t, apierr.NotFound,
		apierr.ClassOf(b.cache.Claims.GiveUp(r.Peer, claim.Claim.ID, "", 0)))
}

// The daemon compiles for the waiting requests when a claim for libraries that it has ends without
// an artefact.
func TestTheDaemonCompilesAfterAClaim(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.OnMiss = request.ForClaim
	claim := b.acquire(r)
	require.Equal(t, request.Claimed, claim.Outcome)
	wait := b.request(r.Graph)
	waits := b.asked(wait)
	require.Zero(t, b.compiler.Compiles.Load())
	require.NoError(t, b.cache.Claims.GiveUp(r.Peer, claim.Claim.ID, "no time", 0))
	got := <-waits
	require.NoError(t, got.err)
	require.Equal(t, request.Compiled, got.answer.Outcome)
	require.Contains(t, got.answer.Why, "no time")
	require.EqualValues(t, 1, b.compiler.Compiles.Load())
}

// For libraries that the daemon has, the artefact has to say what the daemon's own build would, and
// to load.
func TestPutForLibrariesThatAreHere(t *testing.T) {
	b := newBench(t)
	same := &application{bench: b, uid: b.cache.uid, spec: compilers.Runtime{},
		worker: standin.New(), connect: context.Background()}
	var err error
	same.spec, err = compilers.Find(b.runtime)
	require.NoError(t, err)
	r := b.request(b.model(1))
	r.OnMiss = request.ForClaim
	claim := b.acquire(r)
	got := same.put(same.compile(r, claim.Claim))
	require.Equal(t, "shared", got.Build.Scope, "administrators put for all")
	require.Equal(t, compilers.Passed, got.Build.LoadCheck)
	require.EqualValues(t, 1, b.compiler.Checks.Load())
	r.OnMiss = request.Wait
	r.Peer.UID = stranger
	require.Equal(t, request.Hit, b.acquire(r).Outcome)

	other := b.application(b.cache.uid, "1.1")
	r = b.request(b.model(2))
	r.OnMiss = request.ForClaim
	_, err = b.cache.Claims.Put(context.Background(), r.Peer, other.compile(r, b.acquire(r).Claim),
		nil)
	require.Equal(t, apierr.BadRequest, apierr.ClassOf(err))
	require.ErrorContains(t, err, `SDK "1.1"`)

	same.worker.Fault = standin.Mutilate
	_, err = b.cache.Claims.Put(context.Background(), r.Peer, same.compile(r, b.acquire(r).Claim),
		nil)
	require.Equal(t, apierr.CompileFailed, apierr.ClassOf(err))
	require.ErrorContains(t, err, "does not load")
}

// An ordinary user's claim is for that user: others are compiled for by the daemon, and never wait.
func TestClaimDelaysNoOtherUser(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	r.Peer.UID, r.OnMiss = stranger, request.ForClaim
	require.Equal(t, request.Claimed, b.acquire(r).Outcome)
	other := b.request(r.Graph)
	other.Peer.UID = stranger + 1
	require.Equal(t, request.Compiled, b.acquire(other).Outcome)
}

// Other processes of its user's wait for the claim, though the daemon could compile.
func TestTheClaimsOwnUserWaits(t *testing.T) {
	b := newBench(t)
	spec, err := compilers.Find(b.runtime)
	require.NoError(t, err)
	app := &application{bench: b, uid: stranger, spec: spec, worker: standin.New()}
	r := b.request(b.model(1))
	r.Peer.UID, r.OnMiss = stranger, request.ForClaim
	claim := app.claim(r)
	wait := b.request(r.Graph)
	wait.Peer.UID = stranger
	waits := b.asked(wait)
	got := app.put(app.compile(r, claim.Claim))
	one := <-waits
	require.NoError(t, one.err)
	require.Equal(t, request.Waited, one.answer.Outcome)
	require.Equal(t, got.Graph, one.answer.Graph)
	require.Zero(t, b.compiler.Compiles.Load())
}

// With another processor, device or driver it is another machine.
func TestAnotherMachine(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	app.put(app.compile(r, app.claim(r).Claim))
	version := filepath.Join(t.TempDir(), "version")
	require.NoError(t, os.WriteFile(version, []byte("1.0\n"), 0o644))
	b.reload(func(o *Options) { o.Drivers = []runtimes.DriverSource{{File: version}} })
	b.cache.runtimes.WatchMachine(t.Context())
	r.OnMiss = request.Fail
	require.Equal(t, apierr.NotFound, b.refused(r).Class)
}

func TestClaimWaitsForTheDaemonsJob(t *testing.T) {
	b := newBench(t)
	b.compiler.Delay = 200 * time.Millisecond
	first := b.asked(b.request(b.model(1)))
	r := b.request(b.model(1))
	r.Peer.UID, r.OnMiss = stranger, request.ForClaim
	require.Equal(t, request.Waited, b.acquire(r).Outcome)
	require.NoError(t, (<-first).err)
}

func TestDeadlineOfAClaim(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Claims.Deadline = 50 * time.Millisecond })
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	claim := app.claim(r)
	put := app.compile(r, claim.Claim)
	require.Eventually(t, func() bool { return b.cache.jobs.Count() == 0 }, soon, time.Millisecond)
	_, err := b.cache.Claims.Put(context.Background(), r.Peer, put, nil)
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
	require.ErrorContains(t, err, "deadline")
	require.Empty(t, b.list())
}

func TestClaimsEndWithTheDaemon(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	claim := app.claim(r)
	put := app.compile(r, claim.Claim)
	b.reopen()
	_, err := b.cache.Claims.Put(context.Background(), r.Peer, put, nil)
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
	require.Equal(t, request.Claimed, b.acquire(r).Outcome)
}

func TestOneUsersClaimsAreBounded(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Claims.Open = 2 })
	app := b.application(stranger, "7.1")
	app.claim(app.ask(b.model(1)))
	app.claim(app.ask(b.model(2)))
	require.Equal(t, apierr.Busy, b.refused(app.ask(b.model(3))).Class)
	other := b.application(stranger+1, "7.1")
	other.claim(other.ask(b.model(3)))
}

func TestOneUsersBytesAreBounded(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Claims.UserBytes = 3000 })
	app := b.application(stranger, "7.1")
	var err error
	for seed := uint64(1); err == nil && seed < 20; seed++ {
		r := app.ask(b.model(seed))
		_, err = b.cache.Claims.Put(context.Background(), r.Peer,
			app.compile(r, app.claim(r).Claim), nil)
	}
	require.Equal(t, apierr.NoSpace, apierr.ClassOf(err), "%v", err)
	require.NotEmpty(t, b.list())
}

// An execution provider that leaves weights in the source needs it again, and what is put is the
// compiled model alone.
func TestWeightlessBuildsAreNotClaimed(t *testing.T) {
	b := newBench(t)
	r := b.application(stranger, "7.1").ask(b.model(1))
	r.SessionOptions = map[string]string{"ep.enable_weightless": "1"}
	require.Equal(t, apierr.NotAllowed, b.refused(r).Class)
}

func TestClaimWithoutAPendingCompile(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	r.Store = "none"
	require.Equal(t, apierr.NotAllowed, b.refused(r).Class)
	r = app.ask(b.model(1))
	r.Runtime.EPLibraries[0].File = nil
	require.Equal(t, apierr.Unavailable, b.refused(r).Class, "a path alone shows nothing")
	r = app.ask(b.model(1))
	require.NoError(t, os.Remove(app.spec.EPs[0].Path))
	require.Equal(t, apierr.Unavailable, b.refused(r).Class,
		"what is open is not what would be loaded")
}

func TestEventsOfClaims(t *testing.T) {
	b := newBench(t)
	app := b.application(stranger, "7.1")
	r := app.ask(b.model(1))
	require.NoError(t,
		b.cache.Claims.GiveUp(r.Peer, app.claim(r).Claim.ID, "nothing came of it", 0))
	require.Eventually(t, func() bool { return b.cache.jobs.Count() == 0 }, soon, time.Millisecond)
	app.put(app.compile(r, app.claim(r).Claim))
	var kinds []string
	events, err := b.cache.Queries.Events(context.Background(), r.Peer, time.Time{}, 0)
	require.NoError(t, err)
	for _, e := range events.Events {
		if e.RequestKey != "" {
			kinds = append(kinds, e.Kind)
		}
	}
	require.Equal(t, "claimed, claim ended, claimed, put", strings.Join(kinds, ", "))
	hidden, err := b.cache.Queries.Events(context.Background(), request.Peer{UID: stranger + 1},
		time.Time{}, 0)
	require.NoError(t, err)
	for _, e := range hidden.Events {
		require.Empty(t, e.RequestKey, "others hear nothing of %s", e.Kind)
	}
}
