// Package memo remembers facts: in bounded tables in memory, and in a persistent Book. Facts about
// files are stored under the stamps of the files, so that they are not found after a change.
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

// Table keeps a bounded number of values in memory. Beyond the bound it drops all of them. The zero
// value is ready for use.
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

// Save stores a value in a table of at most most values.
func (m *Table[K, V]) Save(key K, value V, most int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known == nil || len(m.known) >= most {
		m.known = make(map[K]V)
	}
	m.known[key] = value
}

// Fact is a remembered fact.
type Fact struct {
	Value any
	Until time.Time // zero: permanent
}

// ValueAt returns the value, nil if it has expired.
func (f Fact) ValueAt(at time.Time) any {
	if !f.Until.IsZero() && !at.Before(f.Until) {
		return nil
	}
	return f.Value
}

// GenerationKey is a key of facts that are valid for one generation of the settings.
type GenerationKey[K comparable] struct {
	Generation uint64
	Key        K
}

// Book stores memos over restarts. *index.Memos implements it.
type Book interface {
	Get(key []byte) ([]byte, bool)
	Save(key, value []byte) error
}

// Recall returns the value that Save stored under the key.
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

// ID is the digest of everything that must be unchanged for a remembered fact about files to be
// valid: the user that showed them, the file systems, and the stamps of all files.
type ID [32]byte

// FileKey returns the key of one file, and whether the times of its file system are reliable.
func FileKey(uid uint32, f *os.File) (ID, bool) {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, 96), uint64(uid))
	b, _, ok := appendFile(b, int(f.Fd()))
	if !ok {
		return ID{}, false
	}
	return blake3.Sum256(b), true
}

// AppendFile appends what identifies the contents of an open file, and reports whether it does:
// the times of the file system must be reliable, and those of the file not too close to now.
func AppendFile(b []byte, fd int, now time.Time) ([]byte, bool) {
	b, s, ok := appendFile(b, fd)
	return b, ok && filestamp.LeftAlone(now, s)
}

func appendFile(b []byte, fd int) ([]byte, cas.Stamp, bool) {
	fsid, ok := filestamp.FileSystem(fd)
	if !ok {
		return b, cas.Stamp{}, false
	}
	s, err := cas.StampFD(fd)
	return AppendStamp(append(b, fsid[:]...), s), s, err == nil
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
