package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cache/request"
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

// ExposeOuter replaces the copies by those of [epmodel.ExposeOuter], until RestoreCopies.
func (w *Workspace) ExposeOuter(ctx context.Context) error {
	for i := range w.Copies {
		if err := w.exposeOuter(ctx, i); err != nil {
			return request.StoreError(err, w.request.ModelFiles(i).Name)
		}
	}
	return nil
}

func (w *Workspace) exposeOuter(ctx context.Context, i int) error {
	opened, to := OpenFiles{}, &w.Copies[i]
	defer opened.Close()
	graph, err := opened.Source(to.Path)
	if err != nil {
		return err
	}
	m, err := epmodel.Read(ctx, filepath.Base(to.Path), graph)
	if err != nil {
		return err
	}
	plan, exposed, err := epmodel.ExposeOuter(ctx, m, graph)
	if err != nil || plan == nil {
		return err
	}
	if err := CheckSpace(w.Dir, opened.Open); err != nil {
		return err
	}
	if err := os.Rename(to.Path, w.unexposed(i)); err != nil {
		return err
	}
	to.Exposed = exposed
	return Write(ctx, to.Path, plan)
}

// unexposed is where a copy is while another one has its path, because EPs write that into their
// output.
func (w *Workspace) unexposed(i int) string { return filepath.Join(w.Dir, w.memberName(i)) }

// RestoreCopies ends ExposeOuter when the models are compiled.
func (w *Workspace) RestoreCopies() error {
	for i, c := range w.Copies {
		if c.Exposed == nil {
			continue
		}
		if err := os.Rename(w.unexposed(i), c.Path); err != nil {
			return request.StoreError(err, w.request.ModelFiles(i).Name)
		}
	}
	return nil
}
