package build

import (
	"cmp"
	"context"
	"path/filepath"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// verified gives the tolerance at which what the job made computes the same as its model, where
// that is asked for; else 0. One that does not is kept as any other, for the tolerance is one
// request's: [Cache.verifyOutput] refuses it to that.
func (j *Job) verified(ctx context.Context, out string, b *index.Build) float64 {
	v, ok := j.bd.Compiler.(compilers.OutputVerifier)
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
