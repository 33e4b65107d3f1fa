package cache

import (
	"context"
	"fmt"

	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/plan"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/sources"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// openJudge makes the judge of builds.
func (c *Cache) openJudge() {
	c.judges = judge.New(judge.Options{
		Runtimes: c.runtimes, Compiler: c.compiler, Index: c.index, Now: c.now, Log: c.log, Event: c.happened,
		Rules: func() (*rules.Set, uint64) {
			s := c.settings.Load()
			return s.rules, s.judging
		},
		Verdicts: func(rc *runtimes.Content) *judge.Verdicts { return &plan.NotesOn(rc).Verdicts },
		Target: func(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content, b *index.Build) (*judge.Target, error) {
			at, err := sources.AttemptOf(b)
			if err == nil {
				at, err = c.planner.Planned(ctx, at.WithRuntime(rt.Name, rc))
			}
			if err != nil {
				return nil, err
			}
			return at.Plan.Against(rt.Name, rc).Target(), nil
		},
		Rebuild: func(b *index.Build, runtime, why string) { c.recompiler.Refresh(b, runtime, why, nil) },
	})
}

// trials judge builds for look-ups, and load them for that.
type trials struct{ c *Cache }

// Judge says how the build suits. It loads the build where that could change what becomes of it.
func (x trials) Judge(ctx context.Context, a *request.Against, b *index.Build) (judge.Judgement, error) {
	c := x.c
	return c.judges.Build(ctx, a.Target(), b, func(ctx context.Context, j judge.Judgement) (compilers.CheckResult, bool, error) {
		if !c.worthTrying(a, b, j) {
			return compilers.CheckResult{}, false, nil
		}
		checked, err := c.loadCheck(ctx, a, b)
		return checked, true, err
	})
}

// Knows reports whether Judge need not work anything out.
func (x trials) Knows(a *request.Against, b *index.Build) bool {
	return x.c.judges.Knows(a.Target(), b)
}

// LoadsAlone loads the models of a group without sharing.
func (x trials) LoadsAlone(ctx context.Context, a *request.Against, b *index.Build) (compilers.CheckResult, error) {
	return x.c.loadCheckAs(ctx, a, b, "load alone", a.CheckJobAlone)
}

// worthTrying tells whether a load check could change what becomes of the build. Who refuses what is unknown does so
// whatever loads. A build of another machine is tried whatever is said of it.
func (c *Cache) worthTrying(a *request.Against, b *index.Build, j judge.Judgement) bool {
	policy := c.policyOf(a.EPs).Unknown
	if j.Verdict == compilers.Unsupported || policy == request.PolicyRefuse && j.Verdict == compilers.Unknown {
		return false
	}
	return a.Marks.Elsewhere(b) || !j.Firm && policy != request.PolicyServe
}

// loadCheck loads the build's graph with the libraries that it is judged for, once for each pair.
// What may be of another machine is run as well.
func (c *Cache) loadCheck(ctx context.Context, a *request.Against, b *index.Build) (compilers.CheckResult, error) {
	if a.Marks.Elsewhere(b) {
		return c.runCheck(ctx, a, b)
	}
	return c.loadCheckAs(ctx, a, b, "load", a.CheckJobOf)
}

// loadCheckAs is loadCheck in one of the ways in which a build is loaded.
func (c *Cache) loadCheckAs(ctx context.Context, a *request.Against, b *index.Build, way string,
	job func(*index.Build, *request.Answer) compilers.CheckJob) (compilers.CheckResult, error) {
	key := c.judges.Key(a.Target(), way, b.ID[:])
	return runtimes.Remember(ctx, c.runtimes, runtimes.Question{Key: key}, proven, func(ctx context.Context) (compilers.CheckResult, error) {
		leave, err := c.checks.Take(ctx) // after an update many may be asked for at a time
		if err != nil {
			return compilers.CheckResult{}, err
		}
		defer leave()
		return c.tryView(ctx, a, b, job)
	})
}

func (c *Cache) tryView(ctx context.Context, a *request.Against, b *index.Build,
	job func(*index.Build, *request.Answer) compilers.CheckJob) (compilers.CheckResult, error) {
	answer, err := lookup.Lease(ctx, c.store, b, func(string) {})
	if err != nil {
		return compilers.CheckResult{}, err
	}
	defer answer.View.Close()
	return c.believed(ctx, a, job(b, answer))
}

// proven tells whether a load check's result is for good. A worker that crashed may have lacked memory for a moment.
func proven(r compilers.CheckResult) bool { return r.Outcome != compilers.Failed || r.Code != crashed }

// crashed is the code of a check whose process crashed.
const crashed = -1

// runCheck loads a build that may be of another machine, and runs it once on zeros: an execution
// provider may load code for instruction sets that this processor lacks, and fail only when that is
// run. The result is remembered, once for each pair.
func (c *Cache) runCheck(ctx context.Context, a *request.Against, b *index.Build) (
	compilers.CheckResult, error) {
	if a.Model == nil {
		return notRun("its source model is not here"), nil
	}
	key := c.judges.Key(a.Target(), "run", b.ID[:])
	try := func(ctx context.Context, r *request.Request) (checked compilers.CheckResult, err error) {
		mine := *a
		mine.Model = r
		for _, free := range freeSizes {
			run := func(b *index.Build, view *request.Answer) compilers.CheckJob {
				job := mine.CheckJobOf(b, view)
				job.Zeros = free
				return job
			}
			checked, err = c.tryView(ctx, &mine, b, run)
			if err != nil || checked.Outcome != compilers.Failed || !checked.Ran {
				return checked, err
			}
			checked, err = c.blame(ctx, &mine, b, checked, free)
			if err != nil || checked.Outcome == compilers.Failed {
				return checked, err
			}
		}
		return checked, nil
	}
	return workspace.Remember(ctx, c.workspaces, a.Model, key, proven, try)
}

// freeSizes are the sizes of free dimensions with which a build is run. The second is for models
// that do not run with the first: images of one pixel are none to many a detector.
var freeSizes = [...]int64{1, 64}

// notRun is the result for a build that could not be tried.
func notRun(why string) compilers.CheckResult {
	return compilers.CheckResult{Outcome: compilers.NotCheckable, Text: why}
}

// blame has the execution providers load the source model here, and run it on the same zeros. Where
// that fails as well, these are no input for the model, and the failure says nothing of the build.
func (c *Cache) blame(ctx context.Context, a *request.Against, b *index.Build, failed compilers.CheckResult,
	free int64) (compilers.CheckResult, error) {
	if a.Adopting {
		return notRun("it does not run on zeros, and its source model is not here: " + failed.Text), nil
	}
	member := failed.Member
	if len(b.Members) > 0 && a.Model.Models() == 1 {
		if b.Members[member].ModelDigest != a.Canonical.Model {
			return notRun("another model of its group does not run on zeros: " + failed.Text), nil
		}
		member = 0
	}
	j, remove, err := c.workspaces.Copy(ctx, a.Model, a.Canonical)
	defer remove()
	if err != nil {
		return failed, err
	}
	source := a.CheckJob(j.Copies[member].Path, request.LoadLevel(a.Canonical.GraphOptimizationLevel))
	source.Zeros = free
	source.FreeDimensions = a.Canonical.FreeDimensions
	source.FreeDimensionsByDenotation = a.Canonical.FreeDimensionsByDenotation
	load := func() (compilers.CheckResult, error) { return c.compiler.Check(ctx, source) }
	ran, err := runtimes.Still(a.Content, load)
	if err != nil || ran.Outcome == compilers.Passed {
		return failed, err
	}
	why := "it does not run on zeros (%s), and neither does its source model (%s)"
	return notRun(fmt.Sprintf(why, failed.Text, ran.Text)), nil
}
