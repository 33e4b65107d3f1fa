package cache

import (
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/index"
)

// attempt is one try to answer a request, with what is known so far: the model, the runtime, the
// plan, and the scopes that the caller's builds are in. It is never changed after it is made: a step
// that knows more makes a copy.
type attempt struct {
	*Request // the attempt's own; each wish in its one spelling

	onlyOptimal bool   // a build that the execution provider would rather compile again will not do
	tooLarge    string // why nothing is adopted: the files are larger than what may be put
	adopting    bool   // for a build of a model that is compiled already
	member      bool   // for a group that has the model among its members

	model   identity.Model
	store   string            // the scope that a build is stored in; "": none
	look    []string          // the scopes that builds are looked for in
	runtime string            // its name
	rc      *runtimes.Content // nil: of libraries that are not run here
	plan    *plan

	resumed  resumedJob
	finding  *finding         // in a store that is only read; else nil
	unserved *[]index.BuildID // found and not served, by any attempt at the request: not to be found again instead of being compiled
	told     *jobs.Telling    // nil: the caller hears nothing of a job
	phase    func(string)
}

// resumedJob is a job that an earlier daemon did not finish. The zero value is none.
type resumedJob struct {
	id     string // that users know it by
	starts int    // daemons that took it up
}

// newAttempt checks the request. The attempt has a copy of it.
func newAttempt(r *Request, t *jobs.Telling) (*attempt, error) {
	own := *r
	at := &attempt{Request: &own, unserved: new([]index.BuildID), told: t, phase: t.Phase}
	if err := own.check(); err != nil {
		return nil, err
	}
	var err error
	own.SessionOptions, own.Output, err = own.Output.Fold(own.SessionOptions)
	own.SessionOptions, at.onlyOptimal = identity.SplitSession(own.SessionOptions)
	return at, err
}

// withModel is the attempt for a model, of which the request is as its group is asked for.
func (at *attempt) withModel(id identity.Model, r *Request) *attempt {
	out := *at
	out.Request, out.model = r, id
	out.store, out.look = r.scopes(id.Store)
	return &out
}

// withRequest is the attempt for an equal request, with other files or of another user.
func (at *attempt) withRequest(r *Request) *attempt {
	out := *at
	out.Request = r
	return &out
}

// withRuntime is the attempt for a runtime. rc is nil where its libraries are not run here.
func (at *attempt) withRuntime(name string, rc *runtimes.Content) *attempt {
	out := *at
	out.runtime, out.rc = name, rc
	return &out
}

func (at *attempt) withPlan(p *plan) *attempt {
	out := *at
	out.plan = p
	return &out
}

// withPhase is the attempt with another function that hears the phases.
func (at *attempt) withPhase(phase func(string)) *attempt {
	out := *at
	out.phase = phase
	return &out
}

// untold is the attempt of a caller that does not wait for the job.
func (at *attempt) untold() *attempt {
	out := *at
	out.told = nil
	return &out
}

// apart is the attempt of a user who reported that the build which all share does not load: a new
// build is that user's own, and the others keep theirs.
func (at *attempt) apart() *attempt {
	own := *at.Request
	if own.Store != "none" {
		own.Store = "user"
	}
	return at.withModel(at.model, &own)
}

// asAdoption is the attempt to keep the request's own compiled model.
func (at *attempt) asAdoption(r *Request) *attempt {
	out := at.withModel(at.model, r)
	out.adopting = true
	return out
}

// against is what builds are judged against, with the request's models for controls.
func (at *attempt) against() *against {
	a := at.plan.against(at.runtime, at.rc)
	a.model, a.adopting = at.Request, at.adopting
	return a
}

// ortVersion is the version of ONNX Runtime that the caller loads with.
func (at *attempt) ortVersion() string {
	if at.rc == nil {
		return at.Runtime.ORTVersion
	}
	return at.rc.Spec.ORTVersion
}

// adopts tells whether a model that is compiled already is to be kept.
func (at *attempt) adopts() bool { return at.Adopt && at.tooLarge == "" }

// terms are what decides what is compiled.
func (at *attempt) terms() *identity.Terms {
	r := at.Request
	return &identity.Terms{Model: at.model.Digest, Group: at.model.Group, Member: at.member, EPs: r.EPs,
		SessionOptions: r.SessionOptions, FreeDimensions: r.FreeDimensions,
		FreeDimensionsByDenotation: r.FreeDimensionsByDenotation,
		GraphOptimizationLevel:     r.GraphOptimizationLevel, Embed: r.Embed, Route: r.Route, Output: r.Output}
}

// answer is an answer without a build.
func (at *attempt) answer(outcome string) *Answer {
	return &Answer{Outcome: outcome, RequestKey: at.plan.requestKey, ModelDigest: at.model.Digest,
		Record: at.plan.recordJSON, Runtime: at.runtime}
}
