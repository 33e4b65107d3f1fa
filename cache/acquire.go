package cache

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/trial"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
)

// Acquire answers one request: with the build that there is, or with one that is compiled now. progress is called
// at each change of phase, from any goroutine, and not after Acquire returned.
func (c *Cache) Acquire(ctx context.Context, r *request.Request, progress func(request.Progress)) (*request.Answer, error) {
	return c.acquireResumed(ctx, r, request.ResumedJob{}, progress)
}

// acquireResumed is Acquire for a job that an earlier daemon did not finish.
func (c *Cache) acquireResumed(ctx context.Context, r *request.Request, resumed request.ResumedJob,
	progress func(request.Progress)) (*request.Answer, error) {
	t := jobs.NewTelling(progress, c.now())
	defer t.End()
	defer c.store.Packer().Asking()()
	ctx = lookup.WithTelling(ctx, t)
	at, err := request.NewAttempt(r, t)
	if err != nil {
		return nil, err
	}
	at.Resumed = resumed
	for tries := 1; ; tries++ {
		a, err := c.acquire(ctx, at)
		moved := errors.Is(err, runtimes.ErrMoving) || errors.Is(err, runtimes.ErrReplaced)
		most := acquireAttempts
		if errors.Is(err, store.ErrGone) {
			moved, most = true, goneAttempts
		}
		if !moved || tries >= most || ctx.Err() != nil {
			if err == nil && a.LeasedView != nil && !r.HoldsView {
				c.views.Told(a.LeasedView)
			}
			return a, err
		}
		t.Phase("probing") // the runtime changed under the work, or the build is gone: begin again, with what is there now
	}
}

// acquireAttempts bounds how often a request begins again because its runtime is being replaced, goneAttempts for a build that is
// collected, or replaced by another's refresh, each time before it is taken.
const (
	acquireAttempts = 3
	goneAttempts    = 10
)

func (c *Cache) acquire(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	at, err := c.planner.Identified(ctx, at)
	if err != nil {
		return nil, err
	}
	rt, rc, err := c.runtimes.Resolve(ctx, at.Wanted(), at.Phase)
	if err != nil && c.bringsLibraries(at.Request, err) {
		a, err := c.answerOwn(ctx, at, err)
		trial.NotLoaded(a, at)
		return a, err
	}
	if err != nil {
		return nil, err
	}
	var slow atomic.Bool
	at = at.WithRuntime(rt.Name, rc)
	a, err := c.answer(ctx, at.WithPhase(func(name string) {
		slow.Store(true)
		at.Phase(name)
	}))
	if err == nil && at.VerifyOutput > 0 {
		if err = c.trials.VerifyOutput(ctx, at, a); err != nil && a.View != nil {
			err = errors.Join(err, a.View.Close())
		}
	}
	if err == nil && slow.Load() {
		err = c.unmoved(a, at)
	}
	if err != nil {
		return nil, err
	}
	return a, nil
}

// unmoved refuses an answer that took its time, to verify, to load or to compile something, and is for libraries that
// were replaced meanwhile. One that took none was compared with the files just before.
func (c *Cache) unmoved(a *request.Answer, at *request.Attempt) error {
	if a.View == nil || at.Content.Stands() {
		return nil
	}
	return errors.Join(apierr.New(apierr.Busy, runtimes.ErrMoving, "model %q: the runtime's libraries changed meanwhile", at.Name).WithHint("ask again when the update is done"), a.View.Close())
}

func (c *Cache) answer(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	if at.Identity.Compiled {
		return c.compiled.Answer(ctx, at)
	}
	at, err := c.planner.Planned(ctx, at)
	if err != nil {
		return nil, err
	}
	if at.OnMiss == request.KeyOnly {
		return at.Answer(request.Key), nil
	}
	if at.OnMiss == request.Explain {
		return c.explainer.Explain(ctx, at)
	}
	var found lookup.Found
	var running *jobs.Job // compiles it at this moment
	if at.OnMiss != request.Refresh && at.OnMiss != request.Bypass {
		if found, err = c.lookup.Find(ctx, at); found.Answer != nil || err != nil {
			return c.lookup.Finish(found.Answer, at), err
		}
		if a, err := c.lookup.FindMember(ctx, at); a != nil || err != nil {
			return a, err
		}
		if found.Doubted == 0 {
			if a, err := c.builder.Convert(ctx, at); a != nil || err != nil {
				return c.lookup.Finish(a, at), err
			}
		}
		c.index.Counters.Add("misses", 1)
	}
	if at.OnMiss == request.Fail && !found.Stale {
		if f := c.builder.FailedBefore(at); f != nil {
			return nil, f.Missing(at.Name)
		}
	}
	if at.OnMiss == request.Fail {
		if running = c.jobList.Of(at); running != nil && found.Stale {
			found.Why += "; it is being compiled now"
		}
	}
	if err := c.mayCompile(at, &found, running); err != nil {
		return nil, err
	}
	if found.Doubted > 0 {
		at = at.Apart()
	}
	if err := c.mayReplace(at); err != nil {
		return nil, err
	}
	if at.OnMiss == request.ForClaim {
		a, err := c.claims.ClaimOrWait(ctx, at, found.Why)
		return c.lookup.Finish(a, at), err
	}
	if at.OnMiss == request.Background {
		return c.builder.CompileLater(ctx, at, found.Why)
	}
	a, err := c.builder.Compile(ctx, at, found.Why)
	if a != nil && a.Compatibility.Source == "" {
		a.Compatibility = judge.Judgement{Verdict: compilers.Optimal, Source: judge.SourceLibrary, Reason: "made now", At: c.now(), Runtime: at.RuntimeName}
	}
	return c.lookup.Finish(a, at), err
}

// mayCompile says why a miss is not made good by compiling, if it is not.
func (c *Cache) mayCompile(at *request.Attempt, found *lookup.Found, running *jobs.Job) error {
	switch {
	case found.Doubted >= reports.MaxRounds:
		return reports.ErrDoubted(at.Name, at.Plan.RequestKey)
	case found.Stale && (at.OnMiss == request.Fail || c.policyOf(at.Plan.EPs).Unsupported == request.PolicyFail && at.OnMiss != request.Refresh):
		return apierr.New(apierr.Stale, nil, "model %q: %s", at.Name, found.Why).WithFact("request_key", at.Plan.RequestKey.String()).
			WithHint("compile it for what is here now: ask with on_miss refresh")
	case at.OnMiss == request.Fail && running != nil:
		return c.jobList.NotYet(at, running)
	case at.OnMiss == request.Fail:
		return apierr.New(apierr.NotFound, nil, "no build for model %q: %s", at.Name, found.Why).WithFact("request_key", at.Plan.RequestKey.String()).
			WithHint("compile it: ask again with on_miss wait")
	}
	return nil
}

// mayReplace: a refresh takes the place of the build that there is, and a shared one is not every user's to replace.
func (c *Cache) mayReplace(at *request.Attempt) error {
	if at.OnMiss != request.Refresh || at.Scope != "shared" || c.rights.Administrator(at.Peer) {
		return nil
	}
	for b, err := range c.lookup.Stored(at.Plan, []string{at.Scope}) {
		if err != nil {
			return err
		}
		if b.BuildKey == at.Plan.BuildKey && c.index.Journal.StateOf(b.ID).Name != index.Damaged {
			return apierr.New(apierr.NotAllowed, nil, "build %s is shared: replacing it is for administrators", at.Plan.BuildKey).
				WithHint("bypass compiles for this request alone, and store user keeps a build of your own")
		}
	}
	return nil
}
