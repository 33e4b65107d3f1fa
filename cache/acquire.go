package cache

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/loadcheck"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
)

// Acquire answers one request: with a stored build, or with one that it compiles. progress is
// called at each change of phase, from any goroutine, but not after Acquire has returned.
func (c *Cache) Acquire(ctx context.Context, r *request.Request,
	progress func(request.Progress)) (*request.Answer, error) {
	t := jobs.NewProgressReporter(progress, c.now())
	defer t.End()
	defer c.Store.Packer().BeginRequest()()
	ctx = lookup.WithProgress(ctx, t)
	at, err := request.NewAttempt(r.Canonical(c.runtimes), t)
	if err != nil {
		return nil, err
	}
	at.Generation = c.Repeats.generation()
	for tries := 1; ; tries++ {
		a, err := c.acquire(ctx, at)
		moved := errors.Is(err, runtimes.ErrFilesChanging) || errors.Is(err, runtimes.ErrReplaced)
		most := acquireAttempts
		if errors.Is(err, store.ErrRemoved) {
			moved, most = true, removedAttempts
		}
		if !moved || tries >= most || ctx.Err() != nil {
			if err == nil && a.LeasedView != nil && !r.KeepsView {
				c.views.NotePathGiven(a.LeasedView)
			}
			return a, apierr.Ended(ctx, err, "model %q", r.Name)
		}
		at.Generation = c.Repeats.generation()
		t.Phase("probing") // begin again, because the runtime has changed or the build was removed
	}
}

// How many times Acquire tries a request.
const (
	acquireAttempts = 3  // if its runtime is being replaced
	removedAttempts = 10 // if its build is removed or replaced each time before the lease is taken
)

func (c *Cache) acquire(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	var slow atomic.Bool
	phase, own := at.Phase, *at
	at = &own
	at.Phase = func(name string) {
		slow.Store(true)
		phase(name)
	}
	at, err := c.planner.WithIdentity(ctx, at)
	if err != nil {
		return nil, err
	}
	rt, rc, err := c.runtimes.Resolve(ctx, at.RuntimeWanted(), at.Phase)
	if err != nil && c.hasOwnLibraries(at.Request, err) {
		a, err := c.answerForOwnLibraries(ctx, at, err)
		loadcheck.NotLoaded(a, at)
		return a, err
	}
	if err != nil {
		return nil, err
	}
	at = at.WithRuntime(rt.Name, rc)
	if !at.Identity.Compiled {
		if at, err = c.planner.WithPlan(ctx, at); err != nil {
			return nil, err
		}
	}
	a, err := c.answer(ctx, at)
	if err == nil && at.VerifyOutput > 0 {
		if err = c.loadChecker.VerifyOutput(ctx, at, a); err != nil && a.View != nil {
			err = errors.Join(err, a.View.Close())
		}
	}
	if err == nil && slow.Load() {
		err = checkNotReplaced(a, at)
	}
	if err != nil {
		return nil, err
	}
	if !slow.Load() {
		c.Repeats.remember(at, rt, a)
	}
	return a, nil
}

// checkNotReplaced returns an error if the libraries were replaced while the daemon verified,
// loaded or compiled something for the answer. Other answers need no check, because the look-up has
// just compared the stamps of the libraries' files.
func checkNotReplaced(a *request.Answer, at *request.Attempt) error {
	if a.View == nil || at.Content.IsCurrent() {
		return nil
	}
	return errors.Join(apierr.New(apierr.Busy, runtimes.ErrFilesChanging,
		"model %q: the runtime's libraries changed during the request", at.Name).
		WithHint("retry when the update is done"), a.View.Close())
}

func (c *Cache) answer(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	if at.Identity.Compiled {
		return c.answers.AnswerCompiled(ctx, at)
	}
	switch at.OnMiss {
	case request.KeyOnly:
		return at.Answer(request.Key), nil
	case request.Explain:
		return c.answers.Explain(ctx, at)
	}
	var found lookup.Found
	var err error
	if at.OnMiss != request.Refresh && at.OnMiss != request.Bypass {
		if found, err = c.find(ctx, at); found.Answer != nil || err != nil {
			return found.Answer, err
		}
		c.countMiss(at)
	}
	if err := c.whyNotCompile(at, &found); err != nil {
		if at.OnMiss == request.Fail {
			c.fetch(ctx, at, false)
		}
		return nil, err
	}
	if at.OnMiss == request.Refresh {
		c.remotes.Forget(at.Plan.BuildKey)
	}
	// The jobs of other requests fetch before they compile.
	if at.OnMiss == request.ForClaim || at.OnMiss == request.Fetch {
		if c.fetch(ctx, at, true) {
			if found, err = c.find(ctx, at); found.Answer != nil || err != nil {
				return found.Answer, err
			}
		}
		if at.OnMiss == request.Fetch {
			return nil, c.notFetched(at)
		}
	}
	if err := c.whyNotReplace(at); err != nil {
		return nil, err
	}
	var a *request.Answer
	switch at.OnMiss {
	case request.ForClaim:
		a, err = c.Claims.ClaimOrWait(ctx, at, found.Why)
	case request.Background:
		return c.builder.CompileLater(ctx, at, found.Why)
	default:
		a, err = c.builder.Compile(ctx, at, found.Why)
		if a != nil && a.Compatibility.Source == "" {
			own := judge.Judgement{Verdict: compilers.Optimal, Source: judge.SourceLibrary,
				Reason: "compiled for this request", At: c.now(), Runtime: at.RuntimeName}
			a.Compatibility = own.Doubted(a.Build)
		}
	}
	return c.lookup.FillAnswer(a, at), err
}

// find finds a build of the request or of a group with its model, or converts one.
func (c *Cache) find(ctx context.Context, at *request.Attempt) (found lookup.Found, err error) {
	found, err = c.lookup.Find(ctx, at)
	if found.Answer == nil && err == nil {
		if found.Answer, err = c.lookup.FindMember(ctx, at); found.Answer != nil || err != nil {
			return found, err
		}
		if found.Withheld == "" {
			found.Answer, err = c.builder.Convert(ctx, at)
		}
	}
	found.Answer = c.lookup.FillAnswer(found.Answer, at)
	return found, err
}

// countMiss counts a request that has no build, unless the request only asks whether there is one
// (OnMiss is Fail).
func (c *Cache) countMiss(at *request.Attempt) {
	if at.OnMiss != request.Fail {
		c.index.Counters.Add("misses", 1)
	}
}

// whyNotCompile returns why a miss is not compiled; nil if it is.
func (c *Cache) whyNotCompile(at *request.Attempt, found *lookup.Found) error {
	var running *jobs.Job // the job that compiles it now, nil if none does
	if at.OnMiss == request.Fail {
		running = c.JobList.JobOf(at)
		if found.Stale && running != nil {
			found.Why += "; it is being compiled now"
		} else if !found.Stale {
			if f := c.builder.FailedBefore(at); f != nil {
				return f.MissError(at.Name)
			}
		}
	}
	refuses := at.OnMiss != request.Refresh &&
		c.policyOf(at.Plan.EPs).Unsupported == request.PolicyFail
	refused := func(class apierr.Class, format, hint string) error {
		return apierr.New(class, nil, format, at.Name, found.Why).
			WithFact("request_key", at.Plan.RequestKey.String()).WithHint("%s", hint)
	}
	switch {
	case found.Withheld != "":
		return reports.ErrWithheld(at.Name, at.Plan.RequestKey, found.Withheld)
	case found.Stale && (at.OnMiss == request.Fail || refuses):
		return refused(apierr.Stale, "model %q: %s",
			"recompile it for the current libraries: request it with on_miss refresh")
	case running != nil:
		return c.JobList.NotDoneError(at, running)
	case at.OnMiss == request.Fail:
		return refused(apierr.NotFound, "no build for model %q: %s",
			"compile it: repeat the request with on_miss wait")
	}
	return nil
}

// whyNotReplace returns why a refresh may not replace the stored build: only administrators may
// replace a shared build that is not damaged.
func (c *Cache) whyNotReplace(at *request.Attempt) error {
	if at.OnMiss != request.Refresh || at.Scope != "shared" || c.Rights.IsAdministrator(at.Peer) {
		return nil
	}
	for b, err := range c.lookup.StoredBuilds(at.Plan, []string{at.Scope}) {
		if err != nil {
			return err
		}
		if b.BuildKey == at.Plan.BuildKey && c.index.Journal.StateOf(b.ID).Name != index.Damaged {
			return apierr.New(apierr.NotAllowed, nil,
				"build %s is shared: only administrators may replace it", at.Plan.BuildKey).
				WithHint("request it with on_miss bypass (compile, store nothing) or store user " +
					"(a build of your own)")
		}
	}
	return nil
}

// An application may load with libraries that this daemon does not have, or may not run because
// another user chose them. Such an application can compile a model itself under a claim, and the
// daemon stores the build and serves it to that user again. The daemon does not run these
// libraries, so the build key consists of their bytes, the version of ONNX Runtime that the
// application states, and this machine. Only an equal key is a hit, because without running the
// libraries the daemon cannot judge whether another build suits them.

// hasOwnLibraries reports whether the request shows libraries of the caller's own, so that it can
// be answered although no runtime of the daemon suits it. err is the error of the search for one.
func (c *Cache) hasOwnLibraries(r *request.Request, err error) bool {
	if apierr.ClassOf(err) != apierr.Unavailable || r.Runtime.ORTVersion == "" ||
		len(r.EPs) == 0 || len(r.Group) > 0 {
		return false
	}
	switch r.OnMiss {
	case request.Refresh, request.Bypass:
		return false
	}
	for _, ep := range r.EPs {
		if ref := r.Runtime.Library(ep.Name); ref == nil || ref.File == nil {
			return false
		}
	}
	// If a path was replaced, the libraries that the caller has open are from a runtime of the
	// daemon's that was updated since.
	return c.runtimes.ReplacedPath(r.RuntimeWanted()) == ""
}

// answerForOwnLibraries answers a request for the caller's own libraries. missing is the error that
// says why no runtime of the daemon suits it.
func (c *Cache) answerForOwnLibraries(ctx context.Context, at *request.Attempt, missing error) (
	*request.Answer, error) {
	if at.Identity.Compiled {
		return nil, missing
	}
	p, err := c.planner.PlanForeign(ctx, at)
	if err != nil {
		return nil, err
	}
	at = at.WithRuntime(p.EPs[0].Library, nil).WithPlan(p)
	switch at.OnMiss {
	case request.KeyOnly:
		return at.Answer(request.Key), nil
	case request.Explain:
		return c.answers.Explain(ctx, at)
	}
	found, err := c.lookup.Find(ctx, at)
	if found.Answer != nil || err != nil {
		return c.lookup.FillAnswer(found.Answer, at), err
	}
	if at.RuntimeWanted().ShowsLibraries() || at.OnMiss != request.Wait &&
		at.OnMiss != request.Background {
		// otherwise the client repeats the request with its libraries, and that is counted
		c.countMiss(at)
	}
	switch {
	case found.Withheld != "":
		return nil, reports.ErrWithheld(at.Name, at.Plan.RequestKey, found.Withheld)
	case at.OnMiss == request.Fail:
		return nil, apierr.New(apierr.NotFound, nil, "no build for model %q: %s",
			at.Name, found.Why).
			WithFact("request_key", p.RequestKey.String()).
			WithHint("compile it: repeat the request with on_miss claim")
	case at.OnMiss == request.Background:
		return nil, missing // the daemon has no libraries to compile it with
	case at.OnMiss == request.ForClaim:
		a, err := c.Claims.ClaimOrWait(ctx, at, found.Why)
		return c.lookup.FillAnswer(a, at), err
	}
	a, err := c.Claims.Await(ctx, at, missing)
	return c.lookup.FillAnswer(a, at), err
}
