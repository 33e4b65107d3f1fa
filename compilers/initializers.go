package compilers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/epcached/epcached/epmodel"
)

// checkInitializers returns an error for settings of initializers that ONNX Runtime cannot carry
// out. job.Route must be set.
func (job Job) checkInitializers() error {
	i := job.Initializers
	switch {
	case IsWeightless(job.SessionOptions) && len(job.Share) > 0:
		return fmt.Errorf(
			"%w: weightless contexts of a group: its models may have weights in files of "+
				"equal names", ErrOption)
	case i != (Initializers{}) && len(job.Share) > 0:
		return fmt.Errorf("%w: external initializers of a group: its graphs would write to one "+
			"file", ErrOption)
	case i.InSource && i.File != "":
		return fmt.Errorf("%w: initializers cannot both stay in the source's files and be "+
			"written to %q", ErrOption, i.File)
	case job.Route == RouteSessionOptions && i.InSource:
		return fmt.Errorf("%w: initializers that stay in the source's files: not possible on "+
			"the route %s", ErrOption, job.Route)
	case job.Route == RouteSessionOptions && i.Threshold != 0:
		return fmt.Errorf("%w: external initializers: ONNX Runtime has no threshold on the "+
			"route %s", ErrOption, job.Route)
	case i.Threshold < 0 || i.Threshold != 0 && i.File == "":
		return fmt.Errorf("%w: external initializers from %d bytes: negative, or without a "+
			"file", ErrOption, i.Threshold)
	case i.File != filepath.Base(i.File) && i.File != "", i.File == job.Output, i.File == "..":
		return fmt.Errorf(
			"%w: external initializers in %q: not the name of a file beside the graph",
			ErrOption, i.File)
	}
	return nil
}

// IsWeightless reports whether session options ask the EP to leave weights in the source model, and
// to find them there itself.
func IsWeightless(entries map[string]string) bool {
	on, err := CanonicalValue("bool", entries["ep.enable_weightless"])
	mode := entries["ep.enable_weightless_mode"]
	return err == nil && on == "1" || mode != "" && mode != "0"
}

const sourceOption = "ep.context_source_model_path"

// sourceOf finds the source model of a weightless artefact, which is beside the compiled graph with
// the name that it had during the compile.
func sourceOf(graph string) (string, bool) {
	entries, err := os.ReadDir(filepath.Dir(graph))
	if err != nil || !strings.HasSuffix(graph, "_ctx.onnx") {
		return "", false // the load of the graph reports why it cannot be read
	}
	for _, e := range entries {
		if name := e.Name(); strings.HasSuffix(name, ".onnx") &&
			!strings.HasSuffix(name, "_ctx.onnx") {
			return filepath.Join(filepath.Dir(graph), name), true
		}
	}
	return "", false
}

// keepSources copies the files of the source that the artefact needs beside the compiled graph:
// external data that the graph refers to, and with weightless contexts, which only the EP can read,
// all external data and the source model itself. before are the names in the directory that are not
// output. It returns them without those that became part of the artefact.
func keepSources(ctx context.Context, job Job, before []string) ([]string, error) {
	model, err := readGraph(ctx, filepath.Join(job.Dir, job.Output))
	if err != nil {
		return nil, err
	}
	// A root, because a file that the worker left may be a link to any other file.
	root, err := os.OpenRoot(job.Dir)
	if err != nil {
		return nil, err
	}
	defer root.Close() // no write through it follows
	names := model.Locations()
	if IsWeightless(job.SessionOptions) {
		whole, err := readGraph(ctx, job.Model)
		if err != nil {
			return nil, err
		}
		names = append(append(names, whole.Locations()...), filepath.Base(job.Model))
	}
	source := filepath.Dir(job.Model)
	for _, location := range names {
		name := path.Clean(location)
		if source == filepath.Clean(job.Dir) {
			first, _, _ := strings.Cut(name, "/")
			before = slices.DeleteFunc(before, func(s string) bool { return s == first })
			continue
		}
		if err := keepSource(ctx, root, source, name); err != nil {
			return nil, fmt.Errorf("source's file %q: %w", location, err)
		}
	}
	return before, nil
}

// keepSharedSources copies the external data of a group's models that shared context binaries refer
// to beside their graphs, because OpenVINO leaves such weights there. A binary does not say which
// of the models a name belongs to.
func keepSharedSources(ctx context.Context, job Job, before []string, limits Limits) error {
	written, _, err := listOutput(job.Dir, job.Outputs(), before, limits.orDefault())
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(job.Dir)
	if err != nil {
		return err
	}
	defer root.Close() // no write through it follows
	var dirs map[string][]string
	for _, name := range written {
		refs, err := referencesOf(filepath.Join(job.Dir, filepath.FromSlash(name)))
		if err != nil {
			return err
		}
		if len(refs) > 0 && dirs == nil {
			if dirs, err = sourceDirs(ctx, job); err != nil {
				return err
			}
		}
		for _, ref := range refs {
			from := dirs[path.Clean(ref.Name)]
			if len(from) > 1 {
				return fmt.Errorf("%w: the execution provider reads weights from the models' "+
					"files, and different files are named %q", ErrOption, ref.Name)
			}
			if len(from) == 0 {
				continue // not of a model; the validation of references reports it if it is missing
			}
			if err := keepSource(ctx, root, from[0], path.Clean(ref.Name)); err != nil {
				return fmt.Errorf("source's file %q: %w", ref.Name, err)
			}
		}
	}
	return nil
}

func referencesOf(binary string) ([]epmodel.Reference, error) {
	f, source, err := openSource(binary)
	if err != nil {
		return nil, err
	}
	defer f.Close() // opened for reading
	return epmodel.BinaryReferences(filepath.Base(binary), source)
}

// sourceDirs returns the directories in which the models of a group have a file of external data,
// by its location.
func sourceDirs(ctx context.Context, job Job) (map[string][]string, error) {
	models := []string{job.Model}
	for _, m := range job.Share {
		models = append(models, m.Model)
	}
	dirs := make(map[string][]string)
	for _, name := range models {
		model, err := readGraph(ctx, name)
		if err != nil {
			return nil, err
		}
		for _, location := range model.Locations() {
			location, dir := path.Clean(location), filepath.Dir(name)
			if !slices.Contains(dirs[location], dir) {
				dirs[location] = append(dirs[location], dir)
			}
		}
	}
	return dirs, nil
}

// keepSource copies one file, unless the artefact has it.
func keepSource(ctx context.Context, root *os.Root, source, name string) error {
	if err := root.MkdirAll(path.Dir(name), 0o700); err != nil {
		return err
	}
	to, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		// written by this compile, and validated like all files
		return nil
	}
	if err != nil {
		return err
	}
	from, err := openPlain(filepath.Join(source, filepath.FromSlash(name)))
	if err != nil {
		return errors.Join(err, to.Close())
	}
	defer from.Close() // opened for reading
	return errors.Join(copyFile(ctx, to, from), to.Close())
}

// copyFile copies in pieces, so that it ends soon after its context. The kernel clones them if the
// file system supports that.
func copyFile(ctx context.Context, to, from *os.File) error {
	const piece = 64 << 20
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := io.CopyN(to, from, piece); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
