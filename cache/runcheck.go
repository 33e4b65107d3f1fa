package cache

import (
	"context"
	"fmt"
	"sync/atomic"

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
	run := func(b *index.Build, view *Answer) compilers.CheckJob {
		job := a.checkJobOf(b, view)
		job.Run = true
		return job
	}
	try := func(ctx context.Context, r *Request) (compilers.CheckResult, error) {
		mine := *a
		mine.model = r
		checked, err := c.tryView(ctx, &mine, b, run)
		if err != nil || checked.Outcome != compilers.Failed || !checked.Ran {
			return checked, err
		}
		return c.blame(ctx, &mine, b, checked)
	}
	return rememberOwn(ctx, c, a.model, key, proven, try)
}

// notRun is the result for a build that could not be tried.
func notRun(why string) compilers.CheckResult {
	return compilers.CheckResult{Outcome: compilers.NotCheckable, Text: why}
}

// blame has the execution providers load the source model here, and run it on the same zeros. Where
// that fails as well, zeros are no input for the model, and the failure says nothing of the build.
func (c *Cache) blame(ctx context.Context, a *against, b *index.Build,
	failed compilers.CheckResult) (compilers.CheckResult, error) {
	member := failed.Member
	if len(b.Members) > 0 && a.model.models() == 1 {
		if b.Members[member].ModelDigest != a.request.Model {
			return notRun("another model of its group does not run on zeros: " + failed.Text), nil
		}
		member = 0
	}
	copies, remove, err := c.copied(ctx, a.model, a.request)
	defer remove()
	if err != nil {
		return failed, err
	}
	source := a.checkJob(copies[member].path, loadLevel(a.request.GraphOptimizationLevel))
	source.Run = true
	source.FreeDimensions = a.request.FreeDimensions
	source.FreeDimensionsByDenotation = a.request.FreeDimensionsByDenotation
	load := func() (compilers.CheckResult, error) { return c.compiler.Check(ctx, source) }
	ran, err := still(a.rc, load)
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
	var none T
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
		c.checks <- struct{}{} // after an update many may be asked for at a time
		defer func() { <-c.checks }()
		return find(ctx, own)
	}
	return remember(ctx, c.probes, byItself(), "", key, false, lasts, try)
}
