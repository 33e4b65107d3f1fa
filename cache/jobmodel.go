package cache

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/epcached/epcached/cache/identity"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
)

// modelCopy is the private copy of one of a job's models, or what stands for it.
type modelCopy struct {
	path      string
	locations []string  // of external data, beside it
	respelled [2]string // two locations that are one file by their spelling, if there are
	original  *original // not nil: there is no copy, and at path only a worker finds the model
}

func (c modelCopy) openGraph() (*os.File, error) {
	if c.original == nil {
		return os.Open(c.path)
	}
	return openAgain(c.original.file)
}

// workspace is a folder with private copies of a request's models.
type workspace struct {
	of     *request.Request
	keyed  *identity.Record // that the copies have to be the models of
	name   string           // what the models are called: EPs write file names into what they make
	folder string

	copies     []modelCopy             // once they are made
	open       []request.OpenDimension // likewise: those of the inputs that the request does not fix
	dimensions []string                // likewise: names that dimensions of the inputs have
}

// copyModel makes the private copies that are compiled. It gives the proof, which takes as long as hashing them, that they have
// the bytes that the key is made of: without it nothing that came of them may be used.
func (w *workspace) copyModel(ctx context.Context) (proof func(context.Context) error, err error) {
	w.copies, w.open, w.dimensions = nil, nil, nil // of an earlier try, if the job made room for another and begins again
	made := make(copied)
	var models []*epmodel.Model
	for i := range w.of.Models() {
		m, err := w.copyMember(ctx, i, made)
		if err != nil {
			return nil, err
		}
		models = append(models, m)
	}
	return func(ctx context.Context) error { return w.prove(ctx, models) }, nil
}

// copyProven is copyModel with its proof.
func (w *workspace) copyProven(ctx context.Context) error {
	if err := room(w.folder, w.of.AllFiles()); err != nil {
		return request.StoreError(err, w.of.Name)
	}
	proof, err := w.copyModel(ctx)
	if err != nil {
		return err
	}
	return proof(ctx)
}

// modelPath is where a model is copied to at first, and the first one stays.
func (w *workspace) modelPath(i int) string {
	return filepath.Join(w.modelFolder(), w.memberName(i)+".onnx")
}

// prove compares the copies with the digests that the key is made of.
func (w *workspace) prove(ctx context.Context, models []*epmodel.Model) error {
	var seen identity.Sums
	for i, m := range models {
		got, err := seen.DigestAt(ctx, m, w.copies[i].path)
		if err != nil {
			return w.of.ModelFiles(i).Refused(err)
		}
		if got != w.keyed.ModelOf(i) {
			return w.otherThanHashed(i)
		}
	}
	return nil
}

// memberName is what the files of one of the job's models are called: the first by the build key alone, as EPs name after it
// what all share.
func (w *workspace) memberName(i int) string {
	if i == 0 {
		return w.name
	}
	return fmt.Sprintf("%s_%d", w.name, i+1)
}

// memberOutput names the graph that is written for one of the job's models.
func (w *workspace) memberOutput(i int) string { return w.memberName(i) + "_ctx.onnx" }

func (w *workspace) modelFolder() string { return filepath.Join(w.folder, modelsFolder) }

// otherThanHashed is the error for a copy whose bytes are not those that the key is made of.
func (w *workspace) otherThanHashed(member int) error {
	if two := w.copies[member].respelled; two[0] != two[1] {
		return apierr.New(apierr.BadModel, nil, "model %q: external data %q and %q are one file by their spelling, and have different bytes",
			w.of.ModelFiles(member).Name, two[0], two[1]).
			WithHint("a symbolic link in one of the paths leads elsewhere, or the file was written meanwhile: name both by their real paths")
	}
	return w.of.ModelFiles(member).Changed(nil)
}

// copied maps each path in a folder, relative and clean, to the file that was copied there.
type copied map[string]*os.File

// taken reports whether a location's path is taken in the folder, and whether it is taken by the very file.
func (c copied) taken(location string, f *os.File) (there, same bool) {
	other := c[path.Clean(location)]
	if other == nil {
		return false, false
	}
	a, err := f.Stat()
	if err != nil {
		return true, false
	}
	b, err := other.Stat()
	return true, err == nil && os.SameFile(a, b)
}

// copyMember copies one of the models with its external data, and gives the former. Only what the graph refers to is
// copied, for that was checked: what else a client sent may have any name. What several models of a group have in one file is
// copied once; where they call different files the same, a model gets a folder of its own.
func (w *workspace) copyMember(ctx context.Context, i int, made copied) (*epmodel.Model, error) {
	r := w.of.ModelFiles(i)
	model := w.modelPath(i)
	if err := copyPrivate(r.Graph, model); err != nil {
		return nil, request.StoreError(err, r.Name)
	}
	opened := &openFiles{}
	defer opened.close()
	graph, err := opened.source(model)
	if err != nil {
		return nil, request.StoreError(err, r.Name)
	}
	m, err := epmodel.Read(ctx, filepath.Base(model), graph)
	if err != nil {
		return nil, r.Refused(err)
	}
	locations := m.Locations()
	w.addDimensions(m)
	folder, err := w.folderFor(i, r, locations, made)
	if err != nil {
		return nil, err
	}
	if folder != filepath.Dir(model) {
		moved := filepath.Join(folder, filepath.Base(model))
		if err := os.Rename(model, moved); err != nil {
			return nil, request.StoreError(err, r.Name)
		}
		model, made = moved, make(copied)
	}
	one := modelCopy{path: model, locations: locations}
	for _, location := range locations {
		if err := one.copyExternal(location, r.External[location], made); err != nil {
			return nil, request.StoreError(err, r.Name)
		}
	}
	w.copies = append(w.copies, one)
	return m, nil
}

// copyExternal copies the external data at one location. A file that is there under another spelling is not copied again:
// the proof reads it under both, so that a difference is found.
func (c *modelCopy) copyExternal(location string, f *os.File, made copied) error {
	folder, at := filepath.Dir(c.path), path.Clean(location)
	if err := makeSteps(folder, location); err != nil {
		return err
	}
	if there, same := made.taken(location, f); there {
		if !same {
			c.respelled = [2]string{at, location}
		}
		return nil
	}
	made[at] = f
	return copyPrivate(f, filepath.Join(folder, filepath.FromSlash(at)))
}

// makeSteps makes the directories that a location steps into and leaves again, such as "s" of "s/../w.bin", because the
// system resolves each step.
func makeSteps(folder, location string) error {
	parts := strings.Split(location, "/")
	for i, part := range parts {
		if part != ".." {
			continue
		}
		if err := os.MkdirAll(filepath.Join(folder, filepath.Join(parts[:i]...)), 0o700); err != nil {
			return err
		}
	}
	return nil
}

// folderFor gives the folder for a model: that of the first one, unless another file has one of its names there.
func (w *workspace) folderFor(i int, r identity.Files, locations []string, made copied) (string, error) {
	for _, location := range locations {
		f := r.External[location]
		if f == nil {
			return "", r.Changed(nil)
		}
		if there, same := made.taken(location, f); there && !same {
			folder := filepath.Join(w.modelFolder(), strconv.Itoa(i+1))
			if err := os.MkdirAll(folder, 0o700); err != nil {
				return "", request.StoreError(err, r.Name)
			}
			return folder, nil
		}
	}
	return w.modelFolder(), nil
}

// openFiles are files that are read, and closed together.
type openFiles struct{ open []*os.File }

func (o *openFiles) source(path string) (epmodel.Source, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	o.open = append(o.open, f)
	return epmodel.FileSource(f)
}

func (o *openFiles) close() {
	for _, f := range o.open {
		_ = f.Close() // opened for reading only: nothing can be lost
	}
}
