package identity

import (
	"context"
	"errors"
	"slices"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/filestamp"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/memo"
)

// Model has the facts that were read from a model's files. They are valid while the files' stamps
// are unchanged.
type Model struct {
	Digest    cas.Digest
	Locations []string // external data, sorted
	Compiled  bool     // the model has EPContext nodes, so it is an artefact
	Reader    int      // readerVersion if Compiled; with another version the files are read again
	Store     string   // metadata "epcache.store"
	FreeDims  []string // names of free dimensions of the inputs

	Group []cas.Digest `json:"-"` // of the models of a group after the first one
}

// readerVersion is the version of isArtefact. Identities from an earlier version are not used,
// because that missed some artefacts.
const readerVersion = 2

// isArtefact reports whether the model is an artefact. EPContext nodes that only wrap
// a model in OpenVINO's own format are a source, because each load has to compile that.
func isArtefact(m *epmodel.Model) bool { return len(m.Contexts) > 0 && !m.WrapsIR() }

// Models identifies models, and remembers them by the stamps of their files, in memory and in a
// persistent memo.Book. It is safe for concurrent use.
type Models struct {
	book  memo.Book
	now   func() time.Time
	known *memo.CostCache[memoEntry, Model] // by the bytes that they take

	// reading lets one request read a graph while others wait for its result, because many
	// applications may start at the same time.
	reading keyed.Locks[memo.ID]
}

type memoEntry struct {
	id   memo.ID
	kind string
}

// Bounds of the memo in memory, in bytes: of all models, and of the names in one.
const (
	maxKnown = 64 << 20
	maxNames = 256 << 10
)

// NewModels returns Models that store their memos in the book.
func NewModels(book memo.Book, now func() time.Time) *Models {
	return &Models{book: book, now: now,
		known: memo.NewCostCache[memoEntry, Model](maxKnown)}
}

// IdentifyRequest are the models of one request.
type IdentifyRequest struct {
	UID    uint32 // the user that owns the files
	Models []Files
	// Adopt: an artefact will be stored, so its sidecar files are part of its identity.
	Adopt bool
	Phase func(string) // called before files are read
}

type identification struct {
	Files
	request *IdentifyRequest
	sums    *Sums // nil: sums of external data are not remembered
}

// Identify returns the identity of the models, from the memo if every file is unchanged, otherwise
// by reading and hashing every byte. A *NeedFilesError says which external data is missing.
func (ms *Models) Identify(ctx context.Context, request *IdentifyRequest) (Model, error) {
	if len(request.Models) == 1 {
		return ms.identify(ctx, &identification{Files: request.Models[0], request: request})
	}
	var all Model
	sums, need, seen := &Sums{now: ms.now}, &NeedFilesError{}, make(map[cas.Digest]string)
	for i, one := range request.Models {
		m, err := ms.identify(ctx, &identification{one, request, sums})
		var missing *NeedFilesError
		switch {
		case errors.As(err, &missing):
			for _, l := range missing.Locations {
				need.Locations, need.Members = append(need.Locations, l), append(need.Members, i)
			}
			continue
		case err != nil:
			return Model{}, err
		case m.Compiled:
			return Model{}, apierr.New(apierr.BadRequest, nil, "model %q is compiled already: "+
				"it cannot be compiled in a group", one.Name)
		case seen[m.Digest] != "":
			return Model{}, apierr.New(apierr.BadRequest, nil,
				"models %q and %q of the group are the same", seen[m.Digest], one.Name)
		}
		seen[m.Digest] = one.Name
		if i == 0 {
			all = m
			continue
		}
		all.Group = append(all.Group, m.Digest)
		all.Store = narrowerScope(all.Store, m.Store)
		// copied, because the memo shares its slices
		all.FreeDims = slices.Concat(all.FreeDims, m.FreeDims)
	}
	if len(need.Locations) > 0 {
		return Model{}, need
	}
	return all, nil
}

// narrowerScope returns the narrower of two models' scopes: the narrowest one holds for the group.
func narrowerScope(a, b string) string {
	for _, wish := range []string{"none", "user"} {
		if a == wish || b == wish {
			return wish
		}
	}
	return a
}

// StampIfKnown returns the stamp of the user's graph, if the memo has the digest under it.
func (ms *Models) StampIfKnown(uid uint32, f Files, digest cas.Digest) (cas.Stamp, bool) {
	stamp, err := cas.StampOf(f.Graph)
	if err != nil {
		return cas.Stamp{}, false
	}
	// A second stamp: from here on the first one is compared.
	key, ok := memo.FileKey(uid, f.Graph)
	if !ok {
		return cas.Stamp{}, false
	}
	m, ok, err := ms.remembered(&identification{Files: f, request: &IdentifyRequest{UID: uid}}, key)
	return stamp, ok && err == nil && m.Digest == digest
}

func (ms *Models) identify(ctx context.Context, r *identification) (Model, error) {
	graphKey, believable := memo.FileKey(r.request.UID, r.Graph)
	if r.request.Adopt {
		graphKey = blake3.Sum256(append([]byte("adopt"), graphKey[:]...))
	}
	if believable {
		if m, ok, err := ms.remembered(r, graphKey); ok || err != nil {
			return m, err
		}
	}
	r.request.Phase("reading")
	return ms.read(ctx, r, graphKey, believable)
}

func (ms *Models) remembered(r *identification, graphKey memo.ID) (m Model, ok bool, err error) {
	m, ok = ms.load(graphKey, "graph")
	if !ok {
		return Model{}, false, nil
	}
	if missing := r.missing(m.Locations); len(missing) > 0 {
		return Model{}, false, &NeedFilesError{Locations: missing}
	}
	if len(m.Locations) == 0 {
		return m, true, nil
	}
	key, ok := r.modelKey(graphKey, m.Locations)
	if ok {
		m, ok = ms.load(key, "model")
	}
	return m, ok, nil
}

func (ms *Models) read(ctx context.Context, r *identification, graphKey memo.ID,
	believable bool) (Model, error) {
	src, err := epmodel.FileSource(r.Graph)
	if err != nil {
		return Model{}, apierr.New(apierr.BadModel, err, "model %q cannot be read", r.Name)
	}
	before, err := filestamp.Watch(DistinctFiles(r.Files), ms.now(), believable)
	if err != nil {
		return Model{}, apierr.New(apierr.BadModel, err, "model %q cannot be read", r.Name)
	}
	if before.Reliable() { // otherwise the result is not remembered
		end, err := ms.reading.Lock(ctx, graphKey)
		if err != nil {
			return Model{}, r.ModelError(err)
		}
		defer end()
		if m, ok, err := ms.remembered(r, graphKey); ok || err != nil {
			return m, err // read by the request that held the lock before
		}
	}
	read, err := epmodel.Read(ctx, r.Name, src)
	if err != nil {
		return Model{}, r.ModelError(err)
	}
	m := Model{Locations: read.Locations(), Compiled: isArtefact(read),
		Store: read.Metadata["epcache.store"], FreeDims: FreeDimensions(read)}
	if m.Compiled {
		m.Reader = readerVersion
		// An artefact is passed through: its sidecar files are read only if it is adopted.
		read.External, m.Locations = nil, nil
		// A model with a bad name cannot be adopted; the adoption reports it.
		if files, err := read.ArtefactFiles(); r.request.Adopt && err == nil {
			read.Whole, m.Locations = files, files
		}
	}
	if missing := r.missing(m.Locations); len(missing) > 0 {
		if before.Reliable() && before.Unchanged() == nil {
			ms.save(graphKey, "graph", m) // without a digest: only "model" records carry one
		}
		return Model{}, &NeedFilesError{Locations: missing}
	}
	// Drops the rest of the graph, because hashing may take long and does not need it.
	read = &epmodel.Model{Name: read.Name, Size: read.Size, External: read.External,
		Whole: read.Whole}
	// The stamps in the key are taken before the bytes are hashed, because later ones might belong
	// to other bytes.
	modelKey, keyed := r.modelKey(graphKey, m.Locations)
	sum, err := epmodel.Digest(ctx, read, src, r.open(r.sums), r.sums.sumRange)
	if err != nil {
		return Model{}, r.ModelError(err)
	}
	m.Digest = cas.Digest(sum)
	if err := before.Unchanged(); err != nil {
		return Model{}, r.ChangedError(err)
	}
	if before.Reliable() {
		ms.save(graphKey, "graph", m)
		if keyed && len(m.Locations) > 0 {
			ms.save(modelKey, "model", m)
		}
	}
	return m, nil
}

func (ms *Models) load(key memo.ID, kind string) (Model, bool) {
	e := memoEntry{key, kind}
	m, _, ok := ms.known.Get(e)
	if ok {
		return m, m.complete(kind)
	}
	m, ok = memo.Recall[Model](ms.book, kind+":"+string(key[:]))
	if !ok || m.Compiled && m.Reader != readerVersion {
		return Model{}, false
	}
	ms.remember(e, m)
	return m, m.complete(kind)
}

// complete reports whether a memo has what its kind promises. A "graph" memo of a model with
// external data has only the locations, and no digest.
func (m *Model) complete(kind string) bool {
	return !m.Digest.IsZero() || kind == "graph" && len(m.Locations) > 0
}

// remember remembers a model in memory, unless its names take too much memory; such a model is read
// each time.
func (ms *Models) remember(e memoEntry, m Model) {
	const fixed = 512 // and the map's entry
	size := fixed + len(m.Store)
	for _, name := range slices.Concat(m.Locations, m.FreeDims) {
		size += 16 + len(name)
	}
	if size <= maxNames {
		ms.known.Set(e, m, size)
	}
}

func (ms *Models) save(key memo.ID, kind string, m Model) {
	ms.remember(memoEntry{key, kind}, m)
	// Best effort: without the memo the model is hashed again.
	_ = memo.Save(ms.book, kind+":"+string(key[:]), m)
}

// modelKey returns the memo's key for a graph with its external data, and false if the stamp of one
// of the files cannot be trusted.
func (r *identification) modelKey(graph memo.ID, locations []string) (memo.ID, bool) {
	b := append(make([]byte, 0, 64+64*len(locations)), graph[:]...)
	for _, l := range locations {
		k, ok := memo.FileKey(r.request.UID, r.External[l])
		if !ok {
			return memo.ID{}, false
		}
		b = memo.AppendText(b, l)
		b = append(b, k[:]...)
	}
	return blake3.Sum256(b), true
}
