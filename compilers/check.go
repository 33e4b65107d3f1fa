package compilers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/epcached/epcached/compilers/dialogue"
)

const disableAll = "disable_all"

// Check implements Compiler. A graph that does not load is tried once more without graph optimisation, for graphs with nodes outside the EP often
// load only so. Where the EP compiles for a device that is not here, a failure is NotCheckable.
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
	return result, nil // the first failure is about the graph as it was asked for
}

func (o *ORT) check(ctx context.Context, job CheckJob) (CheckResult, error) {
	req, err := loadRequest(job)
	if err != nil {
		return CheckResult{}, err
	}
	result := CheckResult{Outcome: Passed, GraphOptimizationLevel: job.GraphOptimizationLevel}
	running := func(phase string) { result.Ran = phase == dialogue.PhaseRunning }
	done, err := o.scratchJob(ctx, req, job.Pace, running)
	result.Seconds, result.CPUSeconds, result.MaxRSS, result.ReadyRSS = done.Seconds, done.cpu, done.PeakMemory, done.before
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
	absent := refused != nil && refused.Code < 0 // it never came to ONNX Runtime: there is no such device, for one
	if targetAbsent(done.EPs, job.EPs) || isTool && absent {
		result.Outcome = NotCheckable
	}
	return result, nil
}

func loadRequest(job CheckJob) (dialogue.Request, error) {
	eps, err := requestEPs(job.Runtime, job.EPs)
	if err != nil {
		return dialogue.Request{}, err
	}
	if !filepath.IsAbs(job.Graph) {
		return dialogue.Request{}, fmt.Errorf("load %q: not an absolute path", job.Graph)
	}
	req := dialogue.Request{Do: dialogue.Load, ORTLibrary: job.Runtime.ORTLibrary, EPs: eps, Model: job.Graph,
		Readable: readable(job.Runtime, eps), Beside: job.Beside, Zeros: job.Zeros,
		Options: session(job.SessionOptions, job.FreeDimensions, job.FreeDimensionsByDenotation, job.GraphOptimizationLevel)}
	if source, found := sourceOf(job.Graph); found && Weightless(job.SessionOptions) {
		req.Options.Entries = maps.Clone(req.Options.Entries)
		req.Options.Entries[sourceOption] = source
	}
	if job.Against != "" {
		if !filepath.IsAbs(job.Against) || len(job.Share) > 0 {
			return dialogue.Request{}, fmt.Errorf("load %q against %q: not an absolute path, or a group",
				job.Graph, job.Against)
		}
		req.Against, req.Readable = job.Against, append(req.Readable, job.Against)
	}
	for _, path := range job.Share {
		if filepath.Dir(path) != filepath.Dir(job.Graph) {
			return dialogue.Request{}, fmt.Errorf("load %q: not beside %q", path, job.Graph)
		}
		req.Share = append(req.Share, dialogue.Member{Model: path})
	}
	return req, nil
}

// targetAbsent tells whether one of the EPs compiles for a device that is elsewhere. A worker that crashed early told no devices: then
// the selectors count, and without any it is not known, which proves nothing either.
func targetAbsent(used []dialogue.EPResult, asked []EP) bool {
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
