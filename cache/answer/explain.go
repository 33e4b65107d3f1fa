// Package answer answers requests that compile nothing. It explains how a request would be
// answered: it runs the steps of a look-up, but compiles, serves and counts nothing. Models that
// have EPContext nodes already are judged and passed through, or adopted if their user wants that.
package answer

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/cache/build"
	"github.com/epcached/epcached/cache/claims"
	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

// Answerer answers requests that compile nothing. All fields must be set.
type Answerer struct {
	*build.Builder
	Query  *query.Queries
	Claims *claims.Claims
	// Remotes returns for each remote a text that says whether it would be queried.
	Remotes func(*request.Attempt) []string
}

// Explain decides as Acquire does, but compiles, withholds, counts and leases nothing.
func (c *Answerer) Explain(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	out, err := c.Query.Explain(ctx, &query.ExplainRequest{Peer: at.Peer, Name: at.Name,
		Key: at.Plan.RequestKey, Model: at.Plan.Canonical.Model, Record: at.Plan.RecordJSON,
		Runtime: at.RuntimeName, Outside: at.Plan.Outside,
		Order: func(ctx context.Context) ([]query.Candidate, error) {
			order, err := c.candidateOrder(ctx, at)
			return candidates(at, order), err
		},
		Failed:    func() *failure.Failure { return c.FailedBefore(at) },
		OtherForm: func(ctx context.Context) (string, error) { return c.otherForm(ctx, at) }})
	if err != nil {
		return nil, err
	}
	out.Remotes = c.Remotes(at)
	out.Reason = strings.Join(append([]string{out.Reason}, at.Superseded.Warnings...), "; ")
	a := at.Answer(request.Explained)
	a.Why, a.Explanation = out.Reason, out
	return a, nil
}

// candidates converts candidates to those of an explanation.
func candidates(at *request.Attempt, order []lookup.Candidate) []query.Candidate {
	out := make([]query.Candidate, len(order))
	for i, o := range order {
		differences := identity.MakerDifferences(at.Plan.ExpectedFacts(o.Build),
			at.ORTVersion(), o.Build)
		if at.Plan.Outside { // without running the libraries there are few facts
			differences = slices.DeleteFunc(differences,
				func(d identity.Difference) bool { return d.Asked == "" })
		}
		out[i] = query.Candidate{Build: o.Build, Refused: o.Refused, Together: o.Together,
			Fits: o.Judgement.Reason, Members: at.NamedMembers(o.Build.Members),
			Differences: differences}
		if o.Judgement.Runtime != "" {
			out[i].Judge = func(b *wire.Build) { o.Judgement.FillBuild(b) }
		}
	}
	return out
}

// ExplainEntry plans the request of an entry's first build, and explains its look-up to the peer.
func (c *Answerer) ExplainEntry(ctx context.Context, p request.Peer, builds []index.Build) (
	*query.ExplainRequest, error) {
	at, err := c.replan(ctx, &builds[0])
	if err != nil {
		return nil, err
	}
	r := *at.Request
	r.Peer = p
	at = at.WithRequest(&r)
	return &query.ExplainRequest{Runtime: at.RuntimeName,
		Order: func(ctx context.Context) ([]query.Candidate, error) {
			order, err := c.Lookup.Ranked(ctx, at, func(yield func(*index.Build, error) bool) {
				for i := range builds {
					if !yield(&builds[i], nil) {
						return
					}
				}
			})
			return candidates(at, order), err
		}}, nil
}

// replan plans a build's request again, for the first runtime that has its execution providers.
func (c *Answerer) replan(ctx context.Context, b *index.Build) (*request.Attempt, error) {
	at, err := workspace.AttemptOf(b)
	if err != nil {
		return nil, err
	}
	last := runtimes.NoRuntimeError(at.EPs, nil)
	for _, rt := range c.Planner.Runtimes.All() {
		rc, err := c.Planner.Runtimes.Content(ctx, rt, func(string) {})
		if err != nil || !rc.HasAll(at.EPs) {
			continue // try the next runtime
		}
		var planned *request.Attempt
		if planned, last = c.Planner.WithPlan(ctx, at.WithRuntime(rt.Name, rc)); last == nil {
			return planned, nil
		}
	}
	return nil, last
}

// candidateOrder returns the builds of the entry in the order in which a look-up considers them.
func (c *Answerer) candidateOrder(ctx context.Context,
	at *request.Attempt) ([]lookup.Candidate, error) {
	out, err := c.Lookup.Ranked(ctx, at, c.Lookup.StoredBuilds(at.Plan, at.Scopes))
	served := func(o lookup.Candidate) bool { return o.Refused == "" }
	if err != nil || at.Plan.Outside || slices.ContainsFunc(out, served) {
		return out, err
	}
	groups, err := c.orderGroups(ctx, at)
	return append(out, groups...), err
}

// orderGroups orders the groups that have the request's model as a member, as candidateOrder does.
func (c *Answerer) orderGroups(ctx context.Context, at *request.Attempt) (
	[]lookup.Candidate, error) {
	member, err := c.Lookup.GroupAttempt(ctx, at.WithPhase(func(string) {}))
	if member == nil || err != nil {
		return nil, err
	}
	return c.Lookup.Ranked(ctx, member, func(yield func(*index.Build, error) bool) {
		for b, err := range c.Lookup.StoredBuilds(member.Plan, at.Scopes) {
			if err == nil && !c.Rights.MaySee(at.Peer, b.ID, b.Scope) {
				continue // the peer may not see it
			}
			if !yield(b, err) {
				return
			}
		}
	})
}

// otherForm returns the text that a conversion would answer the miss, "" if none would.
func (c *Answerer) otherForm(ctx context.Context, at *request.Attempt) (string, error) {
	if len(at.Group) > 0 {
		return "", nil
	}
	order, err := c.candidateOrder(ctx, c.OtherFormAttempt(at))
	if err != nil {
		return "", err
	}
	for _, o := range order {
		b := o.Build
		if o.Refused == "" && len(b.Members) == 0 && !c.IsWithheldCopy(at, b) &&
			c.Query.WhyDamaged(ctx, b) == "" {
			return fmt.Sprintf("not stored in this format; it would be converted from the %s "+
				"format, without a compile: build %s of %s", request.FormName(b.Embed), b.BuildKey,
				b.Created.Format(time.RFC3339)), nil
		}
	}
	return "", nil
}
