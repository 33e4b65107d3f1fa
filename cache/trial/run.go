package trial

import (
	"context"
	"fmt"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// runOnce loads a build that may be of another machine, and runs it once on zeros: an execution
// provider may load code for instruction sets that this processor lacks, and fail only when that is
// run. The result is remembered, once for each pair.
func (ts *Trials) runOnce(ctx context.Context, a *request.Against, b *index.Build) (compilers.CheckResult, error) {
	if a.Model == nil {
		return notRun("its source model is not here"), nil
	}
	key := ts.Judges.Key(a.Target(), "run", b.ID[:])
	try := func(ctx context.Context, r *request.Request) (checked compilers.CheckResult, err error) {
		mine := *a
		mine.Model = r
		for _, free := range FreeSizes {
			run := func(b *index.Build, view *request.Answer) compilers.CheckJob {
				job := mine.CheckJobOf(b, view)
				job.Zeros = free
				return job
			}
			checked, err = ts.tryView(ctx, &mine, b, run)
			if err != nil || checked.Outcome != compilers.Failed || !checked.Ran {
				return checked, err
			}
			checked, err = ts.blame(ctx, &mine, b, checked, free)
			if err != nil || checked.Outcome == compilers.Failed {
				return checked, err
			}
		}
		return checked, nil
	}
	return workspace.Remember(ctx, ts.Workspaces, a.Model, key, Proven, try)
}

// FreeSizes are the sizes of free dimensions with which a build is run. The second is for models
// that do not run with the first: images of one pixel are none to many a detector.
var FreeSizes = [...]int64{1, 64}

// notRun is the result for a build that could not be tried.
func notRun(why string) compilers.CheckResult {
	return compilers.CheckResult{Outcome: compilers.NotCheckable, Text: why}
}

// blame has the execution providers load the source model here, and run it on the same zeros. Where
// that fails as well, these are no input for the model, and the failure says nothing of the build.
func (ts *Trials) blame(ctx context.Context, a *request.Against, b *index.Build, failed compilers.CheckResult,
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
	j, remove, err := ts.Workspaces.Copy(ctx, a.Model, a.Canonical)
	defer remove()
	if err != nil {
		return failed, err
	}
	source := a.CheckJob(j.Copies[member].Path, request.LoadLevel(a.Canonical.GraphOptimizationLevel))
	source.Zeros = free
	ran, err := ts.still(ctx, a, a.WithDimensions(source))
	if err != nil || ran.Outcome == compilers.Passed {
		return failed, err
	}
	why := "it does not run on zeros (%s), and neither does its source model (%s)"
	return notRun(fmt.Sprintf(why, failed.Text, ran.Text)), nil
}
