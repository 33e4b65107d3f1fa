package standin

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/compilers"
)

var _ compilers.OutputVerifier = (*Compiler)(nil)

// VerifyOutput implements compilers.OutputVerifier. A build computes the same as its model if its
// context has the model's bytes, because compiling puts them there.
func (c *Compiler) VerifyOutput(ctx context.Context,
	job compilers.VerifyJob) (compilers.VerifyResult, error) {
	c.Comparisons.Add(1)
	if err := ctx.Err(); err != nil {
		return compilers.VerifyResult{}, err
	}
	if c.Comparison != nil {
		return c.Comparison(job), nil
	}
	source, err := os.ReadFile(job.Source)
	if err != nil {
		return compilers.VerifyResult{}, err
	}
	found := false
	err = filepath.WalkDir(filepath.Dir(job.Graph),
		func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			content, err := os.ReadFile(path)
			found = found || bytes.Contains(content, source)
			return err
		})
	if err != nil {
		return compilers.VerifyResult{}, err
	}
	if !found {
		return compilers.VerifyResult{Outcome: compilers.Failed,
			Text: fmt.Sprintf("output %q: value 0 is 1, and 0 in the source model", "y")}, nil
	}
	return compilers.VerifyResult{Outcome: compilers.Passed, Outputs: 1}, nil
}
