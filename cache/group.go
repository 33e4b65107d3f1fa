package cache

import (
	"context"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
)

// identified is the attempt with the identity of every model of the request. That for a group asks for what makes
// execution providers share.
func (c *Cache) identified(ctx context.Context, at *request.Attempt) (_ *request.Attempt, err error) {
	known, r := *at, at.Request
	if known.TooLarge, err = c.tooLargeToAdopt(r); err != nil {
		return nil, err
	}
	id, err := c.models.Identify(ctx, &identity.Asked{UID: r.Peer.UID, Models: r.AllModels(), Adopt: known.Adopts(), Phase: at.Phase})
	if err != nil {
		return nil, err
	}
	if len(r.Group) > 0 {
		r = r.Sharing()
	}
	return known.WithModel(id, r), nil
}

// lookUpMember looks for a group that has the request's model among its members and was asked for with the same options.
// It is served to whoever has had the group itself: who brings one model has not shown the others.
func (c *Cache) lookUpMember(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	member, err := c.planMember(ctx, at)
	if member == nil || err != nil {
		return nil, err
	}
	found, err := c.lookUp(ctx, member)
	if found.answer == nil || err != nil {
		return nil, err
	}
	a := c.finish(found.answer, member)
	a.RequestKey, a.Record = at.Plan.RequestKey, at.Plan.RecordJSON
	a.Why = ofAGroup + a.Why
	return a, nil
}

// notAlone says why a group's build is not given to a request for one of its models, "" if it is:
// the models were loaded without sharing when an equal library compiled them, or they load so now.
func (c *Cache) notAlone(ctx context.Context, at *request.Attempt, s suited) (string, error) {
	b := s.build
	if !at.AsMember || c.readOnly || b.LoadCheck == compilers.Passed && s.judgement.Source == judge.SourceLibrary {
		return "", nil
	}
	a := at.Plan.Against(at.RuntimeName, at.Content)
	checked, err := c.loadCheckAs(ctx, a, b, "load alone", a.CheckJobAlone)
	switch {
	case err != nil && runtimes.Unsettled(ctx, err):
		return "", err
	case err != nil:
		return notKnownAlone + err.Error(), nil
	case checked.Outcome == compilers.Failed:
		return "the models of this group load together and not alone: " + compilers.LastWords(checked.Text), nil
	case checked.Outcome != compilers.Passed:
		return notKnownAlone + "that cannot be tried on this machine", nil
	case checked.GraphOptimizationLevel == "disable_all" && b.GraphOptimizationLevel != "disable_all":
		return "the models of this group load alone only without graph optimisation", nil
	}
	return "", nil
}

const notKnownAlone = "the models of this group are not known to load alone: "

// ofAGroup begins the reason of an answer to who asked for one of the group's models.
const ofAGroup = "one of a group of models that was compiled together: "

// planMember thinks the request through as one for a group that has its model among its members. It is nil where there is
// no such group.
func (c *Cache) planMember(ctx context.Context, at *request.Attempt) (*request.Attempt, error) {
	if len(at.Identity.Group) > 0 || at.Embed {
		return nil, nil
	}
	member := at.WithRequest(at.Sharing())
	member.AsMember = true
	member, err := c.planned(ctx, member)
	if err != nil && ctx.Err() == nil {
		return nil, nil // the request itself is answered as if nobody had looked
	}
	return member, err
}
