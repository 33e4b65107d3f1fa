package cache

import (
	"encoding/binary"
	"encoding/json"
	"os"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/keyed"
	"github.com/epcached/epcached/internal/witness"
)

// memoID is the digest of everything that must be unchanged for a remembered identity to hold: who asked, the
// file systems, and the stamps of all files.
type memoID [32]byte

// memo remembers identities of models by the stamps of their files: in memory, and in the index behind it.
type memo struct {
	book  memoBook
	known memory[memoEntry, modelIdentity]

	reading keyed.Locks[memoID] // graphs: applications are started by the dozen, and one reading does for all
}

type memoEntry struct {
	id   memoID
	kind string
}

// memoBook is the part of the index that keeps the memo over restarts.
type memoBook interface {
	Memo(key []byte) ([]byte, bool)
	SaveMemo(key, value []byte) error
}

func recallMemo[T any](book memoBook, key string) (v T, ok bool) {
	raw, ok := book.Memo([]byte(key))
	if !ok || json.Unmarshal(raw, &v) != nil {
		return *new(T), false
	}
	return v, true
}

func saveMemo(book memoBook, key string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return book.SaveMemo([]byte(key), raw)
}

const memoEntries = 1 << 16

func newMemo(book memoBook) *memo { return &memo{book: book} }

func (m *memo) load(key memoID, kind string) (modelIdentity, bool) {
	e := memoEntry{key, kind}
	id, ok := m.known.load(e)
	if ok {
		return id, m.complete(id, kind)
	}
	id, ok = recallMemo[modelIdentity](m.book, kind+":"+string(key[:]))
	if !ok || id.Compiled && id.Reader != readerVersion {
		return modelIdentity{}, false
	}
	m.known.save(e, id, memoEntries)
	return id, m.complete(id, kind)
}

// complete: a "graph" record may lack the digest when it was made before the external data had come; it is then
// good for the list of locations only.
func (m *memo) complete(id modelIdentity, kind string) bool {
	return !id.Digest.IsZero() || (kind == "graph" && len(id.Locations) > 0)
}

func (m *memo) save(key memoID, kind string, id modelIdentity) {
	m.known.save(memoEntry{key, kind}, id, memoEntries)
	// A memo that cannot be saved costs another hashing later, nothing else.
	_ = saveMemo(m.book, kind+":"+string(key[:]), id)
}

// memoKey gives the key of one file, and whether its times may be believed at all.
func memoKey(uid uint32, f *os.File) (memoID, bool) {
	fsid, ok := witness.Believable(f)
	if !ok {
		return memoID{}, false
	}
	s, err := cas.StampOf(f)
	if err != nil {
		return memoID{}, false
	}
	b := appendInt(make([]byte, 0, 96), uint64(uid))
	return memoID(digestOf(appendStamp(append(b, fsid[:]...), s))), true
}

// modelKey is the key of a graph with its external data: false when one of the files cannot be believed.
func (c *Cache) modelKey(r *Request, graph memoID, locations []string) (memoID, bool) {
	b := append(make([]byte, 0, 64+64*len(locations)), graph[:]...)
	for _, l := range locations {
		k, ok := memoKey(r.Peer.UID, r.External[l])
		if !ok {
			return memoID{}, false
		}
		b = append(appendInt(b, uint64(len(l))), l...)
		b = append(b, k[:]...)
	}
	return memoID(digestOf(b)), true
}

func appendStamp(b []byte, s cas.Stamp) []byte {
	for _, v := range []uint64{s.Dev, s.Ino, uint64(s.Size), uint64(s.Mtime), uint64(s.Ctime)} {
		b = appendInt(b, v)
	}
	return b
}

func appendInt(b []byte, v uint64) []byte {
	return binary.LittleEndian.AppendUint64(b, v)
}

func digestOf(b []byte) [32]byte { return blake3.Sum256(b) }
