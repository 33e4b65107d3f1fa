package cache

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"sync/atomic"

	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/rules"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// against is what a build is judged against: a runtime, with the execution providers and options of a request.
type against struct {
	*plan
	runtime string
	rc      *runtimes.Content

	model    *Request // a request that has its models with it, for controls; nil: there is none
	adopting bool     // that is of an artefact
}

func (p *plan) against(rt string, rc *runtimes.Content) *against {
	return &against{plan: p, runtime: rt, rc: rc}
}

// target is what the builds are judged for.
func (a *against) target() *judge.Target {
	return &judge.Target{Runtime: a.runtime, Content: a.rc, EPs: a.eps, Marks: a.marks, Facts: a.facts,
		BuildKey: a.buildKey, Seen: a.seen}
}

// openJudge makes the judge of builds.
func (c *Cache) openJudge() {
	c.judges = judge.New(judge.Options{
		Runtimes: c.runtimes, Compiler: c.compiler, Index: c.index, Now: c.now, Log: c.log, Event: c.happened,
		Rules: func() (*rules.Set, uint64) {
			s := c.settings.Load()
			return s.rules, s.judging
		},
		Verdicts: func(rc *runtimes.Content) *judge.Verdicts { return &notesOn(rc).verdicts },
		Target: func(ctx context.Context, rt *runtimes.Runtime, rc *runtimes.Content, b *index.Build) (*judge.Target, error) {
			at, err := c.attemptOf(b)
			if err == nil {
				at, err = c.planned(ctx, at.withRuntime(rt.Name, rc))
			}
			if err != nil {
				return nil, err
			}
			return at.plan.against(rt.Name, rc).target(), nil
		},
		Rebuild: func(b *index.Build, runtime, why string) { c.wantAnew(b, runtime, why, nil) },
	})
}

// judge says how the build suits. It loads the build where that could change what becomes of it.
func (c *Cache) judge(ctx context.Context, a *against, b *index.Build) (judge.Judgement, error) {
	if c.readOnly {
		return recorded(a, b), nil
	}
	return c.judges.Build(ctx, a.target(), b, func(ctx context.Context, j judge.Judgement) (compilers.CheckResult, bool, error) {
		if !c.worthTrying(a, b, j) {
			return compilers.CheckResult{}, false, nil
		}
		checked, err := c.loadCheck(ctx, a, b)
		return checked, true, err
	})
}

// worthTrying tells whether a load check could change what becomes of the build. Who refuses what is unknown does so
// whatever loads. A build of another machine is tried whatever is said of it.
func (c *Cache) worthTrying(a *against, b *index.Build, j judge.Judgement) bool {
	policy := c.policyOf(a.eps).Unknown
	if j.Verdict == compilers.Unsupported || policy == PolicyRefuse && j.Verdict == compilers.Unknown {
		return false
	}
	return a.marks.Elsewhere(b) || !j.Firm && policy != PolicyServe
}

// loadCheck loads the build's graph with the libraries that it is judged for, once for each pair.
// What may be of another machine is run as well.
func (c *Cache) loadCheck(ctx context.Context, a *against, b *index.Build) (compilers.CheckResult, error) {
	if a.marks.Elsewhere(b) {
		return c.runCheck(ctx, a, b)
	}
	return c.loadCheckAs(ctx, a, b, "load", a.checkJobOf)
}

// loadCheckAs is loadCheck in one of the ways in which a build is loaded.
func (c *Cache) loadCheckAs(ctx context.Context, a *against, b *index.Build, way string,
	job func(*index.Build, *Answer) compilers.CheckJob) (compilers.CheckResult, error) {
	key := c.judges.Key(a.target(), way, b.ID[:])
	return runtimes.Remember(ctx, c.runtimes, runtimes.Question{Key: key}, proven, func(ctx context.Context) (compilers.CheckResult, error) {
		leave, err := c.checks.Take(ctx) // after an update many may be asked for at a time
		if err != nil {
			return compilers.CheckResult{}, err
		}
		defer leave()
		return c.tryView(ctx, a, b, job)
	})
}

func (c *Cache) tryView(ctx context.Context, a *against, b *index.Build,
	job func(*index.Build, *Answer) compilers.CheckJob) (compilers.CheckResult, error) {
	answer, err := c.serve(ctx, b, func(string) {})
	if err != nil {
		return compilers.CheckResult{}, err
	}
	defer answer.View.Close()
	return c.believed(ctx, a, job(b, answer))
}

// checkJob loads a graph as an application would that asked for what is judged.
func (a *against) checkJob(graph, level string) compilers.CheckJob {
	return compilers.CheckJob{Runtime: a.rc.Spec, EPs: a.eps, Graph: graph, SessionOptions: a.canonical.SessionOptions,
		GraphOptimizationLevel: level}
}

// checkJobOf loads a build from its view: a group's graphs together, in order.
func (a *against) checkJobOf(b *index.Build, view *Answer) compilers.CheckJob {
	graph := filepath.Join(view.Path, filepath.FromSlash(view.Graph))
	job := a.checkJob(graph, cmp.Or(b.GraphOptimizationLevel, loadLevel(a.canonical.GraphOptimizationLevel)))
	for i := range b.Members {
		job.SessionOptions = sharingOptions(a.canonical.SessionOptions)
		if i > 0 {
			job.Share = append(job.Share, filepath.Join(filepath.Dir(graph), filepath.FromSlash(b.Members[i].Graph)))
		}
	}
	return job
}

// checkJobAlone loads a group's graphs as checkJobOf does, but none of them shares anything with
// the others.
func (a *against) checkJobAlone(b *index.Build, view *Answer) compilers.CheckJob {
	job := a.checkJobOf(b, view)
	job.SessionOptions = a.canonical.SessionOptions
	return job
}

// spelled is the request but for its model.
func (a *against) spelled() []byte {
	r := a.canonical
	r.Model = cas.Digest{}
	return r.Encode()
}

// proven tells whether a load check's result is for good. A worker that crashed may have lacked memory for a moment.
func proven(r compilers.CheckResult) bool { return r.Outcome != compilers.Failed || r.Code != crashed }

// crashed is the code of a check whose process crashed.
const crashed = -1

// runCheck loads a build that may be of another machine, and runs it once on zeros: an execution
// provider may load code for instruction sets that this processor lacks, and fail only when that is
// run. The result is remembered, once for each pair.
func (c *Cache) runCheck(ctx context.Context, a *against, b *index.Build) (
	compilers.CheckResult, error) {
	if a.model == nil {
		return notRun("its source model is not here"), nil
	}
	key := c.judges.Key(a.target(), "run", b.ID[:])
	try := func(ctx context.Context, r *Request) (checked compilers.CheckResult, err error) {
		mine := *a
		mine.model = r
		for _, free := range freeSizes {
			run := func(b *index.Build, view *Answer) compilers.CheckJob {
				job := mine.checkJobOf(b, view)
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
	return rememberOwn(ctx, c, a.model, key, proven, try)
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
func (c *Cache) blame(ctx context.Context, a *against, b *index.Build, failed compilers.CheckResult,
	free int64) (compilers.CheckResult, error) {
	if a.adopting {
		return notRun("it does not run on zeros, and its source model is not here: " + failed.Text), nil
	}
	member := failed.Member
	if len(b.Members) > 0 && a.model.models() == 1 {
		if b.Members[member].ModelDigest != a.canonical.Model {
			return notRun("another model of its group does not run on zeros: " + failed.Text), nil
		}
		member = 0
	}
	j, remove, err := c.copied(ctx, a.model, a.canonical)
	defer remove()
	if err != nil {
		return failed, err
	}
	source := a.checkJob(j.copies[member].path, loadLevel(a.canonical.GraphOptimizationLevel))
	source.Zeros = free
	source.FreeDimensions = a.canonical.FreeDimensions
	source.FreeDimensionsByDenotation = a.canonical.FreeDimensionsByDenotation
	load := func() (compilers.CheckResult, error) { return c.compiler.Check(ctx, source) }
	ran, err := runtimes.Still(a.rc, load)
	if err != nil || ran.Outcome == compilers.Passed {
		return failed, err
	}
	why := "it does not run on zeros (%s), and neither does its source model (%s)"
	return notRun(fmt.Sprintf(why, failed.Text, ran.Text)), nil
}

// rememberOwn is remember for what needs the request's models: find gets them with descriptors of
// its own, because the caller may leave before the end, and is bounded as load checks are.
func rememberOwn[T any](ctx context.Context, c *Cache, r *Request, key string, lasts func(T) bool,
	find func(context.Context, *Request) (T, error)) (T, error) {
	none, known := runtimes.Recall[T](c.runtimes, key)
	if known {
		return none, nil
	}
	own, err := r.own()
	if err != nil {
		return none, err
	}
	var taken atomic.Bool // own, by whichever closes it
	defer func() {
		if taken.CompareAndSwap(false, true) {
			own.close()
		}
	}()
	try := func(ctx context.Context) (T, error) {
		if !taken.CompareAndSwap(false, true) {
			return none, context.Canceled
		}
		defer own.close()
		leave, err := c.checks.Take(ctx) // after an update many may be asked for at a time
		if err != nil {
			return none, err
		}
		defer leave()
		return find(ctx, own)
	}
	return runtimes.Remember(ctx, c.runtimes, runtimes.Question{Key: key}, lasts, try)
}
