package compilers

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/bytesize"
)

// Collect lists what a compiler left in folder, besides the names in inputs, and reads the graphs. It
// trusts nothing: links, devices and files beyond the limits are ErrOutput; a graph without EPContext
// nodes is a *NoNodesError with EPs still empty. Files have the graphs first, in order; names in
// sub-folders use slashes. What is wrong with one of several graphs is a *MemberError. Beside a
// *NoNodesError the models end with the one that it is about.
func Collect(ctx context.Context, folder string, graphs, inputs []string, limits Limits) (files []string, models []*epmodel.Model, err error) {
	others, found, err := listOutput(folder, graphs, inputs, limits.orDefault())
	if err != nil {
		return nil, nil, err
	}
	for i, graph := range graphs {
		if !found[graph] {
			return nil, nil, ofMember(i, len(graphs), &missingGraphError{graph})
		}
		model, err := readGraph(ctx, filepath.Join(folder, graph))
		if err != nil {
			return nil, nil, ofMember(i, len(graphs), err)
		}
		models = append(models, model)
		if len(model.Contexts) == 0 {
			return nil, models, ofMember(i, len(graphs), &NoNodesError{OpTypes: model.OpTypes})
		}
	}
	return append(slices.Clone(graphs), others...), models, nil
}

type missingGraphError struct{ graph string }

func (e *missingGraphError) Error() string {
	return fmt.Sprintf("output folder: %v: the graph %q is missing", ErrOutput, e.graph)
}

func (e *missingGraphError) Unwrap() error { return ErrOutput }

func listOutput(folder string, graphs, inputs []string, limits Limits) (others []string, found map[string]bool, err error) {
	var total int64
	found = map[string]bool{}
	err = walkOutput(folder, inputs, func(name string, info fs.FileInfo) error {
		// Anything but a regular file with one name could be a way to the daemon's own files.
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%w: %q is not a regular file", ErrOutput, info.Name())
		}
		if statOf(info).Nlink > 1 {
			return fmt.Errorf("%w: %q has a second name elsewhere", ErrOutput, info.Name())
		}
		if total += info.Size(); limits.Output >= 0 && total > limits.Output {
			return fmt.Errorf("%w: more than %s", ErrOutputLimit, bytesize.Text(limits.Output))
		}
		if limits.Files >= 0 && len(others) >= limits.Files {
			return fmt.Errorf("%w: more than %d files", ErrOutputLimit, limits.Files)
		}
		if slices.Contains(graphs, name) {
			found[name] = true
			return nil
		}
		others = append(others, filepath.ToSlash(name))
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("output folder: %w", err)
	}
	slices.Sort(others)
	return others, found, nil
}

// walkOutput calls each for everything below the folder but folders and the names in skip.
func walkOutput(folder string, skip []string, each func(name string, info fs.FileInfo) error) error {
	return filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(folder, path)
		switch {
		case err != nil:
			return err
		case slices.Contains(skip, name) && entry.IsDir():
			return fs.SkipDir
		case slices.Contains(skip, name), entry.IsDir():
			return nil
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		return each(name, info)
	})
}

func readGraph(ctx context.Context, path string) (*epmodel.Model, error) {
	f, source, err := openSource(path)
	if err != nil {
		return nil, fmt.Errorf("graph: %w", err)
	}
	defer f.Close() // read only: nothing can be lost
	model, err := epmodel.Read(ctx, filepath.Base(path), source)
	if err != nil {
		return nil, fmt.Errorf("graph: %w", err)
	}
	NameSources(model)
	return model, nil
}
