package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/reports"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
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
	ctx = withTelling(ctx, t)
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
	at, err := c.identified(ctx, at)
	if err != nil {
		return nil, err
	}
	rt, rc, err := c.runtimes.Resolve(ctx, at.Wanted(), at.Phase)
	if err != nil && c.bringsLibraries(at.Request, err) {
		a, err := c.answerOwn(ctx, at, err)
		return withoutVerifying(a, at), err
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
		if err = c.verifyOutput(ctx, at, a); err != nil && a.View != nil {
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
		return c.answerCompiled(ctx, at)
	}
	at, err := c.planned(ctx, at)
	if err != nil {
		return nil, err
	}
	if at.OnMiss == request.KeyOnly {
		return at.Answer(request.Key), nil
	}
	if at.OnMiss == request.Explain {
		return c.explain(ctx, at)
	}
	var found search
	if at.OnMiss != request.Refresh && at.OnMiss != request.Bypass {
		if found, err = c.lookUp(ctx, at); found.answer != nil || err != nil {
			return c.finish(found.answer, at), err
		}
		if a, err := c.lookUpMember(ctx, at); a != nil || err != nil {
			return a, err
		}
		if found.doubted == 0 {
			if a, err := c.otherForm(ctx, at); a != nil || err != nil {
				return c.finish(a, at), err
			}
		}
		c.index.Counters.Add("misses", 1)
	}
	if at.OnMiss == request.Fail && !found.stale {
		if f := c.failedBefore(at); f != nil {
			return nil, f.Missing(at.Name)
		}
	}
	if at.OnMiss == request.Fail {
		if found.running = c.underWay(at); found.running != nil && found.stale {
			found.why += "; it is being compiled now"
		}
	}
	if err := c.mayCompile(at, &found); err != nil {
		return nil, err
	}
	if found.doubted > 0 {
		at = at.Apart()
	}
	if err := c.mayReplace(at); err != nil {
		return nil, err
	}
	if at.OnMiss == request.ForClaim {
		a, err := c.claims.claimOrWait(ctx, at, found.why)
		return c.finish(a, at), err
	}
	if at.OnMiss == request.Background {
		return c.compileLater(ctx, at, found.why)
	}
	a, err := c.compileOnce(ctx, at, found.why)
	if a != nil && a.Compatibility.Source == "" {
		a.Compatibility = judge.Judgement{Verdict: compilers.Optimal, Source: judge.SourceLibrary, Reason: "made now", At: c.now(), Runtime: at.RuntimeName}
	}
	return c.finish(a, at), err
}

// mayCompile says why a miss is not made good by compiling, if it is not.
func (c *Cache) mayCompile(at *request.Attempt, found *search) error {
	switch {
	case found.doubted >= reports.MaxRounds:
		return errDoubted(at)
	case found.stale && (at.OnMiss == request.Fail || c.policyOf(at.Plan.EPs).Unsupported == request.PolicyFail && at.OnMiss != request.Refresh):
		return apierr.New(apierr.Stale, nil, "model %q: %s", at.Name, found.why).WithFact("request_key", at.Plan.RequestKey.String()).
			WithHint("compile it for what is here now: ask with on_miss refresh")
	case at.OnMiss == request.Fail && found.running != nil:
		return c.notYet(at, found)
	case at.OnMiss == request.Fail:
		return apierr.New(apierr.NotFound, nil, "no build for model %q: %s", at.Name, found.why).WithFact("request_key", at.Plan.RequestKey.String()).
			WithHint("compile it: ask again with on_miss wait")
	}
	return nil
}

// mayReplace: a refresh takes the place of the build that there is, and a shared one is not every user's to replace.
func (c *Cache) mayReplace(at *request.Attempt) error {
	if at.OnMiss != request.Refresh || at.Scope != "shared" || c.rights.Administrator(at.Peer) {
		return nil
	}
	for b, err := range c.stored(at.Plan, []string{at.Scope}) {
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

// finish fills in what every answer with a build says.
func (c *Cache) finish(a *request.Answer, at *request.Attempt) *request.Answer {
	if a == nil {
		return nil
	}
	a.RequestKey, a.ModelDigest, a.Record = at.Plan.RequestKey, at.Plan.Canonical.Model, at.Plan.RecordJSON
	a.Runtime = at.RuntimeName
	a.SessionOptions, a.GraphOptimizationLevel = at.SessionOptions, at.Plan.Canonical.GraphOptimizationLevel // of a claim: to compile with
	if a.Build != nil {
		a.SessionOptions, a.GraphOptimizationLevel = a.Build.SessionOptions, cmp.Or(a.Compatibility.Level, a.Build.GraphOptimizationLevel)
		a.Warnings = append(a.Warnings, a.Build.Warnings...)
		if !c.readOnly {
			a.Warnings = append(a.Warnings, c.gains.Of(a.Build.ID).Warnings()...)
		}
		a.TellMembers(at.Request, at.Plan.Canonical.Model)
		c.rights.Saw(at.Peer, a.Build)
	}
	for _, name := range slices.Sorted(maps.Keys(at.FreeDimensions)) {
		if !slices.Contains(at.Identity.FreeDims, name) {
			a.Warnings = append(a.Warnings, fmt.Sprintf("no input of the model has a free dimension %q; %s", name, namedDimensions(at.Identity.FreeDims)))
		}
	}
	a.ProviderOptions = make(map[string]map[string]string, len(at.EPs))
	for _, ep := range at.Plan.EPs {
		a.ProviderOptions[ep.Name] = ep.Options
	}
	return a
}

// namedDimensions lists the free dimensions of a model's inputs, for people.
func namedDimensions(names []string) string {
	if len(names) == 0 {
		return "none of them is free"
	}
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = strconv.Quote(name)
	}
	return "they have " + strings.Join(quoted, ", ")
}
