package build

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/epcached/epcached/cache/failure"
	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
)

// restoreInterface writes into the compiled graphs what compiling loses of their models' interface,
// so that a program sees the same model with and without epcached. It fails if a session of a
// compiled graph would differ all the same.
func (j *Job) restoreInterface(ctx context.Context, out string, result *compilers.Result) error {
	for i, model := range j.Copies {
		name := j.Request.ModelFiles(i).Name
		graph, err := model.OpenGraph()
		if err != nil {
			return request.StoreError(err, name)
		}
		source, err := identity.Files{Name: name, Graph: graph}.Interface(ctx)
		graph.Close() // opened for reading
		if err != nil {
			return err
		}
		source.Exposed = model.Exposed
		loads, err := RestoreInterface(ctx, source, filepath.Join(out, j.MemberOutput(i)))
		switch {
		case errors.Is(err, epmodel.ErrDiffers):
			return failure.OfInterface(err).ToError(err, "model %q compiles", name)
		case err != nil:
			return failure.OfOutput(err).ToError(err, "model %q does not compile", name)
		case loads:
			result.Settled = false // what was loaded early was another graph
		}
	}
	return nil
}

// outerMayBeLost reports whether ONNX Runtime may have refused to compile because it loses values
// that bodies of nodes read, so that the compile is retried with copies that have them as outputs.
func (j *Job) outerMayBeLost(ctx context.Context, err error) bool {
	if j.outerExposed || !errors.As(err, new(*compilers.RefusedError)) ||
		compilers.IsWeightless(j.SessionOptions) {
		return false
	}
	for i := range j.Request.Models() {
		f := j.Request.ModelFiles(i)
		m, err := f.Read(ctx)
		if err != nil {
			continue
		}
		src, err := epmodel.FileSource(f.Graph)
		if err != nil {
			continue
		}
		if plan, _, err := epmodel.ExposeOuter(ctx, m, src); err == nil && plan != nil {
			return true
		}
	}
	return false
}

// RestoreInterface replaces the graph at the path by one with the interface of its source model, if
// it lacks something. loads reports whether the change may affect how the graph loads.
func RestoreInterface(ctx context.Context, source *epmodel.Interface, path string) (
	loads bool, err error) {
	opened := workspace.OpenFiles{}
	defer opened.Close()
	graph, err := opened.Source(path)
	if err != nil {
		return false, err
	}
	m, err := epmodel.Read(ctx, filepath.Base(path), graph)
	if err != nil {
		return false, err
	}
	plan, loads, err := source.Restore(ctx, m, graph)
	if err == nil && plan != nil {
		if err = workspace.CheckSpace(filepath.Dir(path), opened.Open); err == nil {
			err = workspace.Write(ctx, path, plan)
		}
	}
	return loads, err
}
