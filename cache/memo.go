package cache

import (
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/memo"
)

// modelMemo remembers identities of models by the stamps of their files: in memory, and in the index behind it.
type modelMemo struct {
	book  memo.Book
	known memo.Table[memoEntry, modelIdentity]

	reading keyed.Locks[memo.ID] // graphs: applications are started by the dozen, and one reading does for all
}

type memoEntry struct {
	id   memo.ID
	kind string
}

const memoEntries = 1 << 16

func newMemo(book memo.Book) *modelMemo { return &modelMemo{book: book} }

func (m *modelMemo) load(key memo.ID, kind string) (modelIdentity, bool) {
	e := memoEntry{key, kind}
	id, ok := m.known.Load(e)
	if ok {
		return id, m.complete(id, kind)
	}
	id, ok = memo.Recall[modelIdentity](m.book, kind+":"+string(key[:]))
	if !ok || id.Compiled && id.Reader != readerVersion {
		return modelIdentity{}, false
	}
	m.known.Save(e, id, memoEntries)
	return id, m.complete(id, kind)
}

// complete: a "graph" record may lack the digest when it was made before the external data had come; it is then
// good for the list of locations only.
func (m *modelMemo) complete(id modelIdentity, kind string) bool {
	return !id.Digest.IsZero() || (kind == "graph" && len(id.Locations) > 0)
}

func (m *modelMemo) save(key memo.ID, kind string, id modelIdentity) {
	m.known.Save(memoEntry{key, kind}, id, memoEntries)
	// A memo that cannot be saved costs another hashing later, nothing else.
	_ = memo.Save(m.book, kind+":"+string(key[:]), id)
}

// modelKey is the key of a graph with its external data: false when one of the files cannot be believed.
func (r *reading) modelKey(graph memo.ID, locations []string) (memo.ID, bool) {
	b := append(make([]byte, 0, 64+64*len(locations)), graph[:]...)
	for _, l := range locations {
		k, ok := memo.FileKey(r.uid, r.External[l])
		if !ok {
			return memo.ID{}, false
		}
		b = memo.AppendText(b, l)
		b = append(b, k[:]...)
	}
	return memo.ID(digestOf(b)), true
}

func digestOf(b []byte) [32]byte { return blake3.Sum256(b) }
