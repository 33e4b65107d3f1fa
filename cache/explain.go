package cache

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/unixsock/wire"
)

// The decisions of explanations, besides the states of builds.
const (
	decidedHit    = "hit"
	decidedMiss   = "miss"
	decidedStale  = "stale"  // there are builds, and none of them may be loaded
	decidedGone   = "gone"   // there was an entry
	decidedFailed = "failed" // its compile, and there is no build
)

// maxCandidates bounds the builds that are told of one entry.
const maxCandidates = 32

// explaining bounds how many explanations are made at the same time. Each hashes what is stored of its entry, and may have builds loaded.
type explaining struct {
	users  keyed.Locks[uint32] // one of each user's, so that nobody keeps others from theirs
	tokens chan struct{}       // and so many in all
}

const maxExplaining = 4

func newExplaining() explaining { return explaining{tokens: make(chan struct{}, maxExplaining)} }

// enter waits for the turn of one of the owner's explanations. What it gives ends that.
func (e *explaining) enter(ctx context.Context, owner uint32, name string) (leave func(), err error) {
	turn, err := e.users.Lock(ctx, owner)
	if err != nil {
		return nil, contextError(ctx, name)
	}
	select {
	case e.tokens <- struct{}{}:
		return func() { <-e.tokens; turn() }, nil
	case <-ctx.Done():
		turn()
		return nil, contextError(ctx, name)
	}
}

// explain decides as any request does, but compiles nothing, withholds nothing, and neither counts nor leases.
func (c *Cache) explain(ctx context.Context, at *attempt) (*Answer, error) {
	leave, err := c.explaining.enter(ctx, c.owners.Of(at.Peer.UID), at.Name)
	if err != nil {
		return nil, err
	}
	defer leave()
	out := &wire.Explanation{Decision: decidedMiss, Reason: "never compiled for this request",
		RequestKey: at.plan.requestKey.String(), Record: at.plan.recordJSON, Runtime: at.runtime}
	order, err := c.order(ctx, at)
	if err != nil {
		return nil, err
	}
	if err := c.consider(ctx, out, at, order); err != nil {
		return nil, err
	}
	record, err := identity.ParseFields(at.plan.recordJSON)
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "model %q", at.Name)
	}
	out.Neighbours, err = c.neighbours(ctx, at.Peer, wanted{key: at.plan.requestKey, model: at.plan.canonical.Model, name: at.Name, record: record})
	if err != nil {
		return nil, query.Error(ctx, err)
	}
	if len(out.Candidates) == 0 {
		if gone := c.whyNone(at.Peer, at.plan.requestKey); gone != "" {
			out.Reason = gone
		} else if len(out.Neighbours) > 0 {
			out.Reason = missedBy(out.Neighbours[0])
		}
	}
	if out.Decision != decidedHit && !at.plan.outside { // with libraries that are not run here nothing is compiled or converted
		if f := c.failedBefore(at); f != nil {
			if out.Decision == decidedMiss {
				out.Decision, out.Reason = decidedFailed, f.Said()
			} else {
				out.Reason += "; " + f.Said()
			}
		}
		if err := c.explainOtherForm(ctx, out, at); err != nil {
			return nil, err
		}
	}
	if err := c.query.AddHistory(at.Peer, at.plan.requestKey, out); err != nil {
		return nil, err
	}
	a := at.answer(Explained)
	a.Why, a.Explanation = out.Reason, out
	return a, nil
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

// consider says of each build whether it is served.
func (c *Cache) consider(ctx context.Context, out *wire.Explanation, at *attempt, order []considered) error {
	for _, o := range order {
		if len(out.Candidates) == maxCandidates {
			return nil
		}
		differences := identity.MakerDifferences(at.plan.expected(o.build), at.ortVersion(), o.build)
		if at.plan.outside { // of libraries that are not run here little is known
			differences = slices.DeleteFunc(differences,
				func(d identity.Difference) bool { return d.Asked == "" })
		}
		one, err := c.candidate(at.Peer, o.build, o.refused)
		if err != nil {
			return err
		}
		one.Differences = differencesReply(differences)
		if !c.rights.MaySee(at.Peer, o.build.ID, o.build.Scope) {
			one.Build.ModelName = at.Name // whoever has the model may know of the build, and not what others call it
			one.Build.Members = query.MembersReply(at.named(o.build.Members))
		}
		if o.judgement.Runtime != "" {
			setJudgement(one.Build, o.judgement)
		}
		if one.Reason == "" {
			one.Reason = wire.Valid(c.unsound(ctx, o.build))
		}
		if err := ctx.Err(); err != nil {
			return contextError(ctx, at.Name)
		}
		switch {
		case one.Reason != "":
			if len(out.Candidates) == 0 && !o.together {
				out.Decision, out.Reason = decidedStale, one.Reason
			}
		case out.Decision == decidedHit:
			one.Reason = "it fits, too; one that is considered earlier is served"
		default:
			one.Served, one.Reason = true, wire.Valid(o.judgement.Reason)
			out.Decision, out.Reason = decidedHit, one.Reason
		}
		out.Candidates = append(out.Candidates, one)
	}
	return nil
}

// candidate is a build of an entry that is explained.
func (c *Cache) candidate(p Peer, b *index.Build, reason string) (*wire.Candidate, error) {
	of, err := c.query.Listed(p, b)
	if err != nil {
		return nil, apierr.New(apierr.Internal, err, "build %s", b.BuildKey)
	}
	of.KeptText = wire.Valid(c.query.KeptText(b))
	return &wire.Candidate{Build: of, Reason: wire.Valid(reason)}, nil
}

func differencesReply(list []identity.Difference) []*wire.Difference {
	out := make([]*wire.Difference, 0, len(list))
	for _, d := range list {
		out = append(out, &wire.Difference{Field: d.Field, Asked: wire.Valid(d.Asked),
			Found: wire.Valid(d.Found)})
	}
	return out
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

// unsound says which of a build's files is not what it was, "" if all are.
func (c *Cache) unsound(ctx context.Context, b *index.Build) string {
	for _, f := range b.Files {
		if err := c.forms.Verify(ctx, f.Digest); err != nil {
			return fmt.Sprintf("the stored build is damaged: %s: %v", f.Name, err)
		}
	}
	return ""
}

// missedBy says what keeps the nearest entry from being the one that was asked for.
func missedBy(n *wire.Neighbour) string {
	if len(n.Differences) > 0 && n.Differences[0].Field == "model" {
		return "never compiled for this request; a model of the same name was, with other content: the file was changed, or it is another one"
	}
	var names []string
	for _, d := range n.Differences {
		names = append(names, d.Field)
	}
	if len(names) > 3 {
		names = append(names[:3], fmt.Sprintf("%d more", len(names)-3))
	}
	return "never compiled for this request; the nearest one for this model differs in " + strings.Join(names, ", ")
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
