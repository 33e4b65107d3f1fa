package compilers

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"

	"github.com/epcached/epcached/compilers/dialogue"
)

// OutputVerifier is a Compiler that can compare what a build computes with what its source model does.
type OutputVerifier interface {
	// VerifyOutput runs both once on zeros. Outputs that differ are a result, not an error.
	VerifyOutput(ctx context.Context, job VerifyJob) (VerifyResult, error)
}

var _ OutputVerifier = (*ORT)(nil)

// VerifyJob asks whether a graph computes what another model does.
type VerifyJob struct {
	CheckJob         // the compiled graph, and how it is loaded; free dimensions are the source model's alone
	Source   string  // absolute path of the source model, which ONNX Runtime runs on the CPU with kernels of its own
	Most     float64 // by which a value may differ, as it is or as a part of the source model's
}

// VerifyResult is what a comparison found.
type VerifyResult struct {
	Outcome    string  // Passed, Failed, or NotCheckable: the device is not here, or the source model does not run on zeros
	Text       string  // the first value that differs, or why nothing could be compared
	Outputs    int     // that were compared
	CPUSeconds float64 // of all processors, of the worker
}

// VerifyOutput implements OutputVerifier, in one worker for both.
func (o *ORT) VerifyOutput(ctx context.Context, job VerifyJob) (VerifyResult, error) {
	if !(job.Most > 0) || math.IsInf(job.Most, 0) {
		return VerifyResult{}, fmt.Errorf("compare %q: %g is not a tolerance", job.Graph, job.Most)
	}
	if why := o.unloadable(job.Runtime, job.EPs); why != "" {
		return VerifyResult{Outcome: NotCheckable, Text: why}, ctx.Err()
	}
	if !filepath.IsAbs(job.Source) {
		return VerifyResult{}, fmt.Errorf("compare with %q: not an absolute path", job.Source)
	}
	req, err := loadRequest(job.CheckJob)
	if err != nil {
		return VerifyResult{}, err
	}
	req.Do, req.Most = dialogue.Compare, job.Most
	req.Share = []dialogue.Member{{Model: job.Source}}
	done, err := o.scratchJob(ctx, req, job.Pace, nil)
	if err != nil {
		return o.notCompared(job, done, err)
	}
	result := VerifyResult{Outcome: Passed, CPUSeconds: done.cpu}
	switch c := done.Compared; {
	case c == nil:
		return VerifyResult{}, fmt.Errorf("compare %q: %w: no comparison", job.Graph, dialogue.ErrMalformed)
	case c.Without != "":
		result.Outcome, result.Text = NotCheckable, c.Without
	case c.Difference != "":
		result.Outcome, result.Text, result.Outputs = Failed, c.Difference, c.Outputs
	default:
		result.Outputs = c.Outputs
	}
	return result, nil
}

// notCompared tells a worker's failure over the graph from one over the source model, and both from those of the worker.
func (o *ORT) notCompared(job VerifyJob, done answer, err error) (VerifyResult, error) {
	result := VerifyResult{Outcome: Failed, Text: "it does not run: " + err.Error(), CPUSeconds: done.cpu}
	var refused *RefusedError
	var crash *ExitError
	if !errors.As(err, &refused) && !errors.As(err, &crash) {
		return VerifyResult{}, fmt.Errorf("compare %q: %w", job.Graph, err)
	}
	var member *MemberError
	if errors.As(err, &member) && member.Member == 1 {
		result.Outcome, result.Text = NotCheckable, "the source model does not run: "+err.Error()
	}
	if targetAbsent(done.EPs, job.EPs) || refused != nil && refused.Code < 0 {
		result.Outcome = NotCheckable
	}
	return result, nil
}
