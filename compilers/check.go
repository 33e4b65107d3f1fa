package compilers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"time"

	"github.com/epcached/epcached/compilers/workerproto"
)

const disableAll = "disable_all"

// Check implements Compiler. It retries a graph that does not load without graph optimisation,
// because graphs with nodes outside the EP often load only that way. A failure is NotCheckable if
// the EP compiles for a device that this machine does not have.
func (o *ORT) Check(ctx context.Context, job CheckJob) (CheckResult, error) {
	if why := o.unloadable(job.Runtime, job.EPs); why != "" {
		return CheckResult{Outcome: NotCheckable, Text: why}, ctx.Err()
	}
	result, err := o.check(ctx, job)
	settled := result.Outcome == Passed || job.Zeros > 0 && result.Outcome == NotCheckable
	if err != nil || settled || job.GraphOptimizationLevel == disableAll || job.Against != "" {
		return result, err
	}
	job.GraphOptimizationLevel = disableAll
	again, err := o.check(ctx, job)
	if err != nil {
		return CheckResult{}, err
	}
	again.CPUSeconds += result.CPUSeconds
	if again.Outcome == Passed {
		return again, nil
	}
	result.CPUSeconds = again.CPUSeconds
	return result, nil // report the failure at the requested level
}

func (o *ORT) check(ctx context.Context, job CheckJob) (CheckResult, error) {
	req, err := loadRequest(job)
	if err != nil {
		return CheckResult{}, err
	}
	result := CheckResult{Outcome: Passed, GraphOptimizationLevel: job.GraphOptimizationLevel}
	running := func(phase string) { result.Ran = phase == workerproto.PhaseRunning }
	done, err := o.scratchJob(ctx, req, job.Pace, running)
	result.Seconds, result.CPUSeconds, result.MaxRSS, result.ReadyRSS = done.Seconds, done.cpu,
		done.PeakMemory, done.before
	if len(done.LoadCPU) == 2 {
		result.LoadCPU, result.AgainstCPU = done.LoadCPU[0], done.LoadCPU[1]
	}
	if err == nil {
		if done.NotRun != "" {
			result.Outcome, result.Text, result.Ran = NotCheckable, done.NotRun, false
		}
		return result, nil
	}
	var refused *RefusedError
	var crash *ExitError
	var member *MemberError
	if errors.As(err, &member) {
		result.Member = member.Member
	}
	switch {
	case errors.As(err, &refused):
		result.Code, result.Text = refused.Code, refused.Text
	case errors.As(err, &crash):
		result.Code, result.Text, result.Signal = -1, crash.Error(), crash.Name
	default:
		return CheckResult{}, fmt.Errorf("check %q: %w", job.Graph, err)
	}
	result.Outcome = Failed
	_, isTool, _ := o.toolFor(job.EPs)
	// The worker itself refused, for example because there is no such device.
	absent := refused != nil && refused.Code < 0
	if isTargetAbsent(done.EPs, job.EPs) || isTool && absent {
		result.Outcome = NotCheckable
	}
	return result, nil
}

func loadRequest(job CheckJob) (workerproto.Request, error) {
	eps, err := requestEPs(job.Runtime, job.EPs)
	if err != nil {
		return workerproto.Request{}, err
	}
	if !filepath.IsAbs(job.Graph) {
		return workerproto.Request{}, fmt.Errorf("load %q: not an absolute path", job.Graph)
	}
	req := workerproto.Request{Do: workerproto.Load, ORTLibrary: job.Runtime.ORTLibrary, EPs: eps,
		Model: job.Graph, Readable: readable(job.Runtime, eps), Beside: job.Beside,
		Zeros: job.Zeros, Options: workerproto.Session(job.Session)}
	if source, found := sourceOf(job.Graph); found && IsWeightless(job.SessionOptions) {
		req.Options.SessionOptions = maps.Clone(req.Options.SessionOptions)
		req.Options.SessionOptions[sourceOption] = source
	}
	if job.Against != "" {
		if !filepath.IsAbs(job.Against) || len(job.Share) > 0 {
			return workerproto.Request{},
				fmt.Errorf("load %q against %q: not an absolute path, or a group",
					job.Graph, job.Against)
		}
		req.Against, req.Readable = job.Against, append(req.Readable, job.Against)
	}
	for _, path := range job.Share {
		if filepath.Dir(path) != filepath.Dir(job.Graph) {
			return workerproto.Request{}, fmt.Errorf("load %q: not beside %q", path, job.Graph)
		}
		req.Share = append(req.Share, workerproto.Member{Model: path})
	}
	return req, nil
}

// isTargetAbsent reports whether one of the EPs compiles for a device that this machine does not
// have. If the worker crashed before it reported devices, the selectors decide; without any it is
// unknown, and the result is true.
func isTargetAbsent(used []workerproto.EPResult, asked []EP) bool {
	for i, ep := range asked {
		if slices.ContainsFunc(ep.Devices, Device.Virtual) {
			return true
		}
		info, ok := EPByName(ep.Name)
		if !ok || info.TargetAbsent == "" {
			continue
		}
		types := map[string]bool{}
		if i < len(used) {
			for _, d := range used[i].Devices {
				types[d.Type] = true
			}
		} else {
			for _, d := range ep.Devices {
				types[d.Type] = true
			}
		}
		if len(types) == 0 || types[""] || types[info.TargetAbsent] {
			return true
		}
	}
	return false
}

type OutputVerifier interface {
	// VerifyOutput runs both once on zeros. Outputs that differ are a result, not an error.
	VerifyOutput(ctx context.Context, job VerifyJob) (VerifyResult, error)
}

var _ OutputVerifier = (*ORT)(nil)

// VerifyJob compares the outputs of a graph with those of its source model.
type VerifyJob struct {
	// CheckJob loads the compiled graph. Free dimensions apply to the source model only.
	CheckJob
	// Source is the absolute path of the source model, which ONNX Runtime runs on the CPU with its
	// own kernels.
	Source   string
	Most     float64 // tolerance of a value, absolute or relative to the source model's
	Compiled float64 // seconds that the compile took, which bound those of the comparison
}

// VerifyResult is what a comparison found.
type VerifyResult struct {
	// Outcome is Passed, Failed, or NotCheckable: the device is missing, the source model does not
	// run on zeros, or a limit was reached.
	Outcome    string
	Text       string  // the first value that differs, or why nothing could be compared
	Sizes      bool    // outputs differ in size or type, so that no tolerance accepts them
	Outputs    int     // number of compared outputs
	CPUSeconds float64 // of all processors, of the worker
}

// VerifyOutput implements OutputVerifier, in one worker for both.
func (o *ORT) VerifyOutput(ctx context.Context, job VerifyJob) (VerifyResult, error) {
	if !(job.Most > 0) || math.IsInf(job.Most, 0) {
		return VerifyResult{}, fmt.Errorf("compare %q: tolerance %g: must be 0 or "+
			"more", job.Graph, job.Most)
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
	req.Do, req.Most = workerproto.Compare, job.Most
	req.Share = []workerproto.Member{{Model: job.Source}}
	limit := o.opts.Limits.verify(job.Compiled)
	ctx, cancel := context.WithTimeoutCause(ctx, limit,
		fmt.Errorf("%w: %v of a comparison of outputs", ErrTimeout, limit))
	defer cancel()
	done, err := o.scratchJob(ctx, req, job.Pace, nil)
	if err != nil {
		return o.notCompared(job, done, err)
	}
	result := VerifyResult{Outcome: Passed, CPUSeconds: done.cpu}
	switch c := done.Compared; {
	case c == nil:
		return VerifyResult{}, fmt.Errorf("compare %q: %w: no comparison", job.Graph,
			workerproto.ErrMalformed)
	case c.Without != "":
		result.Outcome, result.Text = NotCheckable, c.Without
	case c.Difference != "":
		result.Outcome, result.Text, result.Outputs = Failed, c.Difference, c.Outputs
		result.Sizes = c.Sizes
	default:
		result.Outputs = c.Outputs
	}
	return result, nil
}

// verify returns the time limit of a comparison. Usually it takes less time than the compile,
// because both models run only once, but a model may also loop without end.
func (l Limits) verify(compiled float64) time.Duration {
	// in seconds; bounded because applications state any compile time
	const least, compiles, most = 30, 10, 1e6
	limit := time.Duration(min(least+compiles*compiled, most) * float64(time.Second))
	if l.Verify > 0 {
		limit = min(limit, l.Verify)
	}
	return limit
}

func (o *ORT) notCompared(job VerifyJob, done answer, err error) (VerifyResult, error) {
	var member MemberError
	if of := (*MemberError)(nil); errors.As(err, &of) {
		member, err = *of, of.Err // the source model is the second one
	}
	result := VerifyResult{Outcome: Failed, Text: "it does not run: " + err.Error(),
		CPUSeconds: done.cpu}
	var refused *RefusedError
	var crash *ExitError
	switch {
	case errors.Is(err, ErrTimeout), errors.Is(err, ErrCPU), errors.Is(err, ErrMemory):
		result.Outcome, result.Text = NotCheckable, "it reached a limit of [limits]: "+err.Error()
		return result, nil
	case !errors.As(err, &refused) && !errors.As(err, &crash):
		return VerifyResult{}, fmt.Errorf("compare %q: %w", job.Graph, err)
	}
	if member.Member == 1 {
		result.Outcome, result.Text = NotCheckable, "the source model does not run: "+err.Error()
	}
	if isTargetAbsent(done.EPs, job.EPs) || refused != nil && refused.Code < 0 {
		result.Outcome = NotCheckable
	}
	return result, nil
}
