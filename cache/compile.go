package cache

import (
	"context"
	"errors"
	"slices"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
)

// compileOnce compiles the model, or waits for whoever does, and answers with a lease on the result.
func (c *Cache) compileOnce(ctx context.Context, at *request.Attempt, why string) (*request.Answer, error) {
	var result *jobs.Result
	var first bool
	var err error
	for range maxHandOvers {
		key := at.JobKey()
		if own := (jobs.Key{Build: key.Build, Scope: rights.OwnScope(at.Peer)}); at.OnMiss == request.Wait && key.Scope != "" && c.jobs.Open(own) != nil {
			key = own // an application of the same user's holds the claim
		}
		result, first, err = c.jobs.Join(ctx, key, c.caller(at), c.begin(at, key.Scope))
		if err == nil && !first && at.OtherORT(result.Build.ORTVersion) {
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
	a, err := c.serveCompiled(ctx, result, at.Phase)
	if errors.Is(err, store.ErrGone) {
		*at.Unserved = append(*at.Unserved, result.Build.ID)
	}
	if err != nil {
		return nil, request.Unservable(err, at.Name, "compiled")
	}
	a.Outcome, a.Why = request.Waited, "compiled by another request for the same"
	if first && !result.Found {
		a.Outcome, a.Why = request.Compiled, why
	}
	if result.Why != "" {
		a.Why = result.Why
	}
	return a, nil
}

// errOtherORT is for who waited for a build, time and again, and may not have what came.
func errOtherORT(at *request.Attempt, b *index.Build) error {
	return apierr.New(apierr.Busy, nil, "model %q: strict_ort: it is being compiled under ONNX Runtime %s", at.Name, b.ORTVersion).WithHint("ask again")
}

// jobError is what a request is told of a job that brought nothing.
func jobError(ctx context.Context, model string, err error) error {
	var known *apierr.Error
	var end *claimEnd
	switch {
	case ctx.Err() != nil:
		return request.ContextError(ctx, model)
	case errors.As(err, &end):
		return claimFailed(model, end)
	case errors.As(err, &known) && failure.In(known) != nil:
		return failure.Retold(known, model)
	case known != nil:
		return err
	}
	return apierr.New(apierr.Cancelled, err, "model %q", model)
}

func (c *Cache) serveCompiled(ctx context.Context, result *jobs.Result, phase func(string)) (*request.Answer, error) {
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
func (c *Cache) madeMeanwhile(at *request.Attempt, scope string) jobs.Work {
	if at.OnMiss == request.Refresh || at.OnMiss == request.Bypass || scope == "" {
		return nil
	}
	for b, err := range c.stored(at.Plan, []string{scope}) {
		if err != nil {
			return nil // whoever makes it will say so
		}
		if at.Plan.MadeExactly(b) && !slices.Contains(*at.Unserved, b.ID) && c.barred(at, b) == "" {
			return jobs.Func{Is: at.JobAbout(scope, "asked for"), Do: func(context.Context, *jobs.Job) (*jobs.Result, error) {
				return &jobs.Result{Build: b, Found: true}, nil
			}}
		}
	}
	return nil
}
