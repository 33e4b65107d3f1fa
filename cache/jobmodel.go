package cache

import (
	"context"
	"os"
	"path/filepath"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/epmodel"
)

// copyModel makes the private copy that is compiled, and proves that it has the bytes that the key is made of.
func (j *job) copyModel(ctx context.Context) (string, error) {
	if err := j.makeRoom(); err != nil {
		return "", storeError(err, j.request.Name)
	}
	path := filepath.Join(j.modelFolder(), j.name+".onnx")
	if err := copyPrivate(j.request.Graph, path); err != nil {
		return "", storeError(err, j.request.Name)
	}
	got, err := j.copyExternal(ctx, path)
	if err != nil {
		return "", err
	}
	if got != j.plan.canonical.Model {
		return "", j.changed()
	}
	return path, nil
}

func (j *job) makeRoom() error {
	err := room(j.folder, j.request.files())
	if err != nil {
		j.c.gains.giveUp()
		err = room(j.folder, j.request.files())
	}
	return err
}

func (j *job) modelFolder() string { return filepath.Join(j.folder, "model") }

func (j *job) changed() error {
	return fail(BadModel, nil, "model %q changed while being read", j.request.Name).
		hint("wait until whatever writes it is done, and ask again")
}

// copyExternal copies the external data beside the copy of the graph, and gives the digest of both. Only what the
// graph refers to is copied, for that was checked: what else a client sent may have any name.
func (j *job) copyExternal(ctx context.Context, path string) (cas.Digest, error) {
	var open []*os.File
	defer func() {
		for _, f := range open {
			_ = f.Close() // opened for reading only: nothing can be lost
		}
	}()
	source := func(path string) (epmodel.Source, error) {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		open = append(open, f)
		return epmodel.FileSource(f)
	}
	graph, err := source(path)
	if err != nil {
		return cas.Digest{}, storeError(err, j.request.Name)
	}
	m, err := epmodel.Read(ctx, filepath.Base(path), graph)
	if err != nil {
		return cas.Digest{}, modelError(j.request, err)
	}
	j.locations, j.open = m.Locations(), j.request.openDimensions(m)
	beside := func(location string) string { return filepath.Join(j.modelFolder(), filepath.FromSlash(location)) }
	for _, location := range j.locations {
		f := j.request.External[location]
		if f == nil {
			return cas.Digest{}, j.changed()
		}
		if err := copyPrivate(f, beside(location)); err != nil {
			return cas.Digest{}, storeError(err, j.request.Name)
		}
	}
	d, err := epmodel.Digest(ctx, m, graph, func(location string) (epmodel.Source, error) { return source(beside(location)) }, sumOf)
	if err != nil {
		return cas.Digest{}, modelError(j.request, err)
	}
	return cas.Digest(d), nil
}
