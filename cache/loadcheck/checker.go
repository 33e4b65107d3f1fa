// Package loadcheck loads builds in workers, to find out whether they work with this machine's
// libraries, and whether their outputs equal those of their source models.
package loadcheck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/judge"
	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/plan"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/ttlcache"
	"github.com/epcached/epcached/store"
)

// Checker loads builds and remembers results. All fields must be set. It is safe for concurrent
// use.
type Checker struct {
	Store      *store.Store
	Runtimes   *runtimes.Set
	Compiler   compilers.Compiler
	Judges     *judge.Judge
	Results    *ttlcache.Cache
	Workspaces *workspace.Maker
	Policy     func([]compilers.EP) request.Policy
	Now        func() time.Time
	Planner    *plan.Planner
}

// Judge judges a build. It loads the build if the result could change whether it is served.
func (ts *Checker) Judge(ctx context.Context, a *request.JudgeTarget,
	b *index.Build) (judge.Judgement, error) {
	return ts.Judges.Build(ctx, a.Target(), b,
		func(ctx context.Context, j judge.Judgement) (compilers.CheckResult, bool, error) {
			if !ts.worthLoading(a, b, j) {
				return compilers.CheckResult{}, false, nil
			}
			checked, err := ts.load(ctx, a, b)
			return checked, true, err
		})
}

// IsKnown reports whether Judge would return a remembered judgement.
func (ts *Checker) IsKnown(a *request.JudgeTarget, b *index.Build) bool {
	return ts.Judges.IsKnown(a.Target(), b)
}

// LoadsAlone loads each model of a group without the others.
func (ts *Checker) LoadsAlone(ctx context.Context, a *request.JudgeTarget,
	b *index.Build) (compilers.CheckResult, error) {
	return ts.loadAs(ctx, a, b, "load alone", a.CheckJobAlone)
}

// worthLoading reports whether a load check could change whether the build is served. It could not
// if the policy refuses builds that are not known to suit. A build of another machine is always
// loaded.
func (ts *Checker) worthLoading(a *request.JudgeTarget, b *index.Build, j judge.Judgement) bool {
	policy := ts.Policy(a.EPs).Unknown
	if j.Verdict == compilers.Unsupported || policy == request.PolicyRefuse &&
		j.Verdict == compilers.Unknown {
		return false
	}
	return a.Marks.OtherMachine(b) || !j.Firm && policy != request.PolicyServe
}

// load loads the build's graph with the libraries that it is judged for, once for each pair of
// build and libraries. If the build may come from another machine, it is run as well.
func (ts *Checker) load(ctx context.Context, a *request.JudgeTarget,
	b *index.Build) (compilers.CheckResult, error) {
	if a.Marks.OtherMachine(b) {
		return ts.runOnce(ctx, a, b)
	}
	return ts.loadAs(ctx, a, b, "load", a.CheckJobOf)
}

// loadAs loads the build with the check that job returns. kind names the check in the key of the
// remembered result.
func (ts *Checker) loadAs(ctx context.Context, a *request.JudgeTarget, b *index.Build, kind string,
	job func(*index.Build, *request.Answer) compilers.CheckJob) (compilers.CheckResult, error) {
	key := ts.Judges.Key(a.Target(), kind, b.ID[:])
	return runtimes.Remember(ctx, ts.Runtimes, runtimes.Inquiry{Key: key}, IsFinal,
		func(ctx context.Context) (compilers.CheckResult, error) {
			// after an update many builds may be loaded at the same time
			leave, err := ts.Workspaces.AcquireSlot(ctx, a.Model)
			if err != nil {
				return compilers.CheckResult{}, err
			}
			defer leave()
			return ts.loadView(ctx, a, b, job)
		})
}

// loadView loads the build from its view.
func (ts *Checker) loadView(ctx context.Context, a *request.JudgeTarget, b *index.Build,
	job func(*index.Build, *request.Answer) compilers.CheckJob) (compilers.CheckResult, error) {
	answer, err := lookup.Lease(ctx, ts.Store, b, func(string) {})
	if err != nil {
		return compilers.CheckResult{}, err
	}
	defer answer.View.Close()
	return ts.Check(ctx, a, job(b, answer))
}

// IsFinal reports whether the result of a load check can be remembered. A crash cannot, because the
// worker may have lacked memory for a moment.
func IsFinal(r compilers.CheckResult) bool { return !r.Crashed() }

// runOnce loads a build that may come from another machine, and runs it once on zeros, because its
// code may need instructions that this processor lacks and then fails only when it runs. The result
// is remembered for each pair of build and libraries.
func (ts *Checker) runOnce(ctx context.Context, a *request.JudgeTarget,
	b *index.Build) (compilers.CheckResult, error) {
	if a.Model == nil {
		return notRun("its source model is missing"), nil
	}
	key := ts.Judges.Key(a.Target(), "run", b.ID[:])
	try := func(ctx context.Context, r *request.Request) (checked compilers.CheckResult,
		err error) {
		mine := *a
		mine.Model = r
		for _, free := range FreeSizes {
			run := func(b *index.Build, view *request.Answer) compilers.CheckJob {
				job := mine.CheckJobOf(b, view)
				job.Zeros = free
				return job
			}
			checked, err = ts.loadView(ctx, &mine, b, run)
			if err != nil || checked.Outcome != compilers.Failed || !checked.Ran {
				return checked, err
			}
			checked, err = ts.checkSource(ctx, &mine, b, checked, free)
			if err != nil || checked.Outcome == compilers.Failed {
				return checked, err
			}
		}
		return checked, nil
	}
	return workspace.Remember(ctx, ts.Workspaces, a.Model, key, IsFinal, try)
}

// FreeSizes are the sizes of free dimensions with which a build is run. The second is for models
// that do not run with the first; many detectors, for example, accept no image of one pixel.
var FreeSizes = [...]int64{1, 64}

// notRun returns the result for a build that could not be run.
func notRun(why string) compilers.CheckResult {
	return compilers.CheckResult{Outcome: compilers.NotCheckable, Text: why}
}

// checkSource loads the source model with the same execution providers, and runs it on the same
// zeros. If that fails as well, zeros are no valid input for the model, and the failure is not the
// build's.
func (ts *Checker) checkSource(ctx context.Context, a *request.JudgeTarget, b *index.Build,
	failed compilers.CheckResult,
	free int64) (compilers.CheckResult, error) {
	if a.Adopting {
		return notRun("it does not run on zeros, and its source model is missing: " +
			"" + failed.Text), nil
	}
	member := failed.Member
	if len(b.Members) > 0 && a.Model.Models() == 1 {
		if b.Members[member].ModelDigest != a.Canonical.Model {
			return notRun("another model of its group does not run on zeros: " + failed.Text), nil
		}
		member = 0
	}
	j, remove, err := ts.Workspaces.CopyModels(ctx, a.Model, a.Canonical)
	defer remove()
	if err != nil {
		return failed, err
	}
	source := a.CheckJob(j.Copies[member].Path,
		request.LoadLevel(a.Canonical.GraphOptimizationLevel))
	source.Zeros = free
	ran, err := ts.loadUnreplaced(ctx, a, a.WithDimensions(source))
	if err != nil || ran.Outcome == compilers.Passed {
		return failed, err
	}
	why := "it does not run on zeros (%s), and neither does its source model (%s)"
	return notRun(fmt.Sprintf(why, failed.Text, ran.Text)), nil
}

// Result is the result of loading a build and, if that failed, of the control.
type Result struct {
	compilers.CheckResult
	Control string // why a failure is not to be believed; "" if it is
}

// loadReported loads the build in a process of its own, and retries once if it fails, because a
// worker may lack memory for a moment. A failure counts only if the control loads: the smallest
// artefact that these libraries make.
func (ts *Checker) loadReported(ctx context.Context, a *request.JudgeTarget,
	b *index.Build) (Result, error) {
	key := ts.Runtimes.Key("report", a.Content, b.ID[:])
	return ttlcache.Do(ctx, ts.Results, key, func(ctx context.Context) (Result, error) {
		answer, err := lookup.Lease(ctx, ts.Store, b, func(string) {})
		if err != nil {
			return Result{}, err
		}
		defer answer.View.Close()
		job := a.CheckJobOf(b, answer)
		var t Result
		for range 2 {
			if t.CheckResult, err = ts.loadUnreplaced(ctx, a, job); err != nil ||
				t.Outcome != compilers.Failed {
				return t, err
			}
		}
		t.Control, err = ts.Control(ctx, a)
		return t, err
	})
}

// loadUnreplaced loads a graph, and fails if the libraries were replaced in the meantime.
func (ts *Checker) loadUnreplaced(ctx context.Context, a *request.JudgeTarget,
	job compilers.CheckJob) (compilers.CheckResult, error) {
	return runtimes.RunUnreplaced(a.Content, func() (compilers.CheckResult, error) {
		return ts.Compiler.Check(ctx, job)
	})
}

// Check loads a graph. A failure counts only if the control loads, the smallest artefact that these
// libraries make; otherwise the cause is this machine and not the graph.
func (ts *Checker) Check(ctx context.Context, a *request.JudgeTarget,
	job compilers.CheckJob) (compilers.CheckResult, error) {
	checked, err := ts.loadUnreplaced(ctx, a, job)
	if err != nil || checked.Outcome != compilers.Failed {
		return checked, err
	}
	// The success of a control is remembered, because after an update many graphs may fail one
	// after the other.
	key := ts.Runtimes.Key("control", a.Content, a.Encoded())
	_, err = ttlcache.Do(ctx, ts.Results, key, func(ctx context.Context) (bool, error) {
		broken, err := ts.Control(ctx, a)
		if err == nil && broken != "" {
			err = failure.OfMachine(broken).ToError(nil, "no build loads here")
		}
		return true, err
	})
	if err != nil {
		return compilers.CheckResult{}, err
	}
	return checked, nil
}

// Control returns why an artefact that these libraries make does not load here, "" if it does or if
// none can be made.
func (ts *Checker) Control(ctx context.Context, a *request.JudgeTarget) (string, error) {
	broken, err := ts.control(ctx, a)
	return runtimes.ErrorText(broken), err
}

func (ts *Checker) control(ctx context.Context, a *request.JudgeTarget) (broken, err error) {
	var own *compilers.Job
	if a.OnOwnModel {
		if a.Model == nil {
			return nil, nil // no control can be made, so the failure counts
		}
		j, remove, err := ts.Workspaces.CopyModels(ctx, a.Model, a.Canonical)
		defer remove()
		if err != nil {
			return nil, err
		}
		own = plan.FingerprintJob(a.Canonical, j.Copies[0].Path)
	}
	dir, remove, err := ts.Store.Stage("control-")
	if err != nil {
		return nil, err
	}
	defer remove()
	result, err := runtimes.RunUnreplaced(a.Content, func() (compilers.CheckResult, error) {
		return compilers.Control(ctx, ts.Compiler, a.Content.Spec, a.EPs, dir, own)
	})
	switch {
	case errors.Is(err, runtimes.ErrFilesChanging) || errors.Is(err, runtimes.ErrReplaced):
		return nil, err
	case err == nil && result.Outcome == compilers.Failed:
		return errors.New(cmp.Or(result.Text, result.Outcome)), nil
	}
	return err, nil // without the device a failed load proves nothing
}

// TryEP compiles one node and loads the result, unless that was tried recently. It returns the
// error.
func (ts *Checker) TryEP(ctx context.Context, rt *runtimes.Runtime, facts *runtimes.Facts,
	name string) error {
	rc, err := ts.Runtimes.Content(ctx, rt, func(string) {})
	if err != nil {
		return err
	}
	eps, err := runtimes.SingleEP(rc, facts.Facts, name)
	if err != nil {
		return err
	}
	type tried struct{ broken error }
	key := ts.Runtimes.Key("doctor", rc, []byte(name))
	found, err := ttlcache.Do(ctx, ts.Results, key, func(ctx context.Context) (tried, error) {
		broken, err := ts.control(ctx, (&request.Plan{EPs: eps}).JudgeTarget("", rc))
		return tried{broken}, err
	})
	return cmp.Or(err, found.broken)
}

// Sandbox returns the safeguards that confine the execution providers' code, which are tested once.
// It returns none for a compiler that runs no such code.
func (ts *Checker) Sandbox(ctx context.Context) ([]compilers.Safeguard, error) {
	s, ok := ts.Compiler.(compilers.SandboxReporter)
	if !ok {
		return nil, nil
	}
	measures, err := s.Sandbox(ctx)
	if err != nil {
		return nil, request.WorkerError(err, "sandbox")
	}
	return measures, nil
}
