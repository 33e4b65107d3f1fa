package index

import (
	"bytes"
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cas"
)

// maxMemos bounds the memo. A model's memo has a few hundred bytes.
const maxMemos = 1 << 16

// Memos keep small values by their keys. Old memos are dropped for new ones.
type Memos struct {
	table Table
	now   func() time.Time
	saved atomic.Int64 // memos saved since old ones were last dropped
}

// Get returns the value that Save saved under the key, unless it was lost.
func (m *Memos) Get(key []byte) ([]byte, bool) {
	v, ok := m.table.Get(key)
	if !ok || len(v) < 8 {
		return nil, false
	}
	return bytes.Clone(v[8:]), true
}

// Save keeps a value under a key, together at most some 60 KiB. It is written within seconds.
func (m *Memos) Save(key, value []byte) error {
	return m.table.Save(key, m.dated(value))
}

func (m *Memos) dated(value []byte) []byte {
	m.saved.Add(1)
	return append(encodeNumbers(uint64(m.now().Unix())), value...)
}

// SaveNow is Save, durably when it returns. On a full disk it uses the reserve.
func (m *Memos) SaveNow(key, value []byte) error {
	row := m.dated(value)
	return m.table.rows.db.reserve.Use(func() error { return m.table.SaveNow(key, row) })
}

// Drop forgets a memo.
func (m *Memos) Drop(key []byte) { m.table.Drop(key) }

// trim drops memos, oldest first, until at most limit of them are left.
func (m *Memos) trim(limit int) error {
	type memo struct {
		key []byte
		at  int64
	}
	var memos []memo
	err := m.table.rows.db.rows(context.Background(), bucketMemo, func(key, value []byte) error {
		f := fields{b: value}
		memos = append(memos, memo{bytes.Clone(key), f.i64()})
		return nil
	})
	slices.SortFunc(memos, func(a, b memo) int { return cmp.Compare(a.at, b.at) })
	for _, one := range memos[:max(0, len(memos)-limit)] {
		m.Drop(one.key)
	}
	return err
}

// stamps are the rows of a bucket by the digests of blobs.
type stamps struct{ table Table }

func (s stamps) LoadStamp(d cas.Digest) (cas.Stamp, bool) {
	v, _ := s.table.Get(d[:])
	return decodeStamp(v) // false without a row
}

func (s stamps) SaveStamp(d cas.Digest, stamp cas.Stamp) error {
	return s.table.Save(d[:], encodeStamp(stamp))
}

func (s stamps) ForgetStamp(d cas.Digest) error {
	s.table.Drop(d[:])
	return nil
}

// Uses count the hits of builds. None of its methods costs a transaction. A row is encoded once for
// all hits between two flushes.
type Uses struct {
	table  Table
	mu     sync.Mutex // guards the next two fields; never held while a row is read
	latest map[BuildID]Usage
	saves  uint64 // number of times that entries have left latest for the table
}

// clockSlack is how far in the future a last use may be before it counts as a wrong clock.
const clockSlack = 24 * time.Hour

// Add counts hits of a build, the latest at the time at, and the compile time that they saved.
func (us *Uses) Add(id BuildID, at time.Time, hits uint64, savedSeconds float64) {
	u := us.lockedUsage(id)
	defer us.mu.Unlock()
	if at.After(u.Last) || u.Last.Sub(at) > clockSlack {
		u.Last = at
	}
	u.Hits += hits
	u.SavedSeconds += savedSeconds
	us.latest[id] = u
	if len(us.latest) >= flushPage {
		us.saveLocked()
	}
	us.table.rows.wake()
}

func (us *Uses) save() {
	us.mu.Lock()
	defer us.mu.Unlock()
	us.saveLocked()
}

func (us *Uses) saveLocked() {
	for id, u := range us.latest {
		_ = us.table.Save(id[:], encodeUse(u)) // cannot fail: the row is small
	}
	clear(us.latest)
	us.saves++
}

func (us *Uses) forget(id BuildID) {
	us.mu.Lock()
	defer us.mu.Unlock()
	delete(us.latest, id)
	us.table.Drop(id[:])
	us.saves++
}

// LastUse returns when the build was used last and how often; zero if never, or if it was lost.
func (us *Uses) LastUse(id BuildID) (time.Time, uint64) {
	u := us.usageOf(id)
	return u.Last, u.Hits
}

func (us *Uses) usageOf(id BuildID) Usage {
	u := us.lockedUsage(id)
	us.mu.Unlock()
	return u
}

// lockedUsage returns the usage of a build with mu locked. It reads the row before, because a slow
// disk must not delay the hits of other builds.
func (us *Uses) lockedUsage(id BuildID) Usage {
	us.mu.Lock()
	for {
		if u, ok := us.latest[id]; ok {
			return u
		}
		saves := us.saves
		us.mu.Unlock()
		v, _ := us.table.Get(id[:])
		us.mu.Lock()
		if _, ok := us.latest[id]; !ok && us.saves == saves {
			return decodeUse(v)
		}
	}
}

// Counters counts events of the whole store since the database was made.
type Counters struct {
	table   Table
	mu      sync.Mutex // guards the next two fields
	counts  map[string]uint64
	unsaved map[string]bool
}

// Add adds to a counter.
func (cs *Counters) Add(name string, delta uint64) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.counts[name] += delta
	cs.unsaved[name] = true
	cs.table.rows.wake()
}

func (cs *Counters) save() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for name := range cs.unsaved {
		_ = cs.table.Save([]byte(name), encodeNumbers(cs.counts[name])) // cannot fail: it is small
	}
	clear(cs.unsaved)
}

// All returns all counters.
func (cs *Counters) All() map[string]uint64 {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return maps.Clone(cs.counts)
}

func (cs *Counters) load() error {
	rows, err := cs.table.All()
	for name, v := range rows {
		f := fields{b: v}
		cs.counts[name] = f.u64()
	}
	return err
}

// Table is a bucket of rows that may be lost. A key and its value have together at most some 60
// KiB.
type Table struct {
	rows   *writeBehind
	bucket []byte
	most   int // rows that All returns
}

// Get returns a value, which must not be changed.
func (t Table) Get(key []byte) ([]byte, bool) { return t.rows.get(t.bucket, key) }

// Save keeps a value under a key; it is written within seconds.
func (t Table) Save(key, value []byte) error { return t.rows.put(t.bucket, key, value) }

// SaveNow is Save, durably when it returns.
func (t Table) SaveNow(key, value []byte) error {
	return t.rows.putNow(t.bucket, key, value)
}

// Drop removes a row within seconds. After a crash it may exist again.
func (t Table) Drop(key []byte) { t.rows.drop(t.bucket, key) }

// Each calls fn with the rows, in the order of their keys; on a full disk those that cannot be
// written come last. It stops at the first error of fn, which it returns. fn must not keep its
// arguments; no transaction is open while it runs.
func (t Table) Each(ctx context.Context, fn func(key, value []byte) error) error {
	var unwritten map[string][]byte
	if err := t.rows.flush(); cas.IsDiskFull(err) {
		unwritten = t.rows.pendingIn(t.bucket)
	} else if err != nil {
		return err
	}
	err := t.rows.db.rows(ctx, t.bucket, func(key, value []byte) error {
		if newer, ok := unwritten[string(key)]; ok {
			if delete(unwritten, string(key)); newer == nil {
				return nil
			}
			value = newer
		}
		return fn(key, value)
	})
	for key, value := range unwritten {
		if err == nil && value != nil {
			err = fn([]byte(key), value)
		}
	}
	return err
}

// All returns the rows by their keys, at most t.most.
func (t Table) All() (map[string][]byte, error) {
	rows := make(map[string][]byte)
	err := t.Each(context.Background(), func(key, value []byte) error {
		if len(rows) < t.most {
			rows[string(key)] = bytes.Clone(value)
		}
		return nil
	})
	return rows, err
}
