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
// transaction, and reads are answered from memory as far as that goes.
type writeBehind struct {
	db    *database
	cache *memo.CostCache[rowKey, []byte]
	wake  func()        // there is something to flush
	full  chan struct{} // asks for a flush before its time
	// called by each flush first: they put the rows that are values until then
	beforeFlush []func()

	flushing sync.Mutex // one flush at a time; taken before mu

	mu      sync.Mutex        // guards pending; taken before the cache's
	pending map[rowKey][]byte // not written yet; nil: to be removed
}

type rowKey struct {
	bucket string
	key    string
}

const (
	rowCacheBytes = 4 << 20
	rowOverhead   = 160      // memory for a row besides key and value
	maxPending    = 8 << 10  // rows; half of it asks for a flush
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
		return nil, false // what cannot be read is as good as lost, which it may be
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

// putNow is put, durably when it returns. No flush runs meanwhile, and a removal that comes before
// the transaction is written, because a value from before a removal must not be written after it.
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
		return put(tx, bucket, key, value) // it was taken out of pending because that is full
	})
}

func (s *writeBehind) drop(bucket, key []byte) {
	s.enqueue(rowKey{string(bucket), string(key)}, nil)
}

// enqueue changes what is pending and the cache in one step: else the value of a row that was
// dropped at the same time could stay in the cache.
func (s *writeBehind) enqueue(k rowKey, value []byte) {
	s.mu.Lock()
	if _, there := s.pending[k]; !there && len(s.pending) >= maxPending {
		// Nothing can be written, on a full disk: any other value is lost. Removals are kept,
		// because a row that should be gone could be wrong.
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
		default: // asked for already
		}
	}
}

// flush writes what is pending, a page a transaction. Rows that cannot be written stay pending.
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
			if bytes.Equal(now, v) && (now == nil) == (v == nil) { // else it has changed meanwhile
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
