package trial

import (
	"cmp"
	"context"
	"errors"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/plan"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/once"
)

// Result is the result of loading a build, and of the control where it failed.
type Result struct {
	compilers.CheckResult
	Control string // why a failure is not to be believed; "" if it is
}

// reported loads the build in a process of its own, twice if it fails, because a worker may lack
// memory for a moment. A failure is believed only where the smallest artefact that these libraries
// make loads.
func (ts *Trials) reported(ctx context.Context, a *request.Against, b *index.Build) (Result, error) {
	key := ts.Runtimes.Key("report", a.Content, b.ID[:])
	return once.Do(ctx, ts.Facts, key, func(ctx context.Context) (Result, error) {
		answer, err := lookup.Lease(ctx, ts.Store, b, func(string) {})
		if err != nil {
			return Result{}, err
		}
		defer answer.View.Close()
		job := a.CheckJobOf(b, answer)
		var t Result
		for range 2 {
			if t.CheckResult, err = ts.still(ctx, a, job); err != nil || t.Outcome != compilers.Failed {
				return t, err
			}
		}
		t.Control, err = ts.Control(ctx, a)
		return t, err
	})
}

// still loads a graph, with libraries that are not replaced meanwhile.
func (ts *Trials) still(ctx context.Context, a *request.Against, job compilers.CheckJob) (compilers.CheckResult, error) {
	return runtimes.Still(a.Content, func() (compilers.CheckResult, error) { return ts.Compiler.Check(ctx, job) })
}

// Check loads a graph, and believes its failure only where the smallest artefact that these libraries
// make loads: otherwise the failure says something of this machine, and nothing of the graph.
func (ts *Trials) Check(ctx context.Context, a *request.Against, job compilers.CheckJob) (compilers.CheckResult, error) {
	checked, err := ts.still(ctx, a, job)
	if err != nil || checked.Outcome != compilers.Failed {
		return checked, err
	}
	// After an update many fail one after the other, so that one loads is remembered. That none
	// does is not.
	key := ts.Runtimes.Key("control", a.Content, a.Spelled())
	_, err = once.Do(ctx, ts.Facts, key, func(ctx context.Context) (bool, error) {
		broken, err := ts.Control(ctx, a)
		if err == nil && broken != "" {
			err = failure.OfMachine(broken).Refusal(nil, "nothing loads here")
		}
		return true, err
	})
	if err != nil {
		return compilers.CheckResult{}, err
	}
	return checked, nil
}

// Control returns why what these libraries make does not load here, "" if it does or if nothing can
// be made to try that with.
func (ts *Trials) Control(ctx context.Context, a *request.Against) (string, error) {
	broken, err := ts.control(ctx, a)
	return runtimes.Text(broken), err
}

func (ts *Trials) control(ctx context.Context, a *request.Against) (broken, err error) {
	var own *compilers.Job
	if a.OnOwnModel {
		if a.Model == nil {
			return nil, nil // there is nothing to try it with, so what happened is believed
		}
		j, remove, err := ts.Workspaces.Copy(ctx, a.Model, a.Canonical)
		defer remove()
		if err != nil {
			return nil, err
		}
		own = plan.OwnJob(a.Canonical, j.Copies[0].Path)
	}
	folder, remove, err := ts.Store.Stage("control-")
	if err != nil {
		return nil, err
	}
	defer remove()
	result, err := runtimes.Still(a.Content, func() (compilers.CheckResult, error) {
		return compilers.Control(ctx, ts.Compiler, a.Content.Spec, a.EPs, folder, own)
	})
	switch {
	case errors.Is(err, runtimes.ErrMoving) || errors.Is(err, runtimes.ErrReplaced):
		return nil, err
	case err == nil && result.Outcome == compilers.Failed:
		return errors.New(cmp.Or(result.Text, result.Outcome)), nil
	}
	return err, nil // where the device is elsewhere, a failed load proves nothing
}

// EP compiles one node, and loads it, unless that was tried lately. It returns what is wrong.
func (ts *Trials) EP(ctx context.Context, rt *runtimes.Runtime, facts *runtimes.Facts, name string) error {
	rc, err := ts.Runtimes.Content(ctx, rt, func(string) {})
	if err != nil {
		return err
	}
	eps, err := runtimes.Alone(rc, facts.Facts, name)
	if err != nil {
		return err
	}
	type tried struct{ broken error }
	key := ts.Runtimes.Key("doctor", rc, []byte(name))
	found, err := once.Do(ctx, ts.Facts, key, func(ctx context.Context) (tried, error) {
		broken, err := ts.control(ctx, (&request.Plan{EPs: eps}).Against("", rc))
		return tried{broken}, err
	})
	return cmp.Or(err, found.broken)
}

// Sandbox returns what confines the execution providers' code, found out once by trying. It is
// empty for a compiler that has no such code.
func (ts *Trials) Sandbox(ctx context.Context) ([]compilers.Measure, error) {
	s, ok := ts.Compiler.(compilers.Sandboxed)
	if !ok {
		return nil, nil
	}
	measures, err := s.Sandbox(ctx)
	if err != nil {
		return nil, request.WorkerError(err, "sandbox")
	}
	return measures, nil
}
