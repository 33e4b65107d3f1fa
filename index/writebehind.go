package index

import (
	"bytes"
	"cmp"
	"errors"
	"maps"
	"slices"
	"sync"

	"github.com/epcached/epcached/internal/memo"
	"go.etcd.io/bbolt"
)

// writeBehind holds the rows that may be lost: memo, stamps, views, use, counters, failures,
// sketches, shares. Writes stay in memory until the next flush, so that none of them costs a
// transaction, and reads are answered from memory if possible.
type writeBehind struct {
	db    *database
	cache *memo.CostCache[rowKey, []byte]
	wake  func()        // requests a flush
	full  chan struct{} // requests an early flush
	// beforeFlush functions are called first by each flush, to put rows that are kept as values
	// until then.
	beforeFlush []func()

	flushing sync.Mutex // one flush at a time; taken before mu

	mu      sync.Mutex        // guards pending; taken before the cache's
	pending map[rowKey][]byte // unwritten values; nil: to be removed
}

type rowKey struct {
	bucket string
	key    string
}

const (
	rowCacheBytes = 4 << 20
	rowOverhead   = 160      // memory for a row besides key and value
	maxPending    = 8 << 10  // rows; half of it requests a flush
	flushPage     = 1 << 9   // rows a transaction
	maxCachedRow  = 64 << 10 // key and value
)

func newWriteBehind(db *database, wake func()) *writeBehind {
	return &writeBehind{db: db, wake: wake, cache: memo.NewCostCache[rowKey, []byte](rowCacheBytes),
		full: make(chan struct{}, 1), pending: make(map[rowKey][]byte)}
}

// get returns a value, which must not be changed.
func (s *writeBehind) get(bucket, key []byte) ([]byte, bool) {
	k := rowKey{string(bucket), string(key)}
	s.mu.Lock()
	v, ok := s.pending[k]
	s.mu.Unlock()
	if ok {
		return v, v != nil
	}
	v, drops, ok := s.cache.Get(k)
	if ok {
		return v, true
	}
	v, err := read(s.db, func(tx *bbolt.Tx) ([]byte, error) {
		v, err := get(tx, bucket, key)
		return slices.Clone(v), err
	})
	if err != nil || v == nil {
		return nil, false // an unreadable row counts as lost
	}
	s.cache.Fill(drops, k, v, rowOverhead+len(key)+len(v))
	return v, true
}

var errRowTooLarge = errors.New("row is too large")

func (s *writeBehind) put(bucket, key, value []byte) error {
	if len(key) == 0 || len(key)+len(value) > maxCachedRow {
		return errRowTooLarge
	}
	value = append([]byte{}, value...) // never nil
	s.enqueue(rowKey{string(bucket), string(key)}, value)
	return nil
}

// putNow is put, durably when it returns. It excludes flushes, and writes a pending removal first,
// because a value from before a removal must not be written after it.
func (s *writeBehind) putNow(bucket, key, value []byte) error {
	s.flushing.Lock()
	defer s.flushing.Unlock()
	if err := s.put(bucket, key, value); err != nil {
		return err
	}
	return s.db.write(func(tx *bbolt.Tx) error {
		s.mu.Lock()
		newest, ok := s.pending[rowKey{string(bucket), string(key)}]
		s.mu.Unlock()
		if ok && newest == nil {
			return drop(tx, bucket, key)
		} else if ok {
			return put(tx, bucket, key, newest)
		}
		return put(tx, bucket, key, value) // it was dropped from pending because that is full
	})
}

func (s *writeBehind) drop(bucket, key []byte) {
	s.enqueue(rowKey{string(bucket), string(key)}, nil)
}

// enqueue changes pending and the cache in one step, because otherwise the value of a row that is
// dropped at the same time could stay in the cache.
func (s *writeBehind) enqueue(k rowKey, value []byte) {
	s.mu.Lock()
	if _, there := s.pending[k]; !there && len(s.pending) >= maxPending {
		// The disk is full, so another value is dropped. Removals are kept, because an outdated row
		// could be wrong.
		for other, v := range s.pending {
			if v != nil {
				delete(s.pending, other)
				break
			}
		}
	}
	s.pending[k] = value
	if value == nil {
		s.cache.Drop(k)
	} else {
		s.cache.Set(k, value, rowOverhead+len(k.key)+len(value))
	}
	half := len(s.pending) >= maxPending/2
	s.mu.Unlock()
	s.wake()
	if half {
		select {
		case s.full <- struct{}{}:
		default: // requested already
		}
	}
}

// flush writes the pending rows, one page in each transaction. Rows that cannot be written stay
// pending.
func (s *writeBehind) flush() error {
	s.flushing.Lock()
	defer s.flushing.Unlock()
	for _, put := range s.beforeFlush {
		put()
	}
	s.mu.Lock()
	taken := maps.Clone(s.pending)
	s.mu.Unlock()
	for part := range slices.Chunk(slices.Collect(maps.Keys(taken)), flushPage) {
		err := s.db.write(func(tx *bbolt.Tx) (err error) {
			for _, k := range part {
				if bucket, key, v := []byte(k.bucket), []byte(k.key), taken[k]; v == nil {
					err = cmp.Or(err, drop(tx, bucket, key))
				} else {
					err = cmp.Or(err, put(tx, bucket, key, v))
				}
			}
			return err
		})
		if err != nil {
			return err
		}
		s.mu.Lock()
		for _, k := range part {
			now, v := s.pending[k], taken[k]
			// otherwise it has changed in the meantime
			if bytes.Equal(now, v) && (now == nil) == (v == nil) {
				delete(s.pending, k)
			}
		}
		s.mu.Unlock()
	}
	return nil
}

// pendingIn returns the rows of a bucket that are pending; nil for one that is to be removed.
func (s *writeBehind) pendingIn(bucket []byte) map[string][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows := make(map[string][]byte)
	for k, v := range s.pending {
		if k.bucket == string(bucket) {
			rows[k.key] = v
		}
	}
	return rows
}
