package compilers

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/compilers/tinymodel"
)

// ControlModel is the base name of the model that Control compiles.
const ControlModel = "control.onnx"

// Control compiles the smallest model there is with each EP, and checks whether that loads: with the same libraries, in the same kind of process.
// Where it does not, a failed Check says nothing of the graph that was checked, but something of the machine: under MemoryDenyWriteExecute OpenVINO
// refuses sound artefacts with the code of broken ones. folder is a private one that exists and is empty. The first result that is not Passed is
// returned.
func Control(ctx context.Context, c Compiler, r Runtime, eps []EP, folder string) (CheckResult, error) {
	result := CheckResult{Outcome: Passed}
	for i, ep := range eps {
		var err error
		if result, err = control(ctx, c, r, ep, filepath.Join(folder, fmt.Sprint(i))); err != nil || result.Outcome != Passed {
			return result, err
		}
	}
	return result, nil
}

func control(ctx context.Context, c Compiler, r Runtime, ep EP, folder string) (CheckResult, error) {
	if info, known := EPByName(ep.Name); known {
		ep.Options = info.ForFingerprint(ep.Options)
	}
	if err := os.Mkdir(folder, 0o700); err != nil {
		return CheckResult{}, err
	}
	model := filepath.Join(folder, ControlModel)
	if err := os.WriteFile(model, tinymodel.Relu(), 0o600); err != nil {
		return CheckResult{}, err
	}
	done, err := c.Compile(ctx, Job{Runtime: r, EPs: []EP{ep}, Model: model, Folder: folder, Output: "control_ctx.onnx"}, nil)
	if err != nil {
		return CheckResult{}, fmt.Errorf("control of %s: %w", ep.Name, err)
	}
	return c.Check(ctx, CheckJob{Runtime: r, EPs: []EP{ep}, Graph: filepath.Join(folder, done.Graph)})
}
