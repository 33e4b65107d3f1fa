package cache

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/compilers/standin"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

const (
	alice = 2001
	bob   = 2002
	carol = 2003
)

// reporting is a bench with load checks that can be made to fail.
type reporting struct {
	*bench
	refused  atomic.Bool // builds do not load
	sandbox  atomic.Bool // nothing loads
	elswhere atomic.Bool // failures prove nothing
	checks   atomic.Int64
}

func newReporting(t testing.TB) *reporting {
	b := &reporting{bench: newBench(t)}
	b.compiler.CheckFault = func(job compilers.CheckJob) *compilers.CheckResult {
		control := strings.Contains(job.Graph, "control")
		if !control {
			b.checks.Add(1)
		}
		switch {
		case b.elswhere.Load():
			return &compilers.CheckResult{Outcome: compilers.NotCheckable, Code: 10, Text: "no NPU"}
		case b.sandbox.Load() || b.refused.Load() && !control:
			return &compilers.CheckResult{Outcome: compilers.Failed, Code: 10,
				Text: "blob not found"}
		}
		return nil
	}
	b.cache.owners.Path = filepath.Join(t.TempDir(), "subuid")
	return b
}

// served has users given the build of one model.
func (b *reporting) served(seed uint64, uids ...uint32) *request.Answer {
	var a *request.Answer
	for _, uid := range uids {
		a = b.acquire(b.others(uid, seed))
	}
	b.checks.Store(0)
	return a
}

func stale(a *request.Answer) reports.Report {
	return reports.Report{Build: a.Build.BuildKey.String(), Code: 10,
		Text: "INVALID_GRAPH: Blob not found in /home/alice/x", Graph: a.Graph,
		ORTVersion: "1.31.1"}
}

func (b *reporting) report(uid uint32, r reports.Report) *wire.ReportReply {
	b.Helper()
	return b.reportOf(uid, r, runtimes.Ref{})
}

// reportOf reports what was loaded with this runtime.
func (b *reporting) reportOf(uid uint32, r reports.Report, from runtimes.Ref) *wire.ReportReply {
	b.Helper()
	d, err := b.cache.Report(context.Background(), request.Peer{UID: uid}, r, from)
	require.NoError(b, err)
	require.NotEmpty(b, d.Text)
	require.NotEmpty(b, d.Hint)
	require.NotEmpty(b, d.Class)
	require.NotEmpty(b, d.State)
	return d
}

func (b *reporting) counter(name string) uint64 {
	return b.cache.index.Counters.All()[name]
}

func TestReportsOfASoundBuildChangeNothing(t *testing.T) {
	b := newReporting(t)
	a := b.served(1, bob, alice)
	for range 1000 {
		d, err := b.cache.Report(context.Background(), request.Peer{UID: alice}, stale(a),
			runtimes.Ref{})
		require.NoError(t, err)
		require.Equal(t, reports.DecidedSound, d.Decision, d.Text)
		require.Equal(t, index.Current, d.State)
		require.Contains(t, d.Hint, "provider options")
		require.NotContains(t, d.Hint, "again", "the same build would be served")
	}
	require.EqualValues(t, 1, b.checks.Load(), "no worker for each report")
	for _, uid := range []uint32{alice, bob} {
		again := b.acquire(b.others(uid, 1))
		require.Equal(t, request.Hit, again.Outcome)
		require.Equal(t, a.Graph, again.Graph)
	}
	var events []*wire.Event
	for _, e := range b.events(b.self()) {
		if e.Kind == event.Report {
			events = append(events, e)
			require.NotContains(t, e.Text, "/home", "a client's words are for the log")
		}
	}
	require.Len(t, events, 1)
	require.Zero(t, b.counter("reports_confirmed"))
	require.EqualValues(t, 1000, b.counter("reports"))

	b.later.Add(int64(time.Hour))
	require.Equal(t, reports.DecidedSound, b.report(alice, stale(a)).Decision)
	require.EqualValues(t, 2, b.checks.Load(), "what was found out does not hold for ever")
}

func TestReportsOfBuildsNeverServedToTheReporter(t *testing.T) {
	b := newReporting(t)
	a := b.served(1, bob)
	private := b.others(bob, 2)
	private.Store = "user"
	own := b.acquire(private)
	b.checks.Store(0)
	for name, r := range map[string]reports.Report{
		"another's shared build": stale(a), "another's own build": stale(own),
		"a key of nothing": {Build: strings.Repeat("ab", 32), Code: 10},
		"no key":           {Build: "model.onnx", Code: 10},
	} {
		_, err := b.cache.Report(context.Background(), request.Peer{UID: alice}, r, runtimes.Ref{})
		require.Equal(t, apierr.NotFound, apierr.ClassOf(err), name)
	}
	require.Zero(t, b.checks.Load())
	require.Zero(t, b.counter("reports"))
}

// The text of an error acquits no build: it only chooses the words about one that loads.
func TestAReportIsDecidedByALoad(t *testing.T) {
	for _, c := range []struct {
		name string
		code int32
		text string
		hint string
	}{
		{"EP not in the session", 9, "Could not find an implementation for EPContext(1)",
			"to the session"},
		{"path checks", 1, "weakly canonical path: Permission denied", "bytes"},
		{"own options", 2, "unknown option", "options of the answer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newReporting(t)
			a := b.served(1, alice)
			r := stale(a)
			r.Code, r.Text = c.code, c.text
			d := b.report(alice, r)
			require.Equal(t, reports.DecidedSound, d.Decision)
			require.Equal(t, "not stale", d.Class)
			require.Contains(t, d.Text, "it loads here")
			require.Contains(t, d.Hint, c.hint)
			require.EqualValues(t, 1, b.checks.Load())
			require.Equal(t, request.Hit, b.acquire(b.others(alice, 1)).Outcome)

			b.refused.Store(true)
			b.later.Add(int64(time.Hour))
			d = b.report(alice, r)
			require.Equal(t, reports.DecidedRetry, d.Decision)
			require.Equal(t, index.Withheld, d.State)
		})
	}
}

func TestAReportThatIsConfirmed(t *testing.T) {
	b := newReporting(t)
	a := b.served(1, bob, alice)
	b.refused.Store(true)
	d := b.report(alice, stale(a))
	require.Equal(t, reports.DecidedRetry, d.Decision, d.Text)
	require.Equal(t, index.Withheld, d.State)
	require.Contains(t, d.Text, "blob not found")
	require.EqualValues(t, 2, b.checks.Load(), "tried twice")
	require.EqualValues(t, 1, b.counter("reports_confirmed"))
	require.Equal(t, index.Withheld, b.cache.index.Journal.StateOf(a.Build.ID).Name)

	again := b.report(bob, stale(a))
	require.Equal(t, reports.DecidedRetry, again.Decision)
	require.Contains(t, again.Text, "already")
	b.refused.Store(false)
	for _, uid := range []uint32{bob, alice} {
		next := b.acquire(b.others(uid, 1))
		require.NotEqual(t, a.Build.ID, next.Build.ID)
		require.Equal(t, "shared", next.Build.Scope)
	}
	require.Subset(t, entryKinds(b.events(request.Peer{UID: bob})),
		[]string{event.Withheld, event.Report})
}

// The control distinguishes a sandbox in which nothing loads from a build that does not.
func TestAFailureIsNotBelievedWhereNothingLoads(t *testing.T) {
	b := newReporting(t)
	a := b.served(1, bob, alice)
	b.sandbox.Store(true)
	d := b.report(alice, stale(a))
	require.Equal(t, reports.DecidedCompileYourself, d.Decision)
	require.Equal(t, reports.WithheldFromYou, d.State)
	require.Contains(t, d.Text, "neither does")
	b.sandbox.Store(false)

	require.Equal(t, a.Build.ID, b.acquire(b.others(bob, 1)).Build.ID, "others keep it")
	e := b.explain(b.others(alice, 1))
	require.Contains(t, e.Reason, "withheld from you")
	compiles, checks := b.compiler.Compiles.Load(), b.checks.Load()
	for range 2 {
		refused := b.refusedRequest(b.others(alice, 1))
		require.Equal(t, apierr.Stale, refused.Class, "an equal build would be no better")
		require.Contains(t, refused.Text, "neither does")
		d = b.report(alice, stale(a))
		require.Equal(t, reports.DecidedCompileYourself, d.Decision)
		require.Equal(t, checks, b.checks.Load(), "nor is it loaded for each report")
		b.reopen()
	}
	require.Equal(t, compiles, b.compiler.Compiles.Load())
	require.Equal(t, a.Build.ID, b.acquire(b.others(bob, 1)).Build.ID, "and it was not replaced")

	b.later.Add(int64(reports.WithholdTime + time.Hour))
	require.Equal(t, request.Hit, b.acquire(b.others(alice, 1)).Outcome, "doubts end")
	require.Zero(t, b.counter("reports_confirmed"))
}

func (b *reporting) refusedRequest(r *request.Request) *apierr.Error { return b.bench.refused(r) }

func TestReportsWithoutTheDevice(t *testing.T) {
	b := newReporting(t)
	users := []uint32{alice, bob, carol, 2004, 2005}
	a := b.served(1, users...)
	b.elswhere.Store(true)
	for _, uid := range users {
		d := b.report(uid, stale(a))
		require.Equal(t, reports.WithheldFromYou, d.State)
		require.Contains(t, d.Text, "without it, it fails: no NPU")
	}
	require.Equal(t, index.Current, b.cache.index.Journal.StateOf(a.Build.ID).Name,
		"it cannot be checked here")
}

// A build that failed to load where its device is not in the machine may be sound, and is served;
// but nothing says that it is optimal, and a user who reports it does not get it again.
func TestABuildThatNeverLoadedIsNotOptimal(t *testing.T) {
	b := newReporting(t)
	b.elswhere.Store(true)
	a := b.served(1, bob)
	require.Equal(t, compilers.Failed, a.Build.LoadCheck)
	require.Equal(t, compilers.Unknown, a.Compatibility.Verdict)
	hit := b.acquire(b.others(alice, 1))
	require.Equal(t, request.Hit, hit.Outcome)
	require.Equal(t, compilers.Unknown, hit.Compatibility.Verdict)
	require.Contains(t, hit.Compatibility.Reason, "it did not load")
	require.Equal(t, "unknown", b.list()[0].row.Compatibility)

	r := stale(a)
	r.Code, r.Text = 9, "Could not find an implementation for EPContext(1)"
	d := b.report(alice, r)
	require.Equal(t, reports.DecidedCompileYourself, d.Decision)
	require.Equal(t, reports.WithheldFromYou, d.State)
	require.Contains(t, d.Hint, "to the session", "the text may name the cause")
	for range 3 {
		compiles, checks := b.compiler.Compiles.Load(), b.checks.Load()
		require.Contains(t, b.refusedRequest(b.others(alice, 1)).Text,
			"no execution provider of the session takes the EPContext node")
		require.Equal(t, compiles, b.compiler.Compiles.Load())
		require.Equal(t, checks, b.checks.Load())
		b.reopen()
	}
	require.Equal(t, request.Hit, b.acquire(b.others(bob, 1)).Outcome)
}

// deviceless is a machine that lost its device.
type deviceless struct{ compilers.Compiler }

func (d deviceless) Probe(ctx context.Context, r compilers.Runtime) (compilers.Facts, error) {
	f, err := d.Compiler.Probe(ctx, r)
	for i := range f.EPs {
		f.EPs[i].Devices = nil
	}
	return f, err
}

func TestReportsOfADeviceThatIsGone(t *testing.T) {
	b := newReporting(t)
	a := b.served(1, alice)
	b.wrap = deviceless{b.compiler}
	rc := b.cache.runtimes.All()[0].LastContent()
	b.cache.index.Memos.Drop([]byte("probe:" +
		b.cache.runtimes.Key("devices", rc, []byte(rc.Spec.ORTLibrary))))
	b.reopen()
	r := stale(a)
	r.Graph = ""
	d := b.report(alice, r)
	require.Equal(t, reports.DecidedCompileYourself, d.Decision)
	require.Contains(t, d.Text, "not in this machine")
	require.Equal(t, index.Current, d.State)
	require.Zero(t, b.checks.Load())
	require.Zero(t, b.cache.reports.TotalWithheld())
}

func TestAReportOfABuildThatAnotherLibraryMade(t *testing.T) {
	b := newReporting(t)
	a := b.served(1, alice)
	b.library("1.1")
	served := b.acquire(b.others(alice, 1))
	require.Equal(t, a.Build.ID, served.Build.ID)
	require.Equal(t, compilers.PreferRecompilation, served.Compatibility.Verdict)
	b.refused.Store(true)
	d := b.report(alice, stale(served))
	require.Equal(t, reports.DecidedRetry, d.Decision)
	require.Equal(t, index.Current, d.State, "it is still good for the library that made it")
	b.refused.Store(false)

	next := b.acquire(b.others(alice, 1))
	require.Equal(t, request.Compiled, next.Outcome)
	_, err := b.cache.Remove(context.Background(), b.self(), []string{next.Build.ID.String()},
		false, false)
	require.NoError(t, err)
	b.reopen()
	again := b.others(alice, 1)
	again.OnMiss = request.Fail
	require.Contains(t, b.refusedRequest(again).Text, "blob not found", "also after a restart")
	b.library("1.0")
	require.Equal(t, a.Build.ID, b.acquire(b.others(alice, 1)).Build.ID)
}

func TestReportsFromARuntimeThatIsNotKnown(t *testing.T) {
	b := newReporting(t)
	a := b.served(1, alice)
	r := stale(a)
	from := runtimes.Ref{EPLibraries: []runtimes.LibraryRef{{EP: standin.EP,
		Path: "/home/alice/venv/libonnxruntime_providers_standin.so"}}}
	d := b.reportOf(alice, r, from)
	require.Equal(t, reports.DecidedSound, d.Decision, "the library that made it is here")
	require.Contains(t, d.Text, b.runtime)

	b.library("2.0")
	d = b.reportOf(alice, r, from)
	require.Equal(t, reports.WithheldFromYou, d.State)
	require.Contains(t, d.Text, "unknown here")
}

func TestAReportOfACopyThatWasReplaced(t *testing.T) {
	b := newReporting(t)
	a := b.served(1, alice)
	r := stale(a)
	r.Graph = "0123456789abcdef01234567/x_ctx.onnx"
	d := b.report(alice, r)
	require.Equal(t, reports.DecidedRetry, d.Decision)
	require.Contains(t, d.Text, "replaced")
	require.Equal(t, index.Current, d.State)
	require.Zero(t, b.checks.Load())

	require.NoError(t, os.Chmod(filepath.Join(a.Path, filepath.Dir(a.Graph)), 0o755))
	require.NoError(t, os.Remove(filepath.Join(a.Path, a.Graph)))
	d = b.report(alice, stale(a))
	require.Equal(t, reports.DecidedRetry, d.Decision)
	require.Contains(t, d.Text, "changed or missing")
	require.Equal(t, request.Hit, b.acquire(b.others(alice, 1)).Outcome)
}

// Damage by the disk that leaves the stamps as they were is found only through a report.
func TestAReportOfADamageWithoutATrace(t *testing.T) {
	b := newReporting(t)
	a := b.served(1, bob, alice)
	blob := b.blob(a)
	text, err := os.ReadFile(blob)
	require.NoError(t, err)
	text[len(text)/2] ^= 1
	require.NoError(t, os.Chmod(blob, 0o644))
	require.NoError(t, os.WriteFile(blob, text, 0o644))
	f := b.openFile(blob)
	require.NoError(t, f.Sync())
	stamp, err := cas.StampOf(f)
	require.NoError(t, err)
	require.NoError(t, b.cache.index.Stamps().
		SaveStamp(a.Build.Files[len(a.Build.Files)-1].Digest, stamp))
	b.reopen()
	require.Equal(t, request.Hit, b.acquire(b.others(bob, 1)).Outcome,
		"the test is of nothing if this is noticed")

	r := stale(a)
	r.Graph = ""
	d := b.report(alice, r)
	require.Equal(t, reports.DecidedRetry, d.Decision)
	require.Equal(t, index.Damaged, d.State)
	require.EqualValues(t, 1, b.counter("reports_confirmed"))
	require.Equal(t, request.Compiled, b.acquire(b.others(bob, 1)).Outcome)
}

func TestManyReportAtOnce(t *testing.T) {
	b := newReporting(t)
	var users []uint32
	for i := range 8 {
		users = append(users, 2001+uint32(i))
	}
	a := b.served(1, users...)
	var wg sync.WaitGroup
	errs := make(chan error, len(users))
	for _, uid := range users {
		wg.Go(func() {
			d, err := b.cache.Report(context.Background(), request.Peer{UID: uid}, stale(a),
				runtimes.Ref{})
			if err == nil && d.Decision != reports.DecidedSound {
				err = fmt.Errorf("%+v", d)
			}
			errs <- err
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
	require.EqualValues(t, 1, b.checks.Load())
	require.Zero(t, b.cache.reports.TotalWithheld())
}

// The check goes on without its client, because the next start would load the build again
// otherwise.
func TestAReportThatIsCancelledIsDecided(t *testing.T) {
	b := newReporting(t)
	a := b.served(1, alice)
	ctx, cancel := context.WithCancel(context.Background())
	b.compiler.CheckFault = func(compilers.CheckJob) *compilers.CheckResult {
		if b.cache.reports.TotalWithheld() == 0 {
			return &compilers.CheckResult{Outcome: compilers.Failed, Text: "not withheld meanwhile"}
		}
		cancel()
		return &compilers.CheckResult{Outcome: compilers.NotCheckable, Code: 10, Text: "no NPU"}
	}
	for range 2 {
		_, err := b.cache.Report(ctx, request.Peer{UID: alice}, stale(a), runtimes.Ref{})
		require.Equal(t, apierr.Cancelled, apierr.ClassOf(err))
	}
	require.Eventually(b, func() bool {
		return strings.Contains(b.cache.reports.WhyWithheld(a.Build.ID, alice), "no NPU")
	}, soon, soon/1000)
	require.Equal(t, apierr.Stale, b.refusedRequest(b.others(alice, 1)).Class)
}
