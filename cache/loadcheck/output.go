package loadcheck

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"strconv"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// VerifyOutput compares the outputs of the answer's build with those of the request's model, if the
// request sets a tolerance. The tolerance is not part of the identity: a build is compared once for
// each tolerance, and a difference does not concern other requests. On an error the caller still
// owns the answer.
func (ts *Checker) VerifyOutput(ctx context.Context, at *request.Attempt, a *request.Answer) error {
	b := a.Build
	switch {
	case at.VerifyOutput == 0,
		b != nil && (a.View == nil || b.VerifiedOutput > 0 && b.VerifiedOutput <= at.VerifyOutput):
		return nil
	case a.Outcome == request.PassThrough || b != nil && request.IsAdopted(b):
		notVerified(a, "the model is compiled already, so there is no source to compare with")
		return nil
	case b == nil:
		return nil
	}
	at, err := ts.Planner.WithPlan(ctx, at)
	if err != nil {
		return err
	}
	at.Phase("comparing")
	result, err := ts.compareOnce(ctx, at, a)
	switch {
	case ctx.Err() != nil:
		return request.ContextError(ctx, at.Name)
	case err != nil:
		return request.WorkerError(err, "model %q: output not verified", at.Name)
	case result.Outcome == compilers.Failed:
		return outputDiffers(at, result)
	case result.Outcome != compilers.Passed:
		notVerified(a, result.Text)
	}
	return nil
}

// NotLoaded records that an answer was not compared, because only the application can load the
// libraries.
func NotLoaded(a *request.Answer, at *request.Attempt) {
	if a != nil && a.View != nil && at.VerifyOutput > 0 {
		notVerified(a, "the daemon does not load these libraries")
	}
}

func notVerified(a *request.Answer, why string) {
	a.Warnings = append(a.Warnings, "output not verified, "+compilers.NotCheckable+": "+why)
}

func outputDiffers(at *request.Attempt, result compilers.VerifyResult) error {
	hint := "use a larger tolerance, or load the model without epcached; execution providers may " +
		"compute with lower precision by default"
	if result.Sizes {
		hint = "no tolerance accepts other sizes: fix the free dimensions, or do not verify"
	}
	return apierr.New(apierr.CompileFailed, nil, "model %q: the compiled model's output differs "+
		"from the source's: %s", at.Name, result.Text).
		WithFact("reason", "output differs").
		// 0 if it did not run on the generated inputs
		WithFact("outputs", strconv.Itoa(result.Outputs)).
		WithHint("%s", hint)
}

// compareOnce compares, or returns an earlier result for the build, tolerance and libraries.
func (ts *Checker) compareOnce(ctx context.Context, at *request.Attempt,
	a *request.Answer) (compilers.VerifyResult, error) {
	v, ok := ts.Compiler.(compilers.OutputVerifier)
	switch {
	case !ok:
		return compilers.VerifyResult{Outcome: compilers.NotCheckable,
			Text: "this compiler cannot compare"}, nil
	case len(a.Build.Members) > 0:
		return compilers.VerifyResult{Outcome: compilers.NotCheckable,
			Text: "groups are not compared"}, nil
	}
	what := fmt.Appendf(nil, "%x %s %x", a.Build.ID, a.Graph, math.Float64bits(at.VerifyOutput))
	if !a.Build.ID.IsZero() {
		// independent of the view
		what = fmt.Appendf(nil, "%x %x", a.Build.ID, math.Float64bits(at.VerifyOutput))
	}
	graph := filepath.Join(a.Path, filepath.FromSlash(a.Graph))
	compare := func(ctx context.Context, own *request.Request) (compilers.VerifyResult, error) {
		if a.Compared != nil {
			return *a.Compared, nil
		}
		return ts.compare(ctx, v, at.WithRequest(own), a.Build, graph)
	}
	// Not remembered if the outputs could not be compared, because they may be comparable later.
	lasts := func(r compilers.VerifyResult) bool { return r.Outcome != compilers.NotCheckable }
	return workspace.Remember(ctx, ts.Workspaces, at.Request,
		ts.Runtimes.Key("output", at.Content, what), lasts, compare)
}

// compare runs private copies of both models, because workers with another uid cannot open views.
func (ts *Checker) compare(ctx context.Context, v compilers.OutputVerifier, at *request.Attempt,
	b *index.Build,
	graph string) (compilers.VerifyResult, error) {
	source, remove, err := ts.Workspaces.CopyModels(ctx, at.Request, at.Plan.Canonical)
	defer remove()
	if err != nil {
		return compilers.VerifyResult{}, err
	}
	built := filepath.Join(source.Dir, "built")
	for _, f := range b.Files {
		name := filepath.FromSlash(f.Name)
		if err := workspace.CopyPath(filepath.Join(filepath.Dir(graph), name),
			filepath.Join(built, name)); err != nil {
			return compilers.VerifyResult{}, err
		}
	}
	check := at.Plan.JudgeTarget("", at.Content).CheckGraph(b, filepath.Join(built, b.Graph))
	job := compilers.VerifyJob{CheckJob: at.Plan.WithDimensions(check),
		Source: source.Copies[0].Path, Most: at.VerifyOutput, Compiled: b.CompileSeconds}
	return runtimes.RunUnreplaced(at.Content, func() (compilers.VerifyResult, error) {
		return v.VerifyOutput(ctx, job)
	})
}
