package compilers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/compilers/tinymodel"
)

// ErrNotTaken is returned where an EP takes none of the tiny models. It may take others.
var ErrNotTaken = errors.New("none of the tiny models is taken")

// smallestTaken compiles with the EP the first of the tiny models that it takes a node of, and
// where it takes none of them the model of own, if that is not nil, with the session's options that
// own has. The compiled model is in a folder below folder, and job.Folder is its path. The error is
// that of own's model; without own it is that of the smallest and wraps ErrNotTaken.
func smallestTaken(ctx context.Context, c Compiler, job Job, own *Job) (Job, Result, error) {
	folder, all := job.Folder, job
	var first error
	for i, m := range tinymodel.Probes() {
		job.Folder = filepath.Join(folder, fmt.Sprint(i))
		job.Model = filepath.Join(job.Folder, ProbeModel)
		err := os.Mkdir(job.Folder, 0o700)
		if err == nil {
			err = os.WriteFile(job.Model, m.Encode(), 0o600)
		}
		var done Result
		if err == nil {
			done, err = c.Compile(ctx, job, nil)
		}
		if err == nil || !mayTakeAnother(err) {
			return job, done, err
		}
		if i == 0 {
			first = err
		}
		// The second model has all the others in it. Where nothing of it is taken, no other one fares
		// better, and where it is refused in the words of the first no model at all does.
		if i == 1 && errors.As(err, new(*NoNodesError)) {
			break
		}
		if i == 1 && causeOf(err) == causeOf(first) {
			return job, Result{}, first
		}
	}
	if own == nil {
		return job, Result{}, fmt.Errorf("%w: %w", ErrNotTaken, first)
	}
	all.Model, all.ModelFile, all.Folder = own.Model, own.ModelFile, filepath.Join(folder, "own")
	all.SessionOptions, all.FreeDimensions = own.SessionOptions, own.FreeDimensions
	all.FreeDimensionsByDenotation = own.FreeDimensionsByDenotation
	all.GraphOptimizationLevel = own.GraphOptimizationLevel
	if err := os.Mkdir(all.Folder, 0o700); err != nil {
		return all, Result{}, err
	}
	done, err := c.Compile(ctx, all, nil)
	return all, done, err
}

// mayTakeAnother tells whether to try another model: the EP was asked, and refused in order.
func mayTakeAnother(err error) bool {
	var refused *RefusedError
	return errors.As(err, new(*NoNodesError)) || errors.As(err, &refused) &&
		refused.Doing == "compile" && refused.Code >= 0
}

func causeOf(err error) string {
	var refused *RefusedError
	if errors.As(err, &refused) {
		return refused.Cause()
	}
	return err.Error()
}

// Control compiles the smallest model that each EP takes, and checks whether that loads: with the same libraries, in the same kind of process.
// Where it does not, a failed Check says nothing of the graph that was checked, but something of the machine: under MemoryDenyWriteExecute OpenVINO
// refuses sound artefacts with the code of broken ones. folder is a private one that exists and is empty; own is as for Fingerprint. The first result
// that is not Passed is returned.
func Control(ctx context.Context, c Compiler, r Runtime, eps []EP, folder string, own *Job) (CheckResult, error) {
	result := CheckResult{Outcome: Passed}
	for i, ep := range eps {
		below := filepath.Join(folder, fmt.Sprint(i))
		if err := os.Mkdir(below, 0o700); err != nil {
			return CheckResult{}, err
		}
		job, done, err := smallestTaken(ctx, c, probeJob(r, ep, below), own)
		if err != nil {
			return CheckResult{}, fmt.Errorf("control of %s: %w", ep.Name, err)
		}
		result, err = c.Check(ctx, CheckJob{Runtime: job.Runtime, EPs: job.EPs, Graph: filepath.Join(job.Folder, done.Graph),
			SessionOptions: job.SessionOptions, FreeDimensions: job.FreeDimensions,
			FreeDimensionsByDenotation: job.FreeDimensionsByDenotation})
		if err != nil || result.Outcome != Passed {
			return result, err
		}
	}
	return result, nil
}
