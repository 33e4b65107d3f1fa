package lookup

import (
	"context"

	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
)

// FindMember finds a group that has the request's model among its members and was asked for with
// the same options; nil: there is none. The group is served to users who have had all of it,
// because who brings one model has not shown the others.
func (l *Lookup) FindMember(ctx context.Context, at *request.Attempt) (*request.Answer, error) {
	member, err := l.Member(ctx, at)
	if member == nil || err != nil {
		return nil, err
	}
	found, err := l.Find(ctx, member)
	if found.Answer == nil || err != nil {
		return nil, err
	}
	a := l.Finish(found.Answer, member)
	a.RequestKey, a.Record = at.Plan.RequestKey, at.Plan.RecordJSON
	a.Why = ofAGroup + a.Why
	return a, nil
}

const (
	notKnownAlone = "the models of this group are not known to load alone: "

	// ofAGroup begins the reason of an answer to who asked for one of the group's models.
	ofAGroup = "one of a group of models that was compiled together: "
)

// Member plans the request as one for a group that has its model among its members. It returns nil
// where there is no such group.
func (l *Lookup) Member(ctx context.Context, at *request.Attempt) (*request.Attempt, error) {
	if len(at.Identity.Group) > 0 || at.Embed {
		return nil, nil
	}
	member := at.WithRequest(at.Sharing())
	member.AsMember = true
	member, err := l.o.Planned(ctx, member)
	if err != nil && ctx.Err() == nil {
		return nil, nil // the request itself is answered as if nobody had looked
	}
	return member, err
}

// notAlone returns why a group's build is not served for one of its models, "" if it is: the models
// were loaded without sharing when an equal library compiled them, or they load so now.
func (l *Lookup) notAlone(ctx context.Context, at *request.Attempt, one *Candidate) (string, error) {
	b := one.Build
	if !at.AsMember || b.LoadCheck == compilers.Passed && one.Judgement.Source == judge.SourceLibrary {
		return "", nil
	}
	checked, err := l.o.Judge.LoadsAlone(ctx, at.Plan.Against(at.RuntimeName, at.Content), b)
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
