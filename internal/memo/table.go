// Package memo remembers what was found out: in bounded tables in memory, and in a book that
// outlives the process. Facts about files are kept under the stamps of the files, so that a changed
// file has none.
//
// Tables are safe for concurrent use.
package memo

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"sync"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/filestamp"
)

// Table keeps a bounded number of things in memory. Past the bound all are forgotten, and found out
// again as they are needed. The zero value is ready for use.
type Table[K comparable, V any] struct {
	mu    sync.Mutex
	known map[K]V // guarded by mu
}

// Load returns the value of the key.
func (m *Table[K, V]) Load(key K) (value V, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	value, ok = m.known[key]
	return value, ok
}

// Save keeps a value, one of at most so many.
func (m *Table[K, V]) Save(key K, value V, most int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known == nil || len(m.known) >= most {
		m.known = make(map[K]V)
	}
	m.known[key] = value
}

// Fact is what was found out once.
type Fact struct {
	Value any
	Until time.Time // zero: for good
}

// ValueAt returns the value, nil if it does not hold any more.
func (f Fact) ValueAt(at time.Time) any {
	if !f.Until.IsZero() && !at.Before(f.Until) {
		return nil
	}
	return f.Value
}

// GenerationKey is a key of what was found out under a generation of the settings, for that alone.
type GenerationKey[K comparable] struct {
	Generation uint64
	Key        K
}

// Book keeps what is remembered over restarts. *index.Memos does.
type Book interface {
	Get(key []byte) ([]byte, bool)
	Save(key, value []byte) error
}

// Recall returns what Save kept under the key.
func Recall[T any](book Book, key string) (v T, ok bool) {
	raw, ok := book.Get([]byte(key))
	if !ok || json.Unmarshal(raw, &v) != nil {
		return *new(T), false
	}
	return v, true
}

// Save keeps a value under the key.
func Save(book Book, key string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return book.Save([]byte(key), raw)
}

// ID is the digest of everything that must be unchanged for a remembered fact about files to hold:
// the user that showed them, the file systems, and the stamps of all files.
type ID [32]byte

// FileKey returns the key of one file, and whether the times of its file system can be believed.
func FileKey(uid uint32, f *os.File) (ID, bool) {
	fsid, ok := filestamp.FileSystem(int(f.Fd()))
	if !ok {
		return ID{}, false
	}
	s, err := cas.StampFD(int(f.Fd()))
	if err != nil {
		return ID{}, false
	}
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, 96), uint64(uid))
	return blake3.Sum256(AppendStamp(append(b, fsid[:]...), s)), true
}

// AppendStamp appends a file's stamp to what is hashed.
func AppendStamp(b []byte, s cas.Stamp) []byte {
	for _, v := range []uint64{s.Dev, s.Ino, uint64(s.Size), uint64(s.Mtime), uint64(s.Ctime)} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// AppendText appends a text to what is hashed, behind its length.
func AppendText(b []byte, text string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(text))), text...)
}
