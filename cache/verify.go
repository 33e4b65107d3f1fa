package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// verifyOutput compares what the answer's build computes with what the request's model does, where the request asks for it. It
// is no part of the identity: a build is compared once for each tolerance, when somebody first asks, and stays what it is for others. An error
// leaves the answer to its caller.
func (c *Cache) verifyOutput(ctx context.Context, at *request.Attempt, a *request.Answer) error {
	switch {
	case at.VerifyOutput == 0 || a.Build != nil && (a.View == nil || a.Build.VerifiedOutput > 0 && a.Build.VerifiedOutput <= at.VerifyOutput):
		return nil
	case a.Outcome == request.PassThrough || a.Build != nil && request.IsAdopted(a.Build):
		without := "the model is compiled already, and there is none to compare with"
		a.Warnings = append(a.Warnings, notVerified(compilers.VerifyResult{Text: without}))
		return nil
	case a.Build == nil:
		return nil
	}
	at, err := c.planner.Planned(ctx, at)
	if err != nil {
		return err
	}
	at.Phase("comparing")
	result, err := c.compareOnce(ctx, at, a)
	switch {
	case ctx.Err() != nil:
		return request.ContextError(ctx, at.Name)
	case err != nil:
		return request.WorkerError(err, "model %q: output not verified", at.Name)
	case result.Outcome == compilers.Failed:
		return outputDiffers(at, result)
	case result.Outcome != compilers.Passed:
		a.Warnings = append(a.Warnings, notVerified(result))
	}
	return nil
}

// withoutVerifying says that an answer was not compared: with libraries that only applications load.
func withoutVerifying(a *request.Answer, at *request.Attempt) *request.Answer {
	if a != nil && a.View != nil && at.VerifyOutput > 0 {
		a.Warnings = append(a.Warnings, notVerified(compilers.VerifyResult{Text: "the daemon does not load these libraries"}))
	}
	return a
}

func outputDiffers(at *request.Attempt, result compilers.VerifyResult) error {
	return apierr.New(apierr.CompileFailed, nil, "model %q: what is compiled computes something else: %s", at.Name, result.Text).WithFact("reason", "output differs").
		WithFact("outputs", strconv.Itoa(result.Outputs)). // 0: it did not run on what the comparison made up
		WithHint("allow more with a larger tolerance, or load the model without epcached; execution providers may compute in smaller types unless told otherwise")
}

func notVerified(result compilers.VerifyResult) string {
	return "output not verified, " + compilers.NotCheckable + ": " + result.Text
}

// compareOnce compares, or gives what an earlier comparison of the same build and tolerance with these libraries found.
func (c *Cache) compareOnce(ctx context.Context, at *request.Attempt, a *request.Answer) (compilers.VerifyResult, error) {
	v, ok := c.compiler.(compilers.OutputVerifier)
	switch {
	case !ok:
		return compilers.VerifyResult{Outcome: compilers.NotCheckable, Text: "this compiler cannot compare"}, nil
	case len(a.Build.Members) > 0:
		return compilers.VerifyResult{Outcome: compilers.NotCheckable, Text: "groups are not compared"}, nil
	}
	what := fmt.Appendf(nil, "%x %s %x", a.Build.ID, a.Graph, math.Float64bits(at.VerifyOutput))
	if !a.Build.ID.IsZero() {
		what = fmt.Appendf(nil, "%x %x", a.Build.ID, math.Float64bits(at.VerifyOutput)) // whichever view it is
	}
	graph := filepath.Join(a.Path, filepath.FromSlash(a.Graph))
	find := func(ctx context.Context, own *request.Request) (compilers.VerifyResult, error) {
		return c.compare(ctx, v, at.WithRequest(own), a.Build, graph)
	}
	return workspace.Remember(ctx, c.workspaces, at.Request, c.runtimes.Key("output", at.Content, what), compared, find)
}

// compared: what could not be compared may be another time.
func compared(r compilers.VerifyResult) bool { return r.Outcome != compilers.NotCheckable }

// compare runs private copies of both. The build's is copied too: workers of another user reach no views.
func (c *Cache) compare(ctx context.Context, v compilers.OutputVerifier, at *request.Attempt, b *index.Build, graph string) (compilers.VerifyResult, error) {
	var none compilers.VerifyResult
	j, remove, err := c.workspaces.Copy(ctx, at.Request, at.Plan.Canonical)
	defer remove()
	if err != nil {
		return none, err
	}
	for _, f := range b.Files {
		if err := copyPath(filepath.Join(filepath.Dir(graph), filepath.FromSlash(f.Name)), filepath.Join(j.Folder, "built", filepath.FromSlash(f.Name))); err != nil {
			return none, err
		}
	}
	check := at.Plan.Against("", at.Content).CheckJob(filepath.Join(j.Folder, "built", b.Graph), cmp.Or(b.GraphOptimizationLevel, request.LoadLevel(at.Plan.Canonical.GraphOptimizationLevel)))
	return runtimes.Still(at.Content, func() (compilers.VerifyResult, error) {
		return v.VerifyOutput(ctx, compilers.VerifyJob{CheckJob: at.Plan.WithDimensions(check), Source: j.Copies[0].Path, Most: at.VerifyOutput})
	})
}

func copyPath(from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	return errors.Join(workspace.CopyPrivate(f, to), f.Close())
}

// verified gives the tolerance at which what the job made computes the same as its model, where that is asked for; else 0. One that
// does not is kept as any other, for the tolerance is one request's: [Cache.verifyOutput] refuses it to that.
func (j *job) verified(ctx context.Context, out string, b *index.Build) float64 {
	v, ok := j.c.compiler.(compilers.OutputVerifier)
	if !ok || j.VerifyOutput == 0 || j.Request.Models() > 1 {
		return 0
	}
	check := j.Plan.Against("", j.Content).CheckJob(filepath.Join(out, b.Graph), cmp.Or(b.GraphOptimizationLevel, request.LoadLevel(j.Plan.Canonical.GraphOptimizationLevel)))
	result, err := v.VerifyOutput(ctx, compilers.VerifyJob{CheckJob: j.Plan.WithDimensions(check), Source: j.Copies[0].Path, Most: j.VerifyOutput})
	j.spent(result.CPUSeconds)
	if err != nil || result.Outcome != compilers.Passed {
		return 0 // whoever asked for it is told why
	}
	return j.VerifyOutput
}
