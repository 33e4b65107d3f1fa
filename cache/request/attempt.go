package request

import (
	"context"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/index"
)

// Attempt is one try to answer a request, with the results so far: the model, the runtime, the
// plan, and the scopes of the caller's builds. It is immutable: each step returns a copy with its
// result.
type Attempt struct {
	*Request // a copy, with canonical values

	OnlyOptimal bool   // refuse builds for which the EP recommends a recompile
	TooLarge    string // why the model is not adopted: its files exceed the limit
	Adopting    bool   // to adopt a compiled model
	AsMember    bool   // for a group that contains the model

	Superseded identity.Superseded // options that were removed from the request

	Identity    identity.Model
	Scope       string            // the scope that a build is stored in; "": none
	Scopes      []string          // the scopes to look up
	RuntimeName string            // name of the runtime
	Content     *runtimes.Content // nil if the daemon does not run the libraries
	Plan        *Plan

	// Generation is that of the cache's settings and runtimes when the attempt began.
	Generation uint64

	// SkipServing has builds that could not be served. The look-ups of later attempts skip them, so
	// that they are compiled again.
	SkipServing *[]index.BuildID
	Progress    *jobs.ProgressReporter // nil: no progress is reported
	Phase       func(string)
}

// NewAttempt checks the request. The attempt has a copy of it.
func NewAttempt(r *Request, t *jobs.ProgressReporter) (*Attempt, error) {
	own := *r
	at := &Attempt{Request: &own, SkipServing: new([]index.BuildID), Progress: t, Phase: t.Phase}
	if err := own.check(); err != nil {
		return nil, err
	}
	own.EPs, at.Superseded = identity.Supersede(own.EPs)
	var err error
	own.SessionOptions, own.Output, err = own.Output.FoldIntoSession(own.SessionOptions)
	own.SessionOptions, at.OnlyOptimal = identity.SplitSession(own.SessionOptions)
	return at, err
}

// WithIdentity returns the attempt with the identity of every model. For a group, it adds the
// options that make execution providers share.
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

// WithModel returns the attempt with this identity and request.
func (at *Attempt) WithModel(id identity.Model, r *Request) *Attempt {
	out := *at
	out.Request, out.Identity = r, id
	out.Scope, out.Scopes = r.scopes(id.Store)
	return &out
}

// WithRequest returns the attempt for an equal request with other files or of another user.
func (at *Attempt) WithRequest(r *Request) *Attempt {
	out := *at
	out.Request = r
	return &out
}

// Again returns the attempt for an equal request of another process of the user.
func (at *Attempt) Again(p Peer, t *jobs.ProgressReporter, phase func(string)) *Attempt {
	r := *at.Request
	r.Peer = p
	out := at.WithRequest(&r)
	out.SkipServing, out.Progress, out.Phase = new([]index.BuildID), t, phase
	return out
}

// WithRuntime returns the attempt for a runtime. rc is nil if the daemon does not run its
// libraries.
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

// WithPhase returns the attempt with another function that is called with the phases.
func (at *Attempt) WithPhase(phase func(string)) *Attempt {
	out := *at
	out.Phase = phase
	return &out
}

// WithoutProgress returns the attempt for a caller that does not wait for the job.
func (at *Attempt) WithoutProgress() *Attempt {
	out := *at
	out.Progress = nil
	return &out
}

// AsAdoption returns the attempt to store the request's own compiled model.
func (at *Attempt) AsAdoption(r *Request) *Attempt {
	out := at.WithModel(at.Identity, r)
	out.Adopting = true
	return out
}

// JudgeTarget returns the target that builds are judged for, with the request's models for
// controls.
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

// Adopts reports whether the request's compiled model should be stored.
func (at *Attempt) Adopts() bool { return at.Adopt && at.TooLarge == "" }

// Terms returns the part of the request that the result of a compile depends on.
func (at *Attempt) Terms() *identity.Terms {
	return &identity.Terms{Model: at.Identity.Digest, Group: at.Identity.Group, Member: at.AsMember,
		CompileTerms: at.CompileTerms}
}

// Answer is an answer without a build.
func (at *Attempt) Answer(outcome string) *Answer {
	return &Answer{Outcome: outcome, RequestKey: at.Plan.RequestKey,
		ModelDigest: at.Identity.Digest, Record: at.Plan.RecordJSON, Runtime: at.RuntimeName}
}

// NeedsOtherORT reports whether a strict request must not get a build that this version of ONNX
// Runtime made. Build keys do not cover the version if the daemon runs the libraries.
func (at *Attempt) NeedsOtherORT(made string) bool {
	return at.StrictORT && made != at.ORTVersion()
}

// RefusesORT reports whether a request that waited for the build must not get it, because of the
// ONNX Runtime that made it.
func (at *Attempt) RefusesORT(b *index.Build) bool {
	return at.NeedsOtherORT(b.ORTVersion) || at.Plan.Marks.LaterIR(b)
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

// FailureScope returns the scope in which a failure of the request is remembered, "" for none.
func (at *Attempt) FailureScope(scope string) string {
	switch {
	case at.OnMiss == Bypass:
		return ""
	case scope == "":
		return rights.OwnScope(at.Peer)
	}
	return scope
}

// JobKey returns the key of the request's job. If the build will not be stored, no other request
// shares the job.
func (at *Attempt) JobKey() jobs.Key {
	if at.Scope == "" || at.OnMiss == Bypass {
		return jobs.Key{Build: at.Plan.BuildKey, Alone: jobs.NewID()}
	}
	return jobs.Key{Build: at.Plan.BuildKey, Scope: at.Scope}
}

// Caller describes the request to the job that it joins. owner returns the owner of a container's
// user.
func (at *Attempt) Caller(owner func(uid uint32) uint32) jobs.Caller {
	// not for a build that only this caller gets
	keep := at.KeepGoing && at.OnMiss != Bypass && at.Store != "none"
	who := jobs.Caller{UID: at.Peer.UID, Owner: owner(at.Peer.UID), Name: at.Name, Keep: keep}
	if at.Progress != nil {
		who.Since, who.Progress = at.Progress.Since, at.Progress.Report
	}
	return who
}
