package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/epmodel"
)

// Write writes a planned file to the path, in one step if there is a file already, because a worker
// may be loading that.
func Write(ctx context.Context, path string, plan *epmodel.Splice) error {
	f, err := os.CreateTemp(filepath.Dir(path), "written-") // removed with its directory
	if err != nil {
		return err
	}
	if err := errors.Join(plan.WriteTo(ctx, f), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	return os.Rename(f.Name(), path)
}
