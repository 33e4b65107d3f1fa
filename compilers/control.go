package compilers

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
)

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
