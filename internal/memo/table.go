// Package memo remembers what was found out: in bounded tables in memory, and in a book that outlives
// the process. Facts about files are kept under the stamps of the files, so that a changed file has none.
//
// Tables are safe for concurrent use.
package memo

import (
	"sync"
	"time"
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

// Now returns the value, nil if it does not hold any more.
func (f Fact) Now(at time.Time) any {
	if !f.Until.IsZero() && !at.Before(f.Until) {
		return nil
	}
	return f.Value
}

// Under is a key of what was found out under a generation of the settings, and counts for no other.
type Under[K comparable] struct {
	Generation uint64
	Key        K
}
