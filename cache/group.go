package cache

import (
	"context"
	"errors"
	"os"
	"path"
	"slices"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// ModelFiles is a further model of a weight-sharing group.
type ModelFiles struct {
	Name     string // for people; never part of identity
	Graph    *os.File
	External map[string]*os.File // by location
}

// Member is one model of a group, in an answer.
type Member struct {
	Name           string
	ModelDigest    cas.Digest
	Graph          string            // relative to the view: "<id>/<graph>"
	SessionOptions map[string]string // besides the answer's, when several members are loaded in one process
}

// maxGroup bounds a group: its models are compiled one after the other in one worker.
const maxGroup = 64

func (r *Request) models() int { return 1 + len(r.Group) }

// model gives the request for one of its models alone, with the same files. 0 is the first.
func (r *Request) model(i int) *Request {
	one := *r
	one.Group, one.group = nil, nil
	if i > 0 {
		m := r.Group[i-1]
		one.Name, one.Graph, one.External = m.Name, m.Graph, m.External
	}
	return &one
}

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

// identifyAll is identify for every model of the request. It gives the request as a group is asked for; a request for one
// model stays as it is.
func (c *Cache) identifyAll(ctx context.Context, r *Request, progress func(string)) (modelIdentity, *Request, error) {
	known := &sums{now: c.now}
	return r.identified(func(one *Request) (modelIdentity, error) {
		if one != r {
			one.sums = known
		}
		return c.identify(ctx, one, progress)
	})
}

// identified identifies every model of the request, one after the other; the only one of a request for a single model is the request itself.
func (r *Request) identified(identify func(*Request) (modelIdentity, error)) (modelIdentity, *Request, error) {
	if len(r.Group) == 0 {
		id, err := identify(r)
		return id, r, err
	}
	out := r.sharing()
	out.group = nil
	all := modelIdentity{}
	need := &NeedFilesError{}
	seen := make(map[cas.Digest]string)
	for i := range r.models() {
		one := r.model(i)
		id, err := identify(one)
		var missing *NeedFilesError
		switch {
		case errors.As(err, &missing):
			need.add(missing, i)
			continue
		case err != nil:
			return modelIdentity{}, nil, err
		case id.Compiled:
			return modelIdentity{}, nil, apierr.New(apierr.BadRequest, nil, "model %q is compiled already: it cannot be compiled as one of a group", one.Name)
		case seen[id.Digest] != "":
			return modelIdentity{}, nil, apierr.New(apierr.BadRequest, nil, "models %q and %q of the group are the same", seen[id.Digest], one.Name)
		}
		seen[id.Digest] = one.Name
		if i == 0 {
			all = id
			continue
		}
		out.group = append(out.group, id.Digest)
		all.Store = narrower(all.Store, id.Store)
		all.FreeDims = slices.Concat(all.FreeDims, id.FreeDims) // what the memo remembers is others' too
	}
	if len(need.Locations) > 0 {
		return modelIdentity{}, nil, need
	}
	return all, out, nil
}

// narrower of two models' wishes about where to store: what holds for one member holds for the group.
func narrower(a, b string) string {
	for _, wish := range []string{"none", "user"} {
		if a == wish || b == wish {
			return wish
		}
	}
	return a
}

func (e *NeedFilesError) add(missing *NeedFilesError, member int) {
	for _, l := range missing.Locations {
		e.Locations, e.Members = append(e.Locations, l), append(e.Members, member)
	}
}

// lookUpMember looks for a group that has the request's model among its members and was asked for with the same options.
// It is served to whoever has had the group itself: who brings one model has not shown the others.
func (c *Cache) lookUpMember(ctx context.Context, r *Request, id modelIdentity, p *plan, rt *runtime, rc *runtimeContent, phase func(string)) (*Answer, error) {
	member, pm, err := c.planMember(ctx, r, id, rc, phase)
	if pm == nil || err != nil {
		return nil, err
	}
	found, err := c.lookUp(ctx, member, pm, rt, rc, phase)
	if found.answer == nil || err != nil {
		return nil, err
	}
	a := c.finish(found.answer, member, id, pm, rt)
	a.RequestKey, a.Record = p.requestKey, p.recordJSON
	a.Why = ofAGroup + a.Why
	return a, nil
}

// notAlone says why a group's build is not given to a request for one of its models, "" if it is:
// the models were loaded without sharing when an equal library compiled them, or they load so now.
func (c *Cache) notAlone(ctx context.Context, r *Request, a *against, s suited) (string, error) {
	b := s.build
	if !r.member || c.readOnly || b.LoadCheck == compilers.Passed && s.judgement.Source == sourceLibrary {
		return "", nil
	}
	checked, err := c.loadCheckAs(ctx, a, b, "load alone", a.checkJobAlone)
	switch {
	case err != nil && unsettled(ctx, err):
		return "", err
	case err != nil:
		return notKnownAlone + err.Error(), nil
	case checked.Outcome == compilers.Failed:
		return "the models of this group load together and not alone: " + end(checked.Text), nil
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

// planMember thinks the request through as one for a group that has its model among its members. Without a plan there is no
// such group.
func (c *Cache) planMember(ctx context.Context, r *Request, id modelIdentity, rc *runtimeContent, phase func(string)) (*Request, *plan, error) {
	if len(r.group) > 0 || r.Embed {
		return nil, nil, nil
	}
	member := r.sharing()
	member.member = true
	p, err := c.plan(ctx, member, id.Digest, rc, phase)
	if err != nil && ctx.Err() == nil {
		return nil, nil, nil // the request itself is answered as if nobody had looked
	}
	return member, p, err
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
