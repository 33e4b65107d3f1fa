// Package trial loads builds in workers, to find out whether they suit the libraries that are here,
// and whether they compute the same as their source models.
package trial

import (
	"context"
	"time"

	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/once"
	"github.com/epcached/epcached/store"
)

// Trials try builds, and remember the results. All fields must be set. The methods may be called by
// several goroutines.
type Trials struct {
	Store      *store.Store
	Runtimes   *runtimes.Set
	Compiler   compilers.Compiler
	Judges     *judge.Judge
	Facts      *once.Facts
	Workspaces *workspace.Maker
	Policy     func([]compilers.EP) request.Policy
	Now        func() time.Time

	// Planned returns the attempt with its plan.
	Planned func(context.Context, *request.Attempt) (*request.Attempt, error)
}

// Judge judges a build. It loads the build where that could change what becomes of it.
func (ts *Trials) Judge(ctx context.Context, a *request.Against, b *index.Build) (judge.Judgement, error) {
	return ts.Judges.Build(ctx, a.Target(), b, func(ctx context.Context, j judge.Judgement) (compilers.CheckResult, bool, error) {
		if !ts.worthTrying(a, b, j) {
			return compilers.CheckResult{}, false, nil
		}
		checked, err := ts.load(ctx, a, b)
		return checked, true, err
	})
}

// Knows reports whether Judge need not work anything out.
func (ts *Trials) Knows(a *request.Against, b *index.Build) bool {
	return ts.Judges.Knows(a.Target(), b)
}

// LoadsAlone loads the models of a group without sharing.
func (ts *Trials) LoadsAlone(ctx context.Context, a *request.Against, b *index.Build) (compilers.CheckResult, error) {
	return ts.loadAs(ctx, a, b, "load alone", a.CheckJobAlone)
}

// worthTrying reports whether a load check could change what becomes of the build. A policy that
// refuses what is unknown does so whatever loads. A build of another machine is always tried.
func (ts *Trials) worthTrying(a *request.Against, b *index.Build, j judge.Judgement) bool {
	policy := ts.Policy(a.EPs).Unknown
	if j.Verdict == compilers.Unsupported || policy == request.PolicyRefuse && j.Verdict == compilers.Unknown {
		return false
	}
	return a.Marks.Elsewhere(b) || !j.Firm && policy != request.PolicyServe
}

// load loads the build's graph with the libraries that it is judged for, once for each pair. A
// build that may be of another machine is run as well.
func (ts *Trials) load(ctx context.Context, a *request.Against, b *index.Build) (compilers.CheckResult, error) {
	if a.Marks.Elsewhere(b) {
		return ts.runOnce(ctx, a, b)
	}
	return ts.loadAs(ctx, a, b, "load", a.CheckJobOf)
}

// loadAs is load in one of the ways in which a build is loaded.
func (ts *Trials) loadAs(ctx context.Context, a *request.Against, b *index.Build, way string,
	job func(*index.Build, *request.Answer) compilers.CheckJob) (compilers.CheckResult, error) {
	key := ts.Judges.Key(a.Target(), way, b.ID[:])
	return runtimes.Remember(ctx, ts.Runtimes, runtimes.Question{Key: key}, Proven, func(ctx context.Context) (compilers.CheckResult, error) {
		leave, err := ts.Workspaces.Checks.Take(ctx) // after an update many may be asked for at a time
		if err != nil {
			return compilers.CheckResult{}, err
		}
		defer leave()
		return ts.tryView(ctx, a, b, job)
	})
}

// tryView loads the build from its view.
func (ts *Trials) tryView(ctx context.Context, a *request.Against, b *index.Build,
	job func(*index.Build, *request.Answer) compilers.CheckJob) (compilers.CheckResult, error) {
	answer, err := lookup.Lease(ctx, ts.Store, b, func(string) {})
	if err != nil {
		return compilers.CheckResult{}, err
	}
	defer answer.View.Close()
	return ts.Check(ctx, a, job(b, answer))
}

// Proven reports whether the result of a load check is for good. A worker that crashed may have
// lacked memory for a moment.
func Proven(r compilers.CheckResult) bool { return r.Outcome != compilers.Failed || r.Code != Crashed }

// Crashed is the code of a check whose process crashed.
const Crashed = -1
