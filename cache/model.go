package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/memo"
	"github.com/epcached/epcached/internal/witness"
)

// identity is what a model's content says; it holds for as long as the files' stamps do.
type modelIdentity struct {
	Digest    cas.Digest
	Locations []string // external data, sorted
	Compiled  bool     // the model has EPContext nodes already, and they are no source
	Reader    int      // readerVersion where Compiled; it is not believed where another said so
	Store     string   // metadata "epcache.store"
	FreeDims  []string // names of free dimensions of the inputs

	Group []cas.Digest `json:"-"` // of the further models of a group
}

// reading is one model that is being identified.
type reading struct {
	ModelFiles
	uid   uint32 // whose files they are
	adopt bool   // a model that is compiled already is to be kept: more is part of its identity
	sums  *sums  // nil: nothing is remembered of external data
	phase func(string)
}

// readerVersion is that of isArtefact. Remembered identities of earlier versions lack what they did
// not look for.
const readerVersion = 2

// isArtefact tells whether the model is an artefact, and no source. EPContext nodes that only wrap
// a model in OpenVINO's own format are a source: that has to be compiled each time it is loaded,
// too.
func isArtefact(m *epmodel.Model) bool { return len(m.Contexts) > 0 && !m.WrapsIR() }

// identify gives the identity of the request's model, from the memo where every file is unchanged, else by
// reading and hashing every byte. The second result says whether the files' times may be believed at all.
func (c *Cache) identify(ctx context.Context, r *reading) (modelIdentity, error) {
	graphKey, believable := memo.FileKey(r.uid, r.Graph)
	if r.adopt {
		graphKey = memo.ID(digestOf(append([]byte("adopt"), graphKey[:]...)))
	}
	if believable {
		if id, ok, err := c.remembered(r, graphKey); ok || err != nil {
			return id, err
		}
	}
	r.phase("reading")
	return c.read(ctx, r, graphKey, believable)
}

// remembered gives the identity from the memo, if it is there.
func (c *Cache) remembered(r *reading, graphKey memo.ID) (id modelIdentity, ok bool, err error) {
	id, ok = c.memo.load(graphKey, "graph")
	if !ok {
		return modelIdentity{}, false, nil
	}
	if missing := r.missing(id.Locations); len(missing) > 0 {
		return modelIdentity{}, false, &NeedFilesError{Locations: missing}
	}
	if len(id.Locations) == 0 {
		return id, true, nil
	}
	key, ok := r.modelKey(graphKey, id.Locations)
	if ok {
		id, ok = c.memo.load(key, "model")
	}
	return id, ok, nil
}

// read hashes the model and remembers its identity if nothing moved meanwhile.
func (c *Cache) read(ctx context.Context, r *reading, graphKey memo.ID, believable bool) (modelIdentity, error) {
	src, err := epmodel.FileSource(r.Graph)
	if err != nil {
		return modelIdentity{}, apierr.New(apierr.BadModel, err, "model %q cannot be read", r.Name)
	}
	before, err := witness.Watch(each(r.files()), c.now(), believable)
	if err != nil {
		return modelIdentity{}, apierr.New(apierr.BadModel, err, "model %q cannot be read", r.Name)
	}
	if before.Believed() { // else nothing will be remembered
		end, err := c.memo.reading.Lock(ctx, graphKey)
		if err != nil {
			return modelIdentity{}, contextError(ctx, r.Name)
		}
		defer end()
		if id, ok, err := c.remembered(r, graphKey); ok || err != nil {
			return id, err // by who had the turn before
		}
	}
	m, err := epmodel.Read(ctx, r.Name, src)
	if err != nil {
		return modelIdentity{}, modelError(r.Name, err)
	}
	id := modelIdentity{
		Locations: m.Locations(), Compiled: isArtefact(m), Store: m.Metadata["epcache.store"],
		FreeDims: freeDimensions(m),
	}
	if id.Compiled {
		id.Reader = readerVersion
		// Passed through, never compiled: what its sidecars hold does not matter here, unless they are to
		// be kept.
		m.Initializers, id.Locations = nil, nil
		// Where a name is bad it cannot be adopted, which is told then.
		if files, err := m.ArtefactFiles(); r.adopt && err == nil {
			m.Whole, id.Locations = files, files
		}
	}
	if len(id.Locations) > 0 {
		if missing := r.missing(id.Locations); len(missing) > 0 {
			if before.Believed() && before.Unchanged() == nil {
				c.memo.save(graphKey, "graph", id) // without a digest: only "model" records carry one
			}
			return modelIdentity{}, &NeedFilesError{Locations: missing}
		}
	}
	// Taken before the bytes are hashed: a key of what came after would be that of other bytes.
	modelKey, keyed := r.modelKey(graphKey, id.Locations)
	sum, err := epmodel.Digest(ctx, m, src, r.open, r.sums.of)
	if err != nil {
		return modelIdentity{}, modelError(r.Name, err)
	}
	id.Digest = cas.Digest(sum)
	if err := before.Unchanged(); err != nil {
		return modelIdentity{}, r.changed(err)
	}
	if before.Believed() {
		c.memo.save(graphKey, "graph", id)
		if keyed && len(id.Locations) > 0 {
			c.memo.save(modelKey, "model", id)
		}
	}
	return id, nil
}

// changed is the error for a model that has other bytes than those that were hashed.
func (f ModelFiles) changed(err error) error {
	return apierr.New(apierr.BadModel, err, "model %q changed while being read", f.Name).
		WithHint("wait until whatever writes it is done, and ask again")
}

func sumOf(ctx context.Context, r io.ReaderAt, off, n int64) ([32]byte, error) {
	d, err := cas.Sum(ctx, r, off, n)
	return [32]byte(d), err
}

// modelError turns what epmodel says into a class: what the reader found in the bytes is the model's fault.
func modelError(model string, err error) error {
	var format *epmodel.FormatError
	switch {
	case errors.As(err, &format):
		said := *format
		if said.File == model {
			said.File = "" // which the error begins with
		}
		e := apierr.New(apierr.BadModel, &said, "model %q", model).WithFact("file", format.File).
			WithFact("field", format.Field).WithFact("offset", fmt.Sprint(format.Offset))
		e.Err = err
		return e
	case errors.Is(err, context.Canceled):
		return apierr.New(apierr.Cancelled, err, "model %q", model)
	case errors.Is(err, context.DeadlineExceeded):
		return apierr.New(apierr.Deadline, err, "model %q", model)
	}
	return apierr.New(apierr.BadModel, err, "model %q", model)
}

// missing lists the locations for which no file was presented.
func (f ModelFiles) missing(locations []string) []string {
	var out []string
	for _, l := range locations {
		if f.External[l] == nil {
			out = append(out, l)
		}
	}
	return out
}

func (r *reading) open(location string) (epmodel.Source, error) {
	f := r.External[location]
	if f == nil {
		return nil, fmt.Errorf("external data %q: %w", location, fs.ErrNotExist)
	}
	return r.sums.source(f)
}

// files lists every file of the model in a fixed order.
func (f ModelFiles) files() []*os.File {
	out := []*os.File{f.Graph}
	for _, l := range sortedKeys(f.External) {
		out = append(out, f.External[l])
	}
	return out
}

// files lists every file of the models in a fixed order.
func (r *Request) files() (out []*os.File) {
	for i := range r.models() {
		out = append(out, r.model(i).files()...)
	}
	return out
}

// descriptors are the files of the models, each once.
func (r *Request) descriptors() []*os.File { return each(r.files()) }

// each lists files once: one descriptor may stand for several of them.
func each(files []*os.File) []*os.File {
	var out []*os.File
	seen := make(map[*os.File]bool)
	for _, f := range files {
		if !seen[f] {
			seen[f] = true
			out = append(out, f)
		}
	}
	return out
}

// freeDimensions names the dimensions of the inputs that the model leaves open.
func freeDimensions(m *epmodel.Model) []string {
	seen := make(map[string]int64)
	for _, in := range m.Inputs {
		for _, d := range in.Shape {
			if d.Param != "" {
				seen[d.Param] = 0
			}
		}
	}
	return sortedKeys(seen)
}

// sums hashes ranges of files of several models, each once: the members of a group often have their weights in one file.
// The zero value and nil remember nothing. One goroutine uses it.
type sums struct {
	now   func() time.Time // nil: every file's stamp is believed, for the files are the cache's own
	known map[rangeOf][32]byte
}

type rangeOf struct {
	file   cas.Stamp
	off, n int64
}

// stamped is a source whose file is known.
type stamped struct {
	epmodel.Source
	stamp cas.Stamp
}

// source opens a file for of. One that was changed a moment ago is not remembered: its times do not tell enough.
func (s *sums) source(f *os.File) (epmodel.Source, error) {
	src, err := epmodel.FileSource(f)
	if err != nil || s == nil {
		return src, err
	}
	stamp, err := cas.StampOf(f)
	if err != nil {
		return nil, err
	}
	if s.now != nil {
		if !witness.LeftAlone(s.now(), stamp) {
			return src, nil
		}
	}
	return stamped{src, stamp}, nil
}

// of is an epmodel.Sum.
func (s *sums) of(ctx context.Context, r io.ReaderAt, off, n int64) ([32]byte, error) {
	file, ok := r.(stamped)
	if s == nil || !ok {
		return sumOf(ctx, r, off, n)
	}
	key := rangeOf{file.stamp, off, n}
	if d, ok := s.known[key]; ok {
		return d, nil
	}
	d, err := sumOf(ctx, file.Source, off, n)
	if err == nil {
		if s.known == nil {
			s.known = make(map[rangeOf][32]byte)
		}
		s.known[key] = d
	}
	return d, err
}
