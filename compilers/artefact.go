package compilers

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"

	"github.com/epcached/epcached/bytesize"
	"github.com/epcached/epcached/epmodel"
)

// Collect lists what a compiler left in folder, besides the names in inputs, and reads the graph. It trusts nothing: links, devices and
// files beyond the limits are ErrOutput; a graph without EPContext nodes is a *NoNodesError with EPs still empty. Files have the graph first; names in sub-folders
// use slashes.
func Collect(ctx context.Context, folder, graph string, inputs []string, limits Limits) (files []string, model *epmodel.Model, err error) {
	files, models, err := CollectAll(ctx, folder, []string{graph}, inputs, limits)
	if len(models) > 0 {
		model = models[0]
	}
	return files, model, err
}

// CollectAll is Collect for the graphs of a group: files have the graphs first, in order, and what is wrong with one of several is a
// *MemberError. Beside a *NoNodesError the models end with the one that it is about.
func CollectAll(ctx context.Context, folder string, graphs, inputs []string, limits Limits) (files []string, models []*epmodel.Model, err error) {
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

// missingGraphError is a compiler that wrote no graph.
type missingGraphError struct{ graph string }

func (e *missingGraphError) Error() string {
	return fmt.Sprintf("output folder: %v: the graph %q is missing", ErrOutput, e.graph)
}

func (e *missingGraphError) Unwrap() error { return ErrOutput }

// listOutput lists what is in the folder besides inputs and graphs, sorted, and which of the graphs are.
func listOutput(folder string, graphs, inputs []string, limits Limits) (others []string, found map[string]bool, err error) {
	skip := map[string]bool{}
	for _, name := range inputs {
		skip[name] = true
	}
	var total int64
	found = map[string]bool{}
	err = filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		if skip[name] {
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if entry.IsDir() {
			return nil
		}
		size, err := regularSize(path)
		if err != nil {
			return err
		}
		if total += size; limits.Output >= 0 && total > limits.Output {
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
	sort.Strings(others)
	return others, found, nil
}

// regularSize gives the size of a regular file with one name; anything else in the folder could be a way to the daemon's own files.
func regularSize(path string) (int64, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return 0, err
	}
	if !info.Mode().IsRegular() {
		return 0, fmt.Errorf("%w: %q is not a regular file", ErrOutput, filepath.Base(path))
	}
	if linkCount(info) > 1 {
		return 0, fmt.Errorf("%w: %q has a second name elsewhere", ErrOutput, filepath.Base(path))
	}
	return info.Size(), nil
}

// fileSource lets epmodel read an open file.
type fileSource struct {
	*os.File
	size int64
}

func (s fileSource) Size() int64 { return s.size }

func readGraph(ctx context.Context, path string) (*epmodel.Model, error) {
	f, err := openPlain(path)
	if err != nil {
		return nil, fmt.Errorf("graph: %w", err)
	}
	defer f.Close() // read only: nothing can be lost
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("graph: %w", err)
	}
	if !info.Mode().IsRegular() { // a process that escaped may have changed it since it was listed
		return nil, fmt.Errorf("graph: %w: %q is not a regular file", ErrOutput, filepath.Base(path))
	}
	model, err := epmodel.Read(ctx, filepath.Base(path), fileSource{f, info.Size()})
	if err != nil {
		return nil, fmt.Errorf("graph: %w", err)
	}
	NameSources(model)
	return model, nil
}
