package cache

import (
	"context"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/sources"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

// explain decides as any request does, but compiles nothing, withholds nothing, and neither counts nor leases.
func (c *Cache) explain(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	out, err := c.query.Explain(ctx, &query.Question{Peer: at.Peer, Name: at.Name,
		Key: at.Plan.RequestKey, Model: at.Plan.Canonical.Model, Record: at.Plan.RecordJSON,
		Runtime: at.RuntimeName, Outside: at.Plan.Outside,
		Order: func(ctx context.Context) ([]query.Candidate, error) {
			order, err := c.order(ctx, at)
			return candidates(at, order), err
		},
		Failed:    func() *failure.Failure { return c.failedBefore(at) },
		OtherForm: func(ctx context.Context) (string, error) { return c.explainOtherForm(ctx, at) }})
	if err != nil {
		return nil, err
	}
	a := at.Answer(request.Explained)
	a.Why, a.Explanation = out.Reason, out
	return a, nil
}

// candidates are builds as an explanation tells of them.
func candidates(at *request.Attempt, order []lookup.Candidate) []query.Candidate {
	out := make([]query.Candidate, len(order))
	for i, o := range order {
		differences := identity.MakerDifferences(at.Plan.Expected(o.Build), at.ORTVersion(), o.Build)
		if at.Plan.Outside { // of libraries that are not run here little is known
			differences = slices.DeleteFunc(differences,
				func(d identity.Difference) bool { return d.Asked == "" })
		}
		out[i] = query.Candidate{Build: o.Build, Refused: o.Refused, Together: o.Together,
			Fits: o.Judgement.Reason, Members: at.NamedMembers(o.Build.Members), Differences: differences}
		if o.Judgement.Runtime != "" {
			out[i].Judge = func(b *wire.Build) { o.Judgement.Fill(b) }
		}
	}
	return out
}

// planAgain plans the request of the first of an entry's builds again, and explains its look-up of
// them to the peer.
func (c *Cache) planAgain(ctx context.Context, p request.Peer, builds []index.Build) (*query.Question, error) {
	at, err := c.replan(ctx, &builds[0])
	if err != nil {
		return nil, err
	}
	r := *at.Request
	r.Peer = p
	at = at.WithRequest(&r)
	return &query.Question{Runtime: at.RuntimeName,
		Order: func(ctx context.Context) ([]query.Candidate, error) {
			order, err := c.lookup.Order(ctx, at, func(yield func(*index.Build, error) bool) {
				for i := range builds {
					if !yield(&builds[i], nil) {
						return
					}
				}
			})
			return candidates(at, order), err
		}}, nil
}

// replan thinks a build's request through again, for the first runtime that has its execution providers.
func (c *Cache) replan(ctx context.Context, b *index.Build) (*request.Attempt, error) {
	at, err := sources.AttemptOf(b)
	if err != nil {
		return nil, err
	}
	last := runtimes.None(at.EPs, nil)
	for _, rt := range c.runtimes.All() {
		rc, err := c.runtimes.Content(ctx, rt, func(string) {})
		if err != nil || !rc.HasAll(at.EPs) {
			continue // another one may do
		}
		var planned *request.Attempt
		if planned, last = c.planner.Planned(ctx, at.WithRuntime(rt.Name, rc)); last == nil {
			return planned, nil
		}
	}
	return nil, last
}

// order gives the entry's builds as a look-up goes through them.
func (c *Cache) order(ctx context.Context, at *request.Attempt) ([]lookup.Candidate, error) {
	out, err := c.lookup.Order(ctx, at, c.lookup.Stored(at.Plan, at.Scopes))
	if err != nil || at.Plan.Outside || slices.ContainsFunc(out, func(o lookup.Candidate) bool { return o.Refused == "" }) {
		return out, err
	}
	groups, err := c.orderGroups(ctx, at)
	return append(out, groups...), err
}

// orderGroups is order for the groups that have the request's model among their members.
func (c *Cache) orderGroups(ctx context.Context, at *request.Attempt) ([]lookup.Candidate, error) {
	member, err := c.lookup.Member(ctx, at.WithPhase(func(string) {}))
	if member == nil || err != nil {
		return nil, err
	}
	return c.lookup.Order(ctx, member, func(yield func(*index.Build, error) bool) {
		for b, err := range c.lookup.Stored(member.Plan, at.Scopes) {
			if (err != nil || c.rights.MaySee(at.Peer, b.ID, b.Scope)) && !yield(b, err) { // of the others one does not hear
				return
			}
		}
	})
}

// explainPassThrough explains the answer to a model that is compiled already.
func explainPassThrough(a *request.Answer) *request.Answer {
	reason := strings.TrimPrefix(a.Why, compiledAlready)
	e := &wire.Explanation{Decision: request.PassThrough, Reason: reason, Runtime: a.Runtime}
	if a.Compatibility.Reason != "" {
		e.Reason += "; " + a.Compatibility.Reason
	}
	e.Reason = wire.Valid(e.Reason)
	a.Outcome, a.Explanation = request.Explained, e
	return a
}
