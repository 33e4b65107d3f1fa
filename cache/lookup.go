package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
)

// search is what a look-up found.
type search struct {
	answer *request.Answer // nil: nothing to serve
	why    string          // there is none
	stale  bool            // there are builds, and they must not be loaded with this runtime

	running *jobs.Job // compiles it at this moment; nil: none, or nobody asked

	doubted int // builds that would be served if the caller had not reported them
}

// lookUp finds the best build for the caller's runtime, and makes its view ready. Without one it says why not.
func (c *Cache) lookUp(ctx context.Context, at *request.Attempt) (search, error) {
	found := search{why: "never compiled for this request"}
	if at.Plan.Outside {
		found.why += " with these libraries"
	}
	some := false
	for one, err := range c.inOrder(ctx, at, c.stored(at.Plan, at.Scopes)) {
		if err != nil {
			return found, err
		}
		some = true
		b := one.build
		switch {
		case at.Plan.Outside && !at.Plan.MadeExactly(b): // nothing is known of it
		case one.barred:
			found.why = one.refused
			c.countDoubt(at, b, &found)
		case cas.Unsound(one.untried) || errors.Is(one.untried, cas.ErrNotFound):
			found.why = c.store.WithholdDamaged(ctx, b, one.untried)
		case one.refused != "":
			found.why = fmt.Sprintf("the build of %s by %s is %s: %s", b.Created.Format(time.RFC3339), judge.MakerNames(b), one.judgement.Verdict, one.refused)
			found.stale = true
		default:
			if err := c.try(ctx, at, b, one.judgement, &found); found.answer != nil || err != nil {
				return found, err
			}
		}
	}
	if !some {
		if gone := c.query.WhyNone(at.Peer, at.Plan.RequestKey); gone != "" {
			found.why = gone
		}
	}
	return found, nil
}

// countDoubt notes of a build that it is not served only because the caller reported it, if that is so.
func (c *Cache) countDoubt(at *request.Attempt, b *index.Build, found *search) {
	switch {
	case !at.Plan.MadeExactly(b) || c.reports.Doubt(b.ID, at.Peer.UID) == "":
	case at.Plan.Outside:
		found.doubted = c.reports.Doubted(at.Plan.RequestKey, at.Peer.UID) // an earlier one is superseded, and gone
	default:
		found.doubted++
	}
}

// try serves the build, or notes in found why it cannot be.
func (c *Cache) try(ctx context.Context, at *request.Attempt, b *index.Build, j judge.Judgement, found *search) error {
	a, err := c.serve(ctx, b, at.Phase)
	if err == nil {
		a.Outcome, a.Compatibility, a.Why = request.Hit, j, j.Reason
		found.answer = a
		c.used(b)
		c.freshen(at, b, j)
		return nil
	}
	if ctx.Err() != nil {
		return request.ContextError(ctx, at.Name)
	}
	if c.readOnly {
		at.Reading.Pass(b, err)
		return nil
	}
	if errors.Is(err, store.ErrGone) {
		found.why = store.ErrGone.Error()
		*at.Unserved = append(*at.Unserved, b.ID) // until it is quite gone, it is not to be found once more instead of being compiled
		return nil
	}
	if errors.Is(err, packing.ErrNoRoom) {
		return noCopy(b, err)
	}
	found.why = c.store.WithholdDamaged(ctx, b, err)
	*at.Unserved = append(*at.Unserved, b.ID)
	return nil
}

// used counts a hit, in memory: the index writes it down within seconds.
func (c *Cache) used(b *index.Build) {
	c.index.Uses.Add(b.ID, c.now(), 1, b.CompileSeconds)
	c.index.Counters.Add("hits", 1)
	c.index.Counters.Add("saved_milliseconds", uint64(b.CompileSeconds*1000))
}

// freshen wants a build anew that is served and not the best there could be.
func (c *Cache) freshen(at *request.Attempt, b *index.Build, j judge.Judgement) {
	if at.Plan.Outside || at.Adopting {
		return // with libraries that are not run here, or from an artefact
	}
	r := at.Request
	if at.AsMember {
		r = nil // it brings one of the group's models
	}
	policy := c.policyOf(at.Plan.EPs)
	switch {
	case j.Verdict == compilers.PreferRecompilation && cmp.Or(policy.PreferRecompilation, request.PolicyServeAndRefresh) == request.PolicyServeAndRefresh:
		c.wantAnew(b, j.Runtime, "compiling it anew is preferred: "+j.Reason, r)
	case policy.MaxAge > 0 && c.now().Sub(b.Compiled()) > policy.MaxAge:
		c.wantAnew(b, j.Runtime, fmt.Sprintf("older than %s", policy.MaxAge), r)
	}
}

// suited is a build with its judgement for a runtime.
type suited struct {
	build     *index.Build
	judgement judge.Judgement
	untried   error // why it could not be judged; nil: it was
}

// rank judges builds, and puts the best first; among equals the newest. One that cannot be judged, because its files
// are damaged or its load check does not end, is unknown, and keeps nobody from the others.
func (c *Cache) rank(ctx context.Context, a *request.Against, builds []*index.Build, phase func(string)) ([]suited, error) {
	var out []suited
	for _, b := range builds {
		if !c.judges.Knows(a.Target(), b) {
			phase("judging")
		}
		j, err := c.judge(ctx, a, b)
		if err != nil {
			if runtimes.Unsettled(ctx, err) {
				return nil, err
			}
			if errors.Is(err, packing.ErrNoRoom) {
				return nil, noCopy(b, err)
			}
			j = judge.Judgement{Verdict: compilers.Unknown, Reason: "whether it loads could not be tried: " + err.Error(), At: c.now(), Runtime: a.Runtime}
		}
		out = append(out, suited{b, j, err})
	}
	slices.SortStableFunc(out, func(a, b suited) int {
		return cmp.Or(judge.Badness(a.judgement.Verdict)-judge.Badness(b.judgement.Verdict), b.build.Created.Compare(a.build.Created))
	})
	return out, nil
}

// refused says why a build with this judgement is not served, "" if it is.
func (c *Cache) refused(at *request.Attempt, j judge.Judgement) string {
	policy := c.policyOf(at.Plan.EPs)
	switch {
	case j.Verdict == compilers.Optimal:
	case j.Verdict == compilers.PreferRecompilation && at.OnlyOptimal:
		return "refused by session.fail_on_suboptimal_compiled_model: " + j.Reason
	case j.Verdict == compilers.PreferRecompilation && policy.PreferRecompilation != request.PolicyRefuse:
	case j.Verdict == compilers.Unknown && policy.Unknown == request.PolicyServe:
	case j.Verdict == compilers.PreferRecompilation:
		return "refused by policy: " + j.Reason
	default:
		return cmp.Or(j.Reason, j.Verdict.String())
	}
	return ""
}

// barred says why a build is for nobody, or not for this caller, whatever its runtime; "" if it may be.
func (c *Cache) barred(at *request.Attempt, b *index.Build) string {
	state, doubt := c.index.Journal.StateOf(b.ID), c.reports.Doubt(b.ID, at.Peer.UID)
	switch {
	case at.AsMember && !c.rights.MaySee(at.Peer, b.ID, b.Scope):
		return "it is of models that you have not asked for"
	case state.Name == index.Withheld || state.Name == index.Damaged:
		return fmt.Sprintf("the build of %s is %s: %s", b.Created.Format(time.RFC3339), state.Name, state.Reason)
	case doubt != "":
		return fmt.Sprintf("the build of %s is withheld from you: %s", b.Created.Format(time.RFC3339), doubt)
	case at.OtherORT(b.ORTVersion):
		return fmt.Sprintf("strict_ort: the build was made under ONNX Runtime %s, not %s", b.ORTVersion, at.ORTVersion())
	}
	return ""
}

// serve gives a lease on the build's view, after every file of it was compared with what was verified.
func (c *Cache) serve(ctx context.Context, b *index.Build, phase func(string)) (*request.Answer, error) {
	if c.readOnly {
		return c.serveAsItLies(ctx, b)
	}
	done, err := c.store.Take(b.ID)
	if err != nil {
		return nil, err
	}
	defer done()
	for attempt := 0; ; attempt++ {
		v, err := c.viewOf(ctx, b, phase)
		if err != nil {
			return nil, c.store.GoneMeanwhile(b.ID, err)
		}
		a, err := leased(b, v)
		if errors.Is(err, fs.ErrNotExist) && attempt < 3 {
			// Taken away, or being taken away, between the check and the lease.
			c.views.Drop(b.ID, v, 0)
			continue
		}
		return a, err
	}
}

func leased(b *index.Build, v *views.View) (*request.Answer, error) {
	f, err := v.Lease()
	if err != nil {
		return nil, err
	}
	return &request.Answer{Build: b, View: f, Path: v.Path(), Graph: v.GraphPath(), LeasedView: v}, nil
}
