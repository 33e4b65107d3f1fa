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

// Acquire answers one request: with the build that there is, or with one that is compiled now.
// progress is called at each change of phase, from any goroutine, and not after Acquire returned.
func (c *Cache) Acquire(ctx context.Context, r *request.Request,
	progress func(request.Progress)) (*request.Answer, error) {
	return c.acquireResumed(ctx, r, request.ResumedJob{}, progress)
}

// acquireResumed is Acquire for a job that an earlier daemon did not finish.
func (c *Cache) acquireResumed(ctx context.Context, r *request.Request, resumed request.ResumedJob,
	progress func(request.Progress)) (*request.Answer, error) {
	t := jobs.NewProgressReporter(progress, c.now())
	defer t.End()
	defer c.Store.Packer().BeginRequest()()
	ctx = lookup.WithProgress(ctx, t)
	at, err := request.NewAttempt(r, t)
	if err != nil {
		return nil, err
	}
	at.Resumed = resumed
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
			return a, err
		}
		t.Phase("probing") // begin again, because the runtime has changed or the build was removed
	}
}

// How often a request is tried.
const (
	acquireAttempts = 3  // while its runtime is being replaced
	removedAttempts = 10 // while its build is removed, or replaced, each time before the lease
)

func (c *Cache) acquire(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
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
	var slow atomic.Bool
	phase := at.Phase
	at = at.WithRuntime(rt.Name, rc)
	at.Phase = func(name string) { // the copy is this function's own
		slow.Store(true)
		phase(name)
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
	return a, nil
}

// checkNotReplaced refuses an answer for libraries that were replaced while something was verified,
// loaded or compiled for it. Other answers were compared with the libraries' files just before.
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
	at, err := c.planner.WithPlan(ctx, at)
	if err != nil {
		return nil, err
	}
	switch at.OnMiss {
	case request.KeyOnly:
		return at.Answer(request.Key), nil
	case request.Explain:
		return c.answers.Explain(ctx, at)
	}
	var found lookup.Found
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
	if found.Withheld > 0 {
		at = at.WithOwnScope()
	}
	if at.OnMiss == request.Refresh {
		c.remotes.Forget(at.Plan.BuildKey)
	}
	// other requests fetch in their jobs
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
			a.Compatibility = judge.Judgement{Verdict: compilers.Optimal,
				Source: judge.SourceLibrary,
				Reason: "compiled for this request", At: c.now(), Runtime: at.RuntimeName}
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
		if found.Withheld == 0 {
			found.Answer, err = c.builder.Convert(ctx, at)
		}
	}
	found.Answer = c.lookup.FillAnswer(found.Answer, at)
	return found, err
}

// countMiss counts a request that has no build, unless it only asks whether there is one.
func (c *Cache) countMiss(at *request.Attempt) {
	if at.OnMiss != request.Fail {
		c.index.Counters.Add("misses", 1)
	}
}

// whyNotCompile returns why a miss is not compiled; nil: it is.
func (c *Cache) whyNotCompile(at *request.Attempt, found *lookup.Found) error {
	var running *jobs.Job // compiles it at this moment
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
	case found.Withheld >= reports.MaxRounds:
		return reports.ErrWithheld(at.Name, at.Plan.RequestKey)
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

// whyNotReplace returns why a refresh may not replace the build that there is: a shared build is
// replaced for administrators only, unless it is damaged.
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
// another user chose them. It can still have what it compiled itself, under a claim, kept and
// served to it again. Such a build is known by what the application shows of its libraries, because
// they are not run here: their bytes, the version of ONNX Runtime that it states, and this machine.
// All of it is in the build key, and only an equal key is a hit, because without the libraries it
// cannot be judged whether another build suits them.

// hasOwnLibraries reports whether the request can be answered though no runtime here is for it.
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
	// else what the caller has open is no whole runtime
	return c.runtimes.ReplacedPath(r.RuntimeWanted()) == ""
}

// answerForOwnLibraries answers a request for libraries that are the caller's own. missing says why
// no runtime here will do.
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
		c.countMiss(at) // else the client asks again, and shows its libraries
	}
	switch {
	case found.Withheld >= reports.MaxRounds:
		return nil, reports.ErrWithheld(at.Name, at.Plan.RequestKey)
	case at.OnMiss == request.Fail:
		return nil, apierr.New(apierr.NotFound, nil, "no build for model %q: %s",
			at.Name, found.Why).
			WithFact("request_key", p.RequestKey.String()).
			WithHint("compile it: repeat the request with on_miss claim")
	case at.OnMiss == request.Background:
		return nil, missing // no job of the daemon's can compile it
	case at.OnMiss == request.ForClaim:
		a, err := c.Claims.ClaimOrWait(ctx, at, found.Why)
		return c.lookup.FillAnswer(a, at), err
	}
	a, err := c.Claims.Await(ctx, at, missing)
	return c.lookup.FillAnswer(a, at), err
}
