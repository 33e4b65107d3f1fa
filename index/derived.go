package index

import (
	"context"
	"encoding/binary"
	"maps"
	"time"

	"github.com/epcached/epcached/cas"
)

var _ cas.StampBook = (*Index)(nil)

// maxMemos bounds the memo. A model's memo has a few hundred bytes.
const maxMemos = 1 << 16

// Memo returns what SaveMemo saved under the key, unless it was lost.
func (x *Index) Memo(key []byte) ([]byte, bool) {
	v, ok := x.soft.get(bucketMemo, key)
	if !ok || len(v) < 8 {
		return nil, false
	}
	return append([]byte{}, v[8:]...), true
}

// SaveMemo keeps a value under a key, together at most some 60 KiB. It is
// written within seconds; old memos make room for new ones.
func (x *Index) SaveMemo(key, value []byte) error {
	x.memos.Add(1)
	return x.soft.put(bucketMemo, key, append(numbers(uint64(x.now().Unix())), value...))
}

// DropMemo forgets a memo.
func (x *Index) DropMemo(key []byte) { x.soft.drop(bucketMemo, key) }

// LoadStamp, SaveStamp and ForgetStamp remember what package cas has verified.
func (x *Index) LoadStamp(d cas.Digest) (cas.Stamp, bool) {
	v, ok := x.soft.get(bucketStamps, d[:])
	if !ok {
		return cas.Stamp{}, false
	}
	return decodeStamp(v)
}

// SaveStamp keeps the stamp of a verified blob; written within seconds.
func (x *Index) SaveStamp(d cas.Digest, s cas.Stamp) error {
	return x.soft.put(bucketStamps, d[:], encodeStamp(s))
}

// ForgetStamp drops the stamp of a blob.
func (x *Index) ForgetStamp(d cas.Digest) error {
	x.soft.drop(bucketStamps, d[:])
	return nil
}

// View returns the path of the build's view, unless it was lost: then the
// view is made again, under a new id.
func (x *Index) View(id BuildID) (string, bool) {
	v, ok := x.soft.get(bucketViews, id[:])
	return string(v), ok
}

// SaveView keeps the path of the build's view; written within seconds.
func (x *Index) SaveView(id BuildID, path string) error {
	return x.soft.put(bucketViews, id[:], []byte(path))
}

// EachView calls fn with the path of every view, in order of ids, and stops at
// its first error, which it returns. No transaction is open during fn.
func (x *Index) EachView(ctx context.Context, fn func(id BuildID, path string) error) error {
	if err := x.soft.flush(); err != nil {
		return err
	}
	return x.rows(ctx, bucketViews, func(key, value []byte) error {
		id, err := idAtEnd(key)
		if err != nil {
			return err
		}
		return fn(id, string(value))
	})
}

// DropView forgets the build's view.
func (x *Index) DropView(id BuildID) { x.soft.drop(bucketViews, id[:]) }

// Use counts hits of a build, the latest at the time at, and the compile time
// that they saved. It costs no transaction.
func (x *Index) Use(id BuildID, at time.Time, hits uint64, savedSeconds float64) error {
	x.useMu.Lock()
	defer x.useMu.Unlock()
	u := x.usage(id)
	if at.After(u.Last) {
		u.Last = at
	}
	u.Hits += hits
	u.SavedSeconds += savedSeconds
	return x.soft.put(bucketUse, id[:], encodeUse(u))
}

// LastUse returns when the build was used last and how often; zero if never,
// or if it was lost.
func (x *Index) LastUse(id BuildID) (time.Time, uint64) {
	u := x.usage(id)
	return u.Last, u.Hits
}

// Usage returns all that is known of a build's use.
func (x *Index) Usage(id BuildID) Usage { return x.usage(id) }

func (x *Index) usage(id BuildID) Usage {
	v, ok := x.soft.get(bucketUse, id[:])
	if !ok {
		return Usage{}
	}
	u, _ := decodeUse(v) // what does not decode counts as lost
	return u
}

// Count adds to a counter of the whole store.
func (x *Index) Count(name string, delta uint64) {
	x.countMu.Lock()
	x.counts[name] += delta
	x.counted = true
	x.countMu.Unlock()
	x.wake()
}

// Counters returns all counters since the database was made.
func (x *Index) Counters() map[string]uint64 {
	x.countMu.Lock()
	defer x.countMu.Unlock()
	return maps.Clone(x.counts)
}

// saveCounters hands changed counters to the next flush.
func (x *Index) saveCounters() error {
	x.countMu.Lock()
	defer x.countMu.Unlock()
	if !x.counted {
		return nil
	}
	for name, v := range x.counts {
		if err := x.soft.put(bucketCounters, []byte(name), binary.LittleEndian.AppendUint64(nil, v)); err != nil {
			return err
		}
	}
	x.counted = false
	return nil
}
