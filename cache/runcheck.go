package cache

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// runCheck loads a build that may be of another machine, and runs it once on zeros: an execution
// provider may load code for instruction sets that this processor lacks, and fail only when that is
// run. The result is remembered, once for each pair.
func (c *Cache) runCheck(ctx context.Context, a *against, b *index.Build) (
	compilers.CheckResult, error) {
	if a.model == nil {
		return notRun("its source model is not here"), nil
	}
	key := a.key(c, "run", b.ID[:])
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
