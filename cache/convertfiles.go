package cache

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
)

// write makes the files from those in the folder, and gives their names, the graph first.
func (v *conversion) write(ctx context.Context, from string) ([]string, error) {
	in := opened{folder: from}
	defer in.Close()
	graph, err := in.source(v.from.Graph)
	if err != nil {
		return nil, err
	}
	m, err := epmodel.Read(ctx, v.from.Graph, graph)
	if err != nil {
		return nil, err
	}
	plan := v.detach
	if v.Plan.Canonical.Embed {
		plan = v.embed
	}
	written, contexts, err := plan(ctx, m, graph, &in)
	if err != nil {
		return nil, err
	}
	if err := workspace.Room(v.folder, in.Open); err != nil {
		return nil, err
	}
	files := []string{v.Plan.OutputName()}
	if err := v.writeFile(v.Plan.OutputName(), func(w io.Writer) error { return written.WriteTo(ctx, w) }); err != nil {
		return nil, err
	}
	for _, one := range contexts {
		if err := v.writeFile(one.Name, func(w io.Writer) error { return copyAll(ctx, w, one.Bytes) }); err != nil {
			return nil, err
		}
		files = append(files, one.Name)
	}
	rest, err := v.copyRest(m, from)
	return append(files, rest...), err
}

func (v *conversion) embed(ctx context.Context, m *epmodel.Model, graph epmodel.Source, in *opened) (*epmodel.Splice, []epmodel.DetachedContext, error) {
	bins := make(map[string]epmodel.Source)
	for _, name := range m.ContextFiles() {
		var err error
		if bins[name], err = in.source(name); err != nil {
			return nil, nil, err
		}
	}
	written, err := epmodel.Embed(ctx, m, graph, bins, v.c.maxGraph)
	return written, nil, err
}

func (v *conversion) detach(ctx context.Context, m *epmodel.Model, graph epmodel.Source, _ *opened) (*epmodel.Splice, []epmodel.DetachedContext, error) {
	return epmodel.Detach(ctx, m, graph, v.Plan.OutputName(), identity.Sum)
}

// copyRest copies what is neither graph nor context: external initializers, for one.
func (v *conversion) copyRest(m *epmodel.Model, from string) ([]string, error) {
	done := map[string]bool{v.from.Graph: true}
	for _, name := range m.ContextFiles() {
		done[name] = true
	}
	var names []string
	for _, f := range v.from.Files {
		if done[f.Name] {
			continue
		}
		if err := workspace.CopyPath(filepath.Join(from, filepath.FromSlash(f.Name)), v.path(f.Name)); err != nil {
			return nil, err
		}
		names = append(names, f.Name)
	}
	return names, nil
}

func (v *conversion) path(name string) string {
	return filepath.Join(v.folder, filepath.FromSlash(name))
}

func (v *conversion) writeFile(name string, write func(io.Writer) error) error {
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
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{untilDone{ctx, r}}, make([]byte, 1<<20))
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
