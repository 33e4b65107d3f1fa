package build

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
)

// compareOutputs returns the tolerance within which the build's outputs equal those of its model, 0
// if they differ or if the request sets no tolerance. A build that differs is stored all the same,
// because other requests may set none; [loadcheck.Checker.VerifyOutput] refuses it to this one.
func (j *Job) compareOutputs(ctx context.Context, out string, b *index.Build) float64 {
	v, ok := j.bd.Compiler.(compilers.OutputVerifier)
	if !ok || j.VerifyOutput == 0 || j.Request.Models() > 1 {
		return 0
	}
	j.leaveSlot()
	leave, err := j.bd.Workspaces.AcquireSlot(ctx, j.Request)
	if err != nil {
		return 0 // the job ends
	}
	defer leave()
	check := j.Plan.JudgeTarget("", j.Content).
		CheckJob(filepath.Join(out, b.Graph), cmp.Or(b.GraphOptimizationLevel, j.loadLevel()))
	result, err := v.VerifyOutput(ctx, compilers.VerifyJob{CheckJob: j.Plan.WithDimensions(check),
		Source: j.Copies[0].Path, Most: j.VerifyOutput, Compiled: b.CompileSeconds})
	j.addCPU(result.CPUSeconds)
	if err == nil {
		j.compared = &result
	}
	if err != nil || result.Outcome != compilers.Passed {
		return 0 // the request fails, with the reason
	}
	return j.VerifyOutput
}

// loadGraphs loads the graphs as applications will: a group in order in one process, with the
// options that make its members share.
func (j *Job) loadGraphs(ctx context.Context, out string, result compilers.Result,
	options map[string]string, ready <-chan struct{}) (compilers.CheckResult, error) {
	check := compilers.CheckJob{
		Runtime: j.Content.Spec, EPs: j.Plan.EPs, Graph: filepath.Join(out, result.Graph),
		Session: compilers.Session{SessionOptions: options, GraphOptimizationLevel: j.loadLevel()},
		Pace:    compilers.Pace{Ready: ready, Idle: j.urgent}, Beside: j.Plan.OnlyProcessors,
	}
	for i := 1; i < j.Request.Models(); i++ {
		check.Share = append(check.Share, filepath.Join(out, result.Graphs[i]))
	}
	checked, err := j.checkTwice(ctx, check)
	if err != nil {
		err = request.WorkerError(err, "model %q: load check", j.replaceName(err))
	}
	return checked, err
}

// checkAlone checks whether each member of a group also loads without the others, as a request for
// a single member does. If one does not, no member is served alone.
func (j *Job) checkAlone(ctx context.Context, out string, result compilers.Result,
	b *index.Build) error {
	if len(b.Members) == 0 || b.LoadCheck != compilers.Passed {
		return nil
	}
	checked, err := j.loadGraphs(ctx, out, result, j.SessionOptions, nil)
	if err != nil {
		return err
	}
	switch {
	case checked.Outcome != compilers.Passed:
	case checked.GraphOptimizationLevel == "disable_all" && b.GraphOptimizationLevel == "":
		checked.Text = "loads only without graph optimization"
	default:
		return nil
	}
	b.Warnings = append(b.Warnings, fmt.Sprintf("the models load as a group only, not one by "+
		"one: %q: %s",
		b.Members[checked.Member].ModelName, compilers.LastWords(checked.Text)))
	for i := range b.Members {
		b.Members[i].AloneKey = index.RequestKey{}
	}
	return nil
}

// check validates the output and loads it in a process of its own, and writes the build's record.
func (j *Job) check(ctx context.Context, out string, result compilers.Result,
	workers *earlyWorkers) (
	*index.Build, error) {
	models, _, err := ReadOutput(ctx, out, result)
	if err != nil {
		return nil, failure.OfOutput(err).ToError(err, "model %q does not compile", j.Request.Name)
	}
	b := NewBuild(j.Attempt, j.scope, models, result, j.Open, j.bd.Now())
	options := j.SessionOptions
	if len(b.Members) > 0 {
		options = request.SharingOptions(options)
	}
	checked, err := workers.load(ctx, out, result, options)
	if err != nil {
		return nil, err
	}
	b.LoadCheck = checked.Recorded()
	j.memory = workers.peakMemory(j.memory, checked)
	switch {
	case checked.Outcome == compilers.Failed:
		return nil, failure.OfLoad(checked).
			ToError(nil, "model %q compiles", j.Request.ModelFiles(checked.Member).Name)
	case checked.GraphOptimizationLevel == "disable_all":
		b.GraphOptimizationLevel = "disable_all"
	}
	if checked.Outcome == compilers.Passed {
		b.VerifiedOutput = j.compareOutputs(ctx, out, b)
	}
	return b, j.checkAlone(ctx, out, result, b)
}

// checkTwice loads the compiled model, and retries once if the process died, because the cause may
// be the machine.
func (j *Job) checkTwice(ctx context.Context, spec compilers.CheckJob) (
	compilers.CheckResult, error) {
	checked, err := j.bd.Compiler.Check(ctx, spec)
	j.addCPU(checked.CPUSeconds)
	if err != nil || !checked.Crashed() || !j.mayRetry(ctx) {
		return checked, err
	}
	checked, err = j.bd.Compiler.Check(ctx, spec)
	j.addCPU(checked.CPUSeconds)
	return checked, err
}

// loadsClean reports whether a load check passed without any reservation.
func (j *Job) loadsClean(checked compilers.CheckResult) bool {
	return checked.Outcome == compilers.Passed && checked.GraphOptimizationLevel == j.loadLevel()
}

// loadLevel is the level of graph optimisation to load with.
func (j *Job) loadLevel() string {
	return request.LoadLevel(j.Plan.Canonical.GraphOptimizationLevel)
}
