package request

import (
	"context"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/index"
)

// Attempt is one try to answer a request, with what is known so far: the model, the runtime, the
// plan, and the scopes that the caller's builds are in. It is never changed after it is made: a
// step that knows more makes a copy.
type Attempt struct {
	*Request // the attempt's own; each wish in its one spelling

	OnlyOptimal bool   // a build that the execution provider would rather compile again will not do
	TooLarge    string // why nothing is adopted: the files are larger than what may be put
	Adopting    bool   // for a build of a model that is compiled already
	AsMember    bool   // for a group that has the model among its members

	Identity    identity.Model
	Scope       string            // the scope that a build is stored in; "": none
	Scopes      []string          // the scopes that builds are looked for in
	RuntimeName string            // its name
	Content     *runtimes.Content // nil: of libraries that are not run here
	Plan        *Plan

	Resumed ResumedJob
	// found by any attempt, and not served: they are to be compiled again, not found again
	SkipServing *[]index.BuildID
	Progress    *jobs.ProgressReporter // nil: the caller hears nothing of a job
	Phase       func(string)
}

// ResumedJob is a job that an earlier daemon did not finish. The zero value is none.
type ResumedJob struct {
	ID     string // that users know it by
	Starts int    // daemons that took it up
}

// NewAttempt checks the request. The attempt has a copy of it.
func NewAttempt(r *Request, t *jobs.ProgressReporter) (*Attempt, error) {
	own := *r
	at := &Attempt{Request: &own, SkipServing: new([]index.BuildID), Progress: t, Phase: t.Phase}
	if err := own.check(); err != nil {
		return nil, err
	}
	var err error
	own.SessionOptions, own.Output, err = own.Output.FoldIntoSession(own.SessionOptions)
	own.SessionOptions, at.OnlyOptimal = identity.SplitSession(own.SessionOptions)
	return at, err
}

// WithIdentity is the attempt with the identity of every model of the request. That for a group
// asks for what makes execution providers share.
func (at *Attempt) WithIdentity(ctx context.Context, models *identity.Models) (*Attempt, error) {
	r := at.Request
	id, err := models.Identify(ctx,
		&identity.IdentifyRequest{UID: r.Peer.UID, Models: r.AllModels(),
			Adopt: at.Adopts(), Phase: at.Phase})
	if err != nil {
		return nil, err
	}
	if len(r.Group) > 0 {
		r = r.Sharing()
	}
	return at.WithModel(id, r), nil
}

// WithModel is the attempt for a model, of which the request is as its group is asked for.
func (at *Attempt) WithModel(id identity.Model, r *Request) *Attempt {
	out := *at
	out.Request, out.Identity = r, id
	out.Scope, out.Scopes = r.scopes(id.Store)
	return &out
}

// WithRequest is the attempt for an equal request, with other files or of another user.
func (at *Attempt) WithRequest(r *Request) *Attempt {
	out := *at
	out.Request = r
	return &out
}

// WithRuntime is the attempt for a runtime. rc is nil where its libraries are not run here.
func (at *Attempt) WithRuntime(name string, rc *runtimes.Content) *Attempt {
	out := *at
	out.RuntimeName, out.Content = name, rc
	return &out
}

// WithPlan is the attempt with its plan.
func (at *Attempt) WithPlan(p *Plan) *Attempt {
	out := *at
	out.Plan = p
	return &out
}

// WithPhase is the attempt with another function that hears the phases.
func (at *Attempt) WithPhase(phase func(string)) *Attempt {
	out := *at
	out.Phase = phase
	return &out
}

// WithoutProgress is the attempt of a caller that does not wait for the job.
func (at *Attempt) WithoutProgress() *Attempt {
	out := *at
	out.Progress = nil
	return &out
}

// WithOwnScope is the attempt of a user that reported that the shared build does not load: a new
// build is private to that user, and the others keep the shared one.
func (at *Attempt) WithOwnScope() *Attempt {
	own := *at.Request
	if own.Store != "none" {
		own.Store = "user"
	}
	return at.WithModel(at.Identity, &own)
}

// AsAdoption is the attempt to keep the request's own compiled model.
func (at *Attempt) AsAdoption(r *Request) *Attempt {
	out := at.WithModel(at.Identity, r)
	out.Adopting = true
	return out
}

// JudgeTarget is what builds are judged against, with the request's models for controls.
func (at *Attempt) JudgeTarget() *JudgeTarget {
	a := at.Plan.JudgeTarget(at.RuntimeName, at.Content)
	a.Model, a.Adopting = at.Request, at.Adopting
	return a
}

// ORTVersion is the version of ONNX Runtime that the caller loads with.
func (at *Attempt) ORTVersion() string {
	if at.Content == nil {
		return at.Runtime.ORTVersion
	}
	return at.Content.Spec.ORTVersion
}

// Adopts reports whether a model that is compiled already is to be kept.
func (at *Attempt) Adopts() bool { return at.Adopt && at.TooLarge == "" }

// Terms are what decides what is compiled.
func (at *Attempt) Terms() *identity.Terms {
	return &identity.Terms{Model: at.Identity.Digest, Group: at.Identity.Group, Member: at.AsMember,
		CompileTerms: at.CompileTerms}
}

// Answer is an answer without a build.
func (at *Attempt) Answer(outcome string) *Answer {
	return &Answer{Outcome: outcome, RequestKey: at.Plan.RequestKey,
		ModelDigest: at.Identity.Digest, Record: at.Plan.RecordJSON, Runtime: at.RuntimeName}
}

// NeedsOtherORT reports whether the version of ONNX Runtime that made a build keeps it from the
// request. Build keys do not cover that version where the libraries are the daemon's.
func (at *Attempt) NeedsOtherORT(made string) bool {
	return at.StrictORT && made != at.ORTVersion()
}

// JobAbout describes to clients the job that makes the attempt's build.
func (at *Attempt) JobAbout(scope, why string) jobs.Description {
	p := at.Plan
	a := jobs.Description{Scope: scope, Info: jobs.Info{
		ModelName: at.Name, ModelDigest: p.Canonical.Model, RequestKey: p.RequestKey,
		Build: p.BuildKey, EP: p.EPs[0].Name, UID: at.Peer.UID, Why: why}}
	for _, ep := range p.EPs {
		a.EPs = append(a.EPs, ep.Name)
	}
	return a
}

// FailureScope is the scope in which a failure of the request is remembered; "": in none.
func (at *Attempt) FailureScope(scope string) string {
	switch {
	case at.OnMiss == Bypass:
		return ""
	case scope == "":
		return rights.OwnScope(at.Peer)
	}
	return scope
}

// JobKey returns which job the request is for. Without a scope the build is not kept, and the job
// is shared with no other request.
func (at *Attempt) JobKey() jobs.Key {
	if at.Scope == "" || at.OnMiss == Bypass {
		return jobs.Key{Build: at.Plan.BuildKey, Alone: jobs.NewID()}
	}
	return jobs.Key{Build: at.Plan.BuildKey, Scope: at.Scope}
}

// Caller is how the request takes part in a job. owner returns the user of a uid.
func (at *Attempt) Caller(owner func(uid uint32) uint32) jobs.Caller {
	// else the build is for this caller alone
	keep := at.KeepGoing && at.OnMiss != Bypass && at.Store != "none"
	who := jobs.Caller{UID: at.Peer.UID, Owner: owner(at.Peer.UID), Name: at.Name, Keep: keep}
	if at.Progress != nil {
		who.Since, who.Progress = at.Progress.Since, at.Progress.Report
	}
	return who
}
