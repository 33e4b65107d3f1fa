package cache

import (
	"context"
	"path"
	"slices"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// Member is one model of a group, in an answer.
type Member struct {
	Name           string
	ModelDigest    cas.Digest
	Graph          string            // relative to the view: "<id>/<graph>"
	SessionOptions map[string]string // besides the answer's, when several members are loaded in one process
}

// maxGroup bounds a group: its models are compiled one after the other in one worker.
const maxGroup = 64

// checkGroup refuses groups that no execution provider compiles.
func (r *Request) checkGroup() error {
	if len(r.Group) == 0 {
		return nil
	}
	if r.models() > maxGroup {
		return apierr.New(apierr.BadRequest, nil, "a group of %d models, more than %d", r.models(), maxGroup)
	}
	if r.Embed {
		return apierr.New(apierr.BadRequest, nil, "the models of a group share a context binary beside their graphs, which cannot be embedded").
			WithHint("ask for them one by one, or without embedding")
	}
	if r.OnMiss == ForClaim {
		return apierr.New(apierr.BadRequest, nil, "a group is compiled by the daemon, and not under a claim").WithHint("ask with on_miss wait, or claim the models one by one")
	}
	if r.Output.InitializersFile != "" || r.Output.InitializersInSource {
		return apierr.New(apierr.BadRequest, nil, "the initializers of a group's models stay in their graphs").WithHint("ask for the models one by one")
	}
	for i, m := range r.Group {
		if m.Graph == nil {
			return apierr.New(apierr.BadRequest, nil, "the request has no model %d of the group", i+2)
		}
	}
	return nil
}

// sharing is the request with what makes execution providers share: their options, and sessions in which to compile.
func (r *Request) sharing() *Request {
	out := *r
	if out.Route == "" {
		out.Route = compilers.RouteSessionOptions
	}
	out.EPs = make([]identity.EP, len(r.EPs))
	for i, ep := range r.EPs {
		info, _ := compilers.EPByName(ep.Name)
		ep.Options = info.ForSharing(ep.Options)
		out.EPs[i] = ep
	}
	return &out
}

// identified is the attempt with the identity of every model of the request. That for a group asks for what makes
// execution providers share.
func (c *Cache) identified(ctx context.Context, at *attempt) (_ *attempt, err error) {
	known, r := *at, at.Request
	if known.tooLarge, err = c.tooLargeToAdopt(r); err != nil {
		return nil, err
	}
	id, err := c.models.Identify(ctx, &identity.Asked{UID: r.Peer.UID, Models: r.all(), Adopt: known.adopts(), Phase: at.phase})
	if err != nil {
		return nil, err
	}
	if len(r.Group) > 0 {
		r = r.sharing()
	}
	return known.withModel(id, r), nil
}

// lookUpMember looks for a group that has the request's model among its members and was asked for with the same options.
// It is served to whoever has had the group itself: who brings one model has not shown the others.
func (c *Cache) lookUpMember(ctx context.Context, at *attempt) (*Answer, error) {
	member, err := c.planMember(ctx, at)
	if member == nil || err != nil {
		return nil, err
	}
	found, err := c.lookUp(ctx, member)
	if found.answer == nil || err != nil {
		return nil, err
	}
	a := c.finish(found.answer, member)
	a.RequestKey, a.Record = at.plan.requestKey, at.plan.recordJSON
	a.Why = ofAGroup + a.Why
	return a, nil
}

// notAlone says why a group's build is not given to a request for one of its models, "" if it is:
// the models were loaded without sharing when an equal library compiled them, or they load so now.
func (c *Cache) notAlone(ctx context.Context, at *attempt, s suited) (string, error) {
	b := s.build
	if !at.member || c.readOnly || b.LoadCheck == compilers.Passed && s.judgement.Source == judge.SourceLibrary {
		return "", nil
	}
	a := at.plan.against(at.runtime, at.rc)
	checked, err := c.loadCheckAs(ctx, a, b, "load alone", a.checkJobAlone)
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
func (c *Cache) planMember(ctx context.Context, at *attempt) (*attempt, error) {
	if len(at.model.Group) > 0 || at.Embed {
		return nil, nil
	}
	member := at.withRequest(at.sharing())
	member.member = true
	member, err := c.planned(ctx, member)
	if err != nil && ctx.Err() == nil {
		return nil, nil // the request itself is answered as if nobody had looked
	}
	return member, err
}

// named gives a group's members the names that the request has for them, where it has one for each: not what others call them.
func (r *Request) named(members []index.Member) []index.Member {
	out := slices.Clone(members)
	for i := range out {
		out[i].ModelName = ""
		if len(r.Group) > 0 && i < r.models() {
			out[i].ModelName = r.model(i).Name
		}
	}
	return out
}

// tellMembers says what a group consists of, and which of its models was asked for.
func (a *Answer) tellMembers(r *Request, model cas.Digest) {
	b := a.Build
	if len(b.Members) == 0 {
		return
	}
	dir, members := path.Dir(a.Graph), b.Members
	if len(r.Group) > 0 {
		members = r.named(members)
	}
	for i := range members {
		m := &members[i]
		a.Members = append(a.Members, Member{Name: m.ModelName, ModelDigest: m.ModelDigest, Graph: path.Join(dir, m.Graph), SessionOptions: m.SessionOptions})
	}
	a.Member = max(0, b.MemberOf(model))
	a.Graph = a.Members[a.Member].Graph
}
