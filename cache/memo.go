package cache

import (
	"context"
	"encoding/json"
	"os"
	"sync"

	"github.com/zeebo/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/witness"
)

// memoID is the digest of everything that must be unchanged for a remembered identity to hold: who asked, the
// file systems, and the stamps of all files.
type memoID [32]byte

// memo remembers identities of models by the stamps of their files: in memory, and in the index behind it.
type memo struct {
	book  memoBook
	mu    sync.Mutex
	known map[memoEntry]identity // guarded by mu; emptied when it grows past memoEntries

	reading map[memoID]chan struct{} // graphs that are being read, each closed at the end of that; guarded by mu
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

const memoEntries = 1 << 16

func newMemo(book memoBook) *memo {
	return &memo{book: book, known: make(map[memoEntry]identity), reading: make(map[memoID]chan struct{})}
}

func (m *memo) load(key memoID, kind string) (identity, bool) {
	e := memoEntry{key, kind}
	m.mu.Lock()
	id, ok := m.known[e]
	m.mu.Unlock()
	if ok {
		return id, m.complete(id, kind)
	}
	raw, ok := m.book.Memo(append([]byte(kind+":"), key[:]...))
	if !ok || json.Unmarshal(raw, &id) != nil || id.Compiled && id.Reader != readerVersion {
		return identity{}, false
	}
	m.keep(e, id)
	return id, m.complete(id, kind)
}

// complete: a "graph" record may lack the digest when it was made before the external data had come; it is then
// good for the list of locations only.
func (m *memo) complete(id identity, kind string) bool {
	return !id.Digest.IsZero() || (kind == "graph" && len(id.Locations) > 0)
}

func (m *memo) save(key memoID, kind string, id identity) {
	e := memoEntry{key, kind}
	m.keep(e, id)
	// A memo that cannot be saved costs another hashing later, nothing else.
	_ = m.book.SaveMemo(append([]byte(kind+":"), key[:]...), id.marshal())
}

// turn waits until nobody reads the same graph: applications are started by the dozen, and one reading does for all.
func (m *memo) turn(ctx context.Context, key memoID) (end func(), err error) {
	for {
		m.mu.Lock()
		others := m.reading[key]
		if others == nil {
			mine := make(chan struct{})
			m.reading[key] = mine
			m.mu.Unlock()
			return func() {
				m.mu.Lock()
				defer m.mu.Unlock()
				delete(m.reading, key)
				close(mine)
			}, nil
		}
		m.mu.Unlock()
		select {
		case <-others:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (m *memo) keep(e memoEntry, id identity) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.known) >= memoEntries {
		clear(m.known)
	}
	m.known[e] = id
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
	return append(b, byte(v), byte(v>>8), byte(v>>16), byte(v>>24), byte(v>>32), byte(v>>40), byte(v>>48), byte(v>>56))
}

func digestOf(b []byte) [32]byte { return blake3.Sum256(b) }
