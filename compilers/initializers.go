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

// checkInitializers returns which requests for initializers ONNX Runtime cannot fulfil. job.Route
// is filled in.
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
// to find them there by itself.
func IsWeightless(entries map[string]string) bool {
	on, err := CanonicalValue("bool", entries["ep.enable_weightless"])
	mode := entries["ep.enable_weightless_mode"]
	return err == nil && on == "1" || mode != "" && mode != "0"
}

const sourceOption = "ep.context_source_model_path"

// sourceOf finds the source model of a weightless artefact: beside the compiled graph, under the
// name that it was compiled by.
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

// keepSources copies those files of the source beside the compiled graph that the artefact needs,
// because it has to be complete: external data that the graph refers to, and with weightless
// contexts, which only the EP can read, all external data and the source model itself. before are
// the names in the directory that are not output; those that became part of it are taken out.
func keepSources(ctx context.Context, job Job, before []string) ([]string, error) {
	model, err := readGraph(ctx, filepath.Join(job.Dir, job.Output))
	if err != nil {
		return nil, err
	}
	// A file that the worker left in the directory may be a link to anywhere.
	root, err := os.OpenRoot(job.Dir)
	if err != nil {
		return nil, err
	}
	defer root.Close() // nothing is written through it any more
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

// keepSharedSources copies those files of a group's models beside their graphs that the shared
// context binaries refer to: OpenVINO leaves weights that the models have in external data there.
// Which of the models a name is of no binary says.
func keepSharedSources(ctx context.Context, job Job, before []string, limits Limits) error {
	written, _, err := listOutput(job.Dir, job.Outputs(), before, limits.orDefault())
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(job.Dir)
	if err != nil {
		return err
	}
	defer root.Close() // nothing is written through it any more
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
				continue // of no model: whether it is there at all is validated like all references
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
	defer f.Close() // read only
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
		// written by this compile: what it is, and whether it is enough, is validated like all
		// files
		return nil
	}
	if err != nil {
		return err
	}
	from, err := openPlain(filepath.Join(source, filepath.FromSlash(name)))
	if err != nil {
		return errors.Join(err, to.Close())
	}
	defer from.Close() // read only
	return errors.Join(copyFile(ctx, to, from), to.Close())
}

// copyFile copies in pieces, so that it ends soon after its context. The kernel clones them where
// the file system can.
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
