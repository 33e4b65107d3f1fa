package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
)

// Form is the form of a build that has its context in the graph, or beside it, where the build
// has not.
type Form struct {
	Of       *index.Build
	Embed    bool
	Graph    string // its name
	MaxGraph int64  // bytes of a graph with its context
	Folder   string // to write to
}

// Write makes the files from those in the folder, and returns their names, the graph first.
func (v *Form) Write(ctx context.Context, from string) ([]string, error) {
	in := opened{folder: from}
	defer in.Close()
	graph, err := in.source(v.Of.Graph)
	if err != nil {
		return nil, err
	}
	m, err := epmodel.Read(ctx, v.Of.Graph, graph)
	if err != nil {
		return nil, err
	}
	plan := v.detached
	if v.Embed {
		plan = v.embedded
	}
	written, contexts, err := plan(ctx, m, graph, &in)
	if err != nil {
		return nil, err
	}
	if err := workspace.Room(v.Folder, in.Open); err != nil {
		return nil, err
	}
	files := []string{v.Graph}
	toGraph := func(w io.Writer) error { return written.WriteTo(ctx, w) }
	if err := v.writeFile(v.Graph, toGraph); err != nil {
		return nil, err
	}
	for _, one := range contexts {
		toFile := func(w io.Writer) error { return copyAll(ctx, w, one.Bytes) }
		if err := v.writeFile(one.Name, toFile); err != nil {
			return nil, err
		}
		files = append(files, one.Name)
	}
	rest, err := v.copyRest(m, from)
	return append(files, rest...), err
}

func (v *Form) embedded(ctx context.Context, m *epmodel.Model, graph epmodel.Source, in *opened) (
	*epmodel.Splice, []epmodel.DetachedContext, error) {
	bins := make(map[string]epmodel.Source)
	for _, name := range m.ContextFiles() {
		var err error
		if bins[name], err = in.source(name); err != nil {
			return nil, nil, err
		}
	}
	written, err := epmodel.Embed(ctx, m, graph, bins, v.MaxGraph)
	return written, nil, err
}

func (v *Form) detached(ctx context.Context, m *epmodel.Model, graph epmodel.Source, _ *opened) (
	*epmodel.Splice, []epmodel.DetachedContext, error) {
	return epmodel.Detach(ctx, m, graph, v.Graph, identity.Sum)
}

// copyRest copies files that are neither graph nor context, such as external initializers.
func (v *Form) copyRest(m *epmodel.Model, from string) ([]string, error) {
	done := map[string]bool{v.Of.Graph: true}
	for _, name := range m.ContextFiles() {
		done[name] = true
	}
	var names []string
	for _, f := range v.Of.Files {
		if done[f.Name] {
			continue
		}
		path := filepath.Join(from, filepath.FromSlash(f.Name))
		if err := workspace.CopyPath(path, v.path(f.Name)); err != nil {
			return nil, err
		}
		names = append(names, f.Name)
	}
	return names, nil
}

func (v *Form) path(name string) string {
	return filepath.Join(v.Folder, filepath.FromSlash(name))
}

func (v *Form) writeFile(name string, write func(io.Writer) error) error {
	f, err := os.OpenFile(v.path(name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(write(f), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// opened are files of a view, open for reading.
type opened struct {
	workspace.OpenFiles
	folder string
}

func (o *opened) source(name string) (epmodel.Source, error) {
	if name == "" || !filepath.IsLocal(filepath.FromSlash(name)) || strings.ContainsRune(name, 0) {
		return nil, fmt.Errorf("%q is not the name of a file of a build", name)
	}
	return o.OpenFiles.Source(filepath.Join(o.folder, filepath.FromSlash(name)))
}

// copyAll copies in large pieces, and ends with its context.
func copyAll(ctx context.Context, w io.Writer, r io.Reader) error {
	from := struct{ io.Reader }{untilDone{ctx, r}}
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, from, make([]byte, 1<<20))
	return err
}

type untilDone struct {
	ctx context.Context
	r   io.Reader
}

func (u untilDone) Read(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	return u.r.Read(p)
}
