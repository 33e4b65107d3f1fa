package cache

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/refusal"
	"github.com/epcached/epcached/witness"
)

// modelCopy is the private copy of one of a job's models, or what stands for it.
type modelCopy struct {
	path      string
	locations []string  // of external data, beside it
	original  *original // not nil: there is no copy, and at path only a worker finds the model
}

func (c modelCopy) openGraph() (*os.File, error) {
	if c.original == nil {
		return os.Open(c.path)
	}
	fd, err := witness.OpenAgain(c.original.file)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), c.original.file.Name()), nil
}

// copyModel makes the private copies that are compiled. It gives the proof, which takes as long as hashing them, that they have
// the bytes that the key is made of: without it nothing that came of them may be used.
func (j *job) copyModel(ctx context.Context) (proof func(context.Context) error, err error) {
	j.copies, j.open, j.dimensions = nil, nil, nil // of an earlier try, if the job made room for another and begins again
	made := &copying{files: make(map[string]*os.File)}
	var models []*epmodel.Model
	for i := range j.request.models() {
		m, err := j.copyMember(ctx, i, made)
		if err != nil {
			return nil, err
		}
		models = append(models, m)
	}
	return func(ctx context.Context) error { return j.prove(ctx, models) }, nil
}

// copyProven is copyModel with its proof. It gives the path of the first model's copy.
func (j *job) copyProven(ctx context.Context) (path string, err error) {
	if err := j.makeRoom(); err != nil {
		return "", storeError(err, j.request.Name)
	}
	proof, err := j.copyModel(ctx)
	if err == nil {
		err = proof(ctx)
	}
	return j.modelPath(0), err
}

// modelPath is where a model is copied to at first, and the first one stays.
func (j *job) modelPath(i int) string { return filepath.Join(j.modelFolder(), j.memberName(i)+".onnx") }

// prove compares the copies with the digests that the key is made of.
func (j *job) prove(ctx context.Context, models []*epmodel.Model) error {
	var seen sums
	for i, m := range models {
		got, err := j.copies[i].digest(ctx, m, &seen)
		if err != nil {
			return modelError(j.request.model(i), err)
		}
		if got != j.plan.canonical.ModelOf(i) {
			return j.changed(i)
		}
	}
	return nil
}

// digest gives the digest of a copied model with its external data.
func (c modelCopy) digest(ctx context.Context, m *epmodel.Model, seen *sums) (cas.Digest, error) {
	opened := &openFiles{sums: seen}
	defer opened.close()
	graph, err := opened.source(c.path)
	if err != nil {
		return cas.Digest{}, err
	}
	folder := filepath.Dir(c.path)
	d, err := epmodel.Digest(ctx, m, graph, func(location string) (epmodel.Source, error) {
		return opened.source(filepath.Join(folder, filepath.FromSlash(location)))
	}, seen.of)
	return cas.Digest(d), err
}

// memberName is what the files of one of the job's models are called: the first by the build key alone, as EPs name after it
// what all share.
func (j *job) memberName(i int) string {
	if i == 0 {
		return j.name
	}
	return fmt.Sprintf("%s_%d", j.name, i+1)
}

// memberOutput names the graph that is written for one of the job's models.
func (j *job) memberOutput(i int) string { return j.memberName(i) + "_ctx.onnx" }

// makeRoom says whether the copies will fit.
func (j *job) makeRoom() error {
	err := room(j.folder, j.request.files())
	if err != nil {
		j.c.gains.giveUp()
		err = room(j.folder, j.request.files())
	}
	return err
}

func (j *job) modelFolder() string { return filepath.Join(j.folder, modelsFolder) }

func (j *job) changed(member int) error {
	return refusal.New(refusal.BadModel, nil, "model %q changed while being read", j.request.model(member).Name).
		WithHint("wait until whatever writes it is done, and ask again")
}

// copying is what the models of a job have in common.
type copying struct {
	files map[string]*os.File // copied already beside the first model, by location: from which file
}

// taken tells whether external data of this name stands beside the first model, and whether it is the very file.
func (c *copying) taken(location string, f *os.File) (there, same bool) {
	other := c.files[location]
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
func (j *job) copyMember(ctx context.Context, i int, made *copying) (*epmodel.Model, error) {
	r := j.request.model(i)
	path := j.modelPath(i)
	if err := copyPrivate(r.Graph, path); err != nil {
		return nil, storeError(err, r.Name)
	}
	opened := &openFiles{}
	defer opened.close()
	graph, err := opened.source(path)
	if err != nil {
		return nil, storeError(err, r.Name)
	}
	m, err := epmodel.Read(ctx, filepath.Base(path), graph)
	if err != nil {
		return nil, modelError(r, err)
	}
	locations := m.Locations()
	j.addDimensions(r, m)
	folder, err := j.folderFor(i, r, locations, made)
	if err != nil {
		return nil, err
	}
	if folder != filepath.Dir(path) {
		moved := filepath.Join(folder, filepath.Base(path))
		if err := os.Rename(path, moved); err != nil {
			return nil, storeError(err, r.Name)
		}
		path = moved
	}
	beside := func(location string) string { return filepath.Join(folder, filepath.FromSlash(location)) }
	for _, location := range locations {
		if there, _ := made.taken(location, r.External[location]); there && folder == j.modelFolder() {
			continue
		}
		if err := copyPrivate(r.External[location], beside(location)); err != nil {
			return nil, storeError(err, r.Name)
		}
		if folder == j.modelFolder() {
			made.files[location] = r.External[location]
		}
	}
	j.copies = append(j.copies, modelCopy{path: path, locations: locations})
	return m, nil
}

// folderFor gives the folder for a model: that of the first one, unless another file has one of its names there.
func (j *job) folderFor(i int, r *Request, locations []string, made *copying) (string, error) {
	for _, location := range locations {
		f := r.External[location]
		if f == nil {
			return "", j.changed(i)
		}
		if there, same := made.taken(location, f); there && !same {
			folder := filepath.Join(j.modelFolder(), strconv.Itoa(i+1))
			if err := os.MkdirAll(folder, 0o700); err != nil {
				return "", storeError(err, r.Name)
			}
			return folder, nil
		}
	}
	return j.modelFolder(), nil
}

// openFiles are files that are read, and closed together.
type openFiles struct {
	sums *sums
	open []*os.File
}

func (o *openFiles) source(path string) (epmodel.Source, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	o.open = append(o.open, f)
	return o.sums.source(f)
}

func (o *openFiles) close() {
	for _, f := range o.open {
		_ = f.Close() // opened for reading only: nothing can be lost
	}
}
