package cache

import (
	"sync"
	"time"
)

// memory keeps a bounded number of things in memory. Past the bound all are forgotten, and found out
// again as they are needed. The zero value is ready for use.
type memory[K comparable, V any] struct {
	mu    sync.Mutex
	known map[K]V // guarded by mu
}

func (m *memory[K, V]) load(key K) (value V, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	value, ok = m.known[key]
	return value, ok
}

// save keeps a value, one of at most so many.
func (m *memory[K, V]) save(key K, value V, most int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known == nil || len(m.known) >= most {
		m.known = make(map[K]V)
	}
	m.known[key] = value
}

// found is what was found out once.
type found struct {
	value any
	until time.Time // zero: for good
}

// now returns the value, nil if it does not hold any more.
func (f found) now(at time.Time) any {
	if !f.until.IsZero() && !at.Before(f.until) {
		return nil
	}
	return f.value
}

// under is a key of what was found out under a generation of the settings, and counts for no other.
type under[K comparable] struct {
	generation uint64
	key        K
}
