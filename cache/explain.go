package cache

import (
	"context"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

// explain decides as any request does, but compiles nothing, withholds nothing, and neither counts nor leases.
func (c *Cache) explain(ctx context.Context, at *attempt) (*Answer, error) {
	out, err := c.query.Explain(ctx, &query.Question{Peer: at.Peer, Name: at.Name,
		Key: at.plan.requestKey, Model: at.plan.canonical.Model, Record: at.plan.recordJSON,
		Runtime: at.runtime, Outside: at.plan.outside,
		Order: func(ctx context.Context) ([]query.Candidate, error) {
			order, err := c.order(ctx, at)
			return at.candidates(order), err
		},
		Failed:    func() *failure.Failure { return c.failedBefore(at) },
		OtherForm: func(ctx context.Context) (string, error) { return c.explainOtherForm(ctx, at) }})
	if err != nil {
		return nil, err
	}
	a := at.answer(Explained)
	a.Why, a.Explanation = out.Reason, out
	return a, nil
}

// candidates are builds as an explanation tells of them.
func (at *attempt) candidates(order []considered) []query.Candidate {
	out := make([]query.Candidate, len(order))
	for i, o := range order {
		differences := identity.MakerDifferences(at.plan.expected(o.build), at.ortVersion(), o.build)
		if at.plan.outside { // of libraries that are not run here little is known
			differences = slices.DeleteFunc(differences,
				func(d identity.Difference) bool { return d.Asked == "" })
		}
		out[i] = query.Candidate{Build: o.build, Refused: o.refused, Together: o.together,
			Fits: o.judgement.Reason, Members: at.named(o.build.Members), Differences: differences}
		if o.judgement.Runtime != "" {
			out[i].Judge = func(b *wire.Build) { setJudgement(b, o.judgement) }
		}
	}
	return out
}

// planAgain plans the request of the first of an entry's builds again, and explains its look-up of
// them to the peer.
func (c *Cache) planAgain(ctx context.Context, p Peer, builds []index.Build) (*query.Question, error) {
	at, err := c.replan(ctx, &builds[0])
	if err != nil {
		return nil, err
	}
	r := *at.Request
	r.Peer = p
	at = at.withRequest(&r)
	return &query.Question{Runtime: at.runtime,
		Order: func(ctx context.Context) ([]query.Candidate, error) {
			order, err := c.arrange(ctx, at, func(yield func(*index.Build, error) bool) {
				for i := range builds {
					if !yield(&builds[i], nil) {
						return
					}
				}
			})
			return at.candidates(order), err
		}}, nil
}

// replan thinks a build's request through again, for the first runtime that has its execution providers.
func (c *Cache) replan(ctx context.Context, b *index.Build) (*attempt, error) {
	at, err := c.attemptOf(b)
	if err != nil {
		return nil, err
	}
	last := runtimes.None(at.EPs, nil)
	for _, rt := range c.runtimes.All() {
		rc, err := c.runtimes.Content(ctx, rt, func(string) {})
		if err != nil || !rc.HasAll(at.EPs) {
			continue // another one may do
		}
		var planned *attempt
		if planned, last = c.planned(ctx, at.withRuntime(rt.Name, rc)); last == nil {
			return planned, nil
		}
	}
	return nil, last
}

// order gives the entry's builds as a look-up goes through them.
func (c *Cache) order(ctx context.Context, at *attempt) ([]considered, error) {
	out, err := c.arrange(ctx, at, c.stored(at.plan, at.look))
	if err != nil || at.plan.outside || slices.ContainsFunc(out, func(o considered) bool { return o.refused == "" }) {
		return out, err
	}
	groups, err := c.orderGroups(ctx, at)
	return append(out, groups...), err
}

// orderGroups is order for the groups that have the request's model among their members.
func (c *Cache) orderGroups(ctx context.Context, at *attempt) ([]considered, error) {
	member, err := c.planMember(ctx, at.withPhase(func(string) {}))
	if member == nil || err != nil {
		return nil, err
	}
	return c.arrange(ctx, member, func(yield func(*index.Build, error) bool) {
		for b, err := range c.stored(member.plan, at.look) {
			if (err != nil || c.rights.MaySee(at.Peer, b.ID, b.Scope)) && !yield(b, err) { // of the others one does not hear
				return
			}
		}
	})
}

// expected is what would make the build, for comparing it with what made the build. Of the plan's
// own builds, the graphs may state more than a one-node compile does.
func (p *plan) expected(b *index.Build) []index.EPFacts {
	if b.BuildKey != p.buildKey || len(b.EPs) != len(p.facts) {
		return p.facts
	}
	facts := slices.Clone(p.facts)
	for i := range facts {
		f, made := &facts[i], &b.EPs[i]
		f.SDKVersion, f.HardwareArchitecture = made.SDKVersion, made.HardwareArchitecture
		f.CompatibilityString = made.CompatibilityString
	}
	return facts
}

// explainPassThrough explains the answer to a model that is compiled already.
func explainPassThrough(a *Answer) *Answer {
	reason := strings.TrimPrefix(a.Why, compiledAlready)
	e := &wire.Explanation{Decision: PassThrough, Reason: reason, Runtime: a.Runtime}
	if a.Compatibility.Reason != "" {
		e.Reason += "; " + a.Compatibility.Reason
	}
	e.Reason = wire.Valid(e.Reason)
	a.Outcome, a.Explanation = Explained, e
	return a
}
