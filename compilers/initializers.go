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
)

// checkInitializers tells which wishes for initializers ONNX Runtime cannot fulfil. job.Route is filled in.
func (job Job) checkInitializers() error {
	i := job.Initializers
	switch {
	case i != (Initializers{}) && len(job.Share) > 0:
		return fmt.Errorf("%w: external initializers of a group: its graphs would all write into one file", ErrOption)
	case i.InSource && i.File != "":
		return fmt.Errorf("%w: initializers cannot both stay in the source's files and go into %q", ErrOption, i.File)
	case job.Route == RouteSessionOptions && i.InSource:
		return fmt.Errorf("%w: by the route %s ONNX Runtime never leaves initializers in the source's files", ErrOption, job.Route)
	case job.Route == RouteSessionOptions && i.Threshold != 0:
		return fmt.Errorf("%w: by the route %s ONNX Runtime knows no threshold for external initializers", ErrOption, job.Route)
	case i.Threshold < 0 || i.Threshold != 0 && i.File == "":
		return fmt.Errorf("%w: a threshold of %d bytes for external initializers without a file, or a negative one", ErrOption, i.Threshold)
	case i.File != filepath.Base(i.File) && i.File != "", i.File == job.Output, i.File == "..":
		return fmt.Errorf("%w: external initializers in %q: not the name of a file beside the graph", ErrOption, i.File)
	}
	return nil
}

// keepSources copies those files of the source's external data beside the compiled graph that it refers to: an artefact has to stand on its own.
// before are the names in the folder that are not output; those that became part of it are taken out.
func keepSources(ctx context.Context, job Job, before []string) ([]string, error) {
	model, err := readGraph(ctx, filepath.Join(job.Folder, job.Output))
	if err != nil {
		return nil, err
	}
	// What the worker left in the folder may be a link to anywhere.
	root, err := os.OpenRoot(job.Folder)
	if err != nil {
		return nil, err
	}
	defer root.Close() // nothing is written through it any more
	source := filepath.Dir(job.Model)
	for _, location := range model.Locations() {
		name := path.Clean(location)
		if source == filepath.Clean(job.Folder) {
			first, _, _ := strings.Cut(name, "/")
			before = slices.DeleteFunc(before, func(s string) bool { return s == first })
			continue
		}
		if err := keepSource(ctx, root, source, name); err != nil {
			return nil, fmt.Errorf("external data %q: %w", location, err)
		}
	}
	return before, nil
}

// keepSource copies one file, unless the artefact has it.
func keepSource(ctx context.Context, root *os.Root, source, name string) error {
	if err := root.MkdirAll(path.Dir(name), 0o700); err != nil {
		return err
	}
	to, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil // written by this compile: what it is, and whether it is enough, is validated like all files
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

// copyFile copies in pieces, so that it ends soon after its context. The kernel clones them where the file system can.
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
