package cache

import (
	"context"
	"errors"
	"slices"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
)

// compileOnce compiles the model, or waits for whoever does, and answers with a lease on the result.
func (c *Cache) compileOnce(ctx context.Context, at *attempt, why string) (*Answer, error) {
	var result *jobs.Result
	var first bool
	var err error
	for range maxHandOvers {
		key := at.jobKey()
		if own := (jobs.Key{Build: key.Build, Scope: rights.OwnScope(at.Peer)}); at.OnMiss == Wait && key.Scope != "" && c.jobs.Open(own) != nil {
			key = own // an application of the same user's holds the claim
		}
		result, first, err = c.jobs.Join(ctx, key, c.caller(at), c.begin(at, key.Scope))
		if err == nil && !first && at.otherORT(result.Build.ORTVersion) {
			c.store.Taken(result.Build.ID) // or rather, not taken
			err = errOtherORT(at, result.Build)
			continue
		}
		var end *claimEnd
		if !errors.As(err, &end) {
			break // else what was claimed is compiled here after all
		}
		why = end.Error()
	}
	if err != nil {
		return nil, jobError(ctx, at.Name, err)
	}
	if !first && result.Build.Put {
		return c.waited(ctx, at, result)
	}
	defer c.store.Taken(result.Build.ID)
	a, err := c.serveCompiled(ctx, result, at.phase)
	if errors.Is(err, store.ErrGone) {
		*at.unserved = append(*at.unserved, result.Build.ID)
	}
	if err != nil {
		return nil, unservable(err, at.Name, "compiled")
	}
	a.Outcome, a.Why = Waited, "compiled by another request for the same"
	if first && !result.Found {
		a.Outcome, a.Why = Compiled, why
	}
	if result.Why != "" {
		a.Why = result.Why
	}
	return a, nil
}

// errOtherORT is for who waited for a build, time and again, and may not have what came.
func errOtherORT(at *attempt, b *index.Build) error {
	return apierr.New(apierr.Busy, nil, "model %q: strict_ort: it is being compiled under ONNX Runtime %s", at.Name, b.ORTVersion).WithHint("ask again")
}

// jobError is what a request is told of a job that brought nothing.
func jobError(ctx context.Context, model string, err error) error {
	var known *apierr.Error
	var end *claimEnd
	switch {
	case ctx.Err() != nil:
		return contextError(ctx, model)
	case errors.As(err, &end):
		return claimFailed(model, end)
	case errors.As(err, &known) && failure.In(known) != nil:
		return failure.Retold(known, model)
	case known != nil:
		return err
	}
	return apierr.New(apierr.Cancelled, err, "model %q", model)
}

func (c *Cache) serveCompiled(ctx context.Context, result *jobs.Result, phase func(string)) (*Answer, error) {
	if result.Alone == nil {
		return c.serve(ctx, result.Build, phase)
	}
	a, err := leased(result.Build, result.Alone)
	if err == nil {
		a.Unkept = true
	}
	return a, err
}

// madeMeanwhile looks once more for the build that a job in this scope would make: then there is nothing left to do. It is
// nil if the build is still to be made. Jobs store their builds before they are taken from those that can be joined, so
// under the lock of Jobs nothing is overlooked.
func (c *Cache) madeMeanwhile(at *attempt, scope string) jobs.Work {
	if at.OnMiss == Refresh || at.OnMiss == Bypass || scope == "" {
		return nil
	}
	for b, err := range c.stored(at.plan, []string{scope}) {
		if err != nil {
			return nil // whoever makes it will say so
		}
		if at.plan.exactly(b) && !slices.Contains(*at.unserved, b.ID) && c.barred(at, b) == "" {
			return jobs.Func{Is: at.about(scope, "asked for"), Do: func(context.Context, *jobs.Job) (*jobs.Result, error) {
				return &jobs.Result{Build: b, Found: true}, nil
			}}
		}
	}
	return nil
}
