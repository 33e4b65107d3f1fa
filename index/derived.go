package index

import (
	"context"
	"maps"
	"time"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

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

// Stamps remembers the stamps of blobs that package cas has verified.
func (x *Index) Stamps() cas.StampBook { return stamps{x, bucketStamps} }

// UnpackedStamps remembers those of unpacked copies, which are other files.
func (x *Index) UnpackedStamps() cas.StampBook { return stamps{x, bucketUnpacked} }

// RecipeStamps remembers those of recipes that were found to rebuild their blobs, by the digests of
// these.
func (x *Index) RecipeStamps() cas.StampBook { return stamps{x, bucketProven} }

type stamps struct {
	x      *Index
	bucket []byte
}

func (s stamps) LoadStamp(d cas.Digest) (cas.Stamp, bool) {
	v, ok := s.x.soft.get(s.bucket, d[:])
	if !ok {
		return cas.Stamp{}, false
	}
	return decodeStamp(v)
}

func (s stamps) SaveStamp(d cas.Digest, stamp cas.Stamp) error {
	return s.x.soft.put(s.bucket, d[:], encodeStamp(stamp))
}

func (s stamps) ForgetStamp(d cas.Digest) error {
	s.x.soft.drop(s.bucket, d[:])
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
	return x.eachSoft(ctx, bucketViews, func(key, value []byte) error {
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
	defer x.countMu.Unlock()
	x.counts[name] += delta
	_ = x.soft.put(bucketCounters, []byte(name), numbers(x.counts[name])) // a name is no large row
}

// Counters returns all counters since the database was made.
func (x *Index) Counters() map[string]uint64 {
	x.countMu.Lock()
	defer x.countMu.Unlock()
	return maps.Clone(x.counts)
}

// maxFailures and maxWanted bound how many rows are read.
const (
	maxFailures = 1 << 14
	maxWanted   = 1 << 12
)

// Failures returns every failure that was saved and not lost, by its key.
func (x *Index) Failures() (map[string][]byte, error) { return x.all(bucketFailures, maxFailures) }

// SaveFailure keeps what is known of a compile that failed under a key,
// together at most some 60 KiB; written within seconds.
func (x *Index) SaveFailure(key, value []byte) error { return x.soft.put(bucketFailures, key, value) }

// DropFailure forgets a failure.
func (x *Index) DropFailure(key []byte) { x.soft.drop(bucketFailures, key) }

// Wanted returns the jobs that were saved and not dropped, by their ids, as far as they were not
// lost.
func (x *Index) Wanted() (map[string][]byte, error) { return x.all(bucketWanted, maxWanted) }

// SaveWanted keeps the record of a background job, at most some 60 KiB, durably when it returns.
func (x *Index) SaveWanted(id string, value []byte) error {
	return x.db.write(func(tx *bbolt.Tx) error { return put(tx, bucketWanted, []byte(id), value) })
}

// DropWanted forgets a job within seconds. A job that comes back after a crash is found to be done.
func (x *Index) DropWanted(id string) { x.soft.drop(bucketWanted, []byte(id)) }

// Beside its bytes, a blob has a sketch, by which blobs with equal parts are found, and a share:
// what was found. A blob without a share has not been looked at.

// Sketch returns what SaveSketch saved for a blob.
func (x *Index) Sketch(d cas.Digest) ([]byte, bool) { return x.soft.get(bucketSketches, d[:]) }

// SaveSketch keeps a blob's sketch, at most some 60 KiB; written within seconds.
func (x *Index) SaveSketch(d cas.Digest, sketch []byte) error {
	return x.soft.put(bucketSketches, d[:], sketch)
}

// EachSketch calls fn with every sketch, in order of digests, and stops at its first error, which
// it returns. fn must not keep the bytes; no transaction is open while it runs.
func (x *Index) EachSketch(ctx context.Context, fn func(d cas.Digest, sketch []byte) error) error {
	return x.eachBlob(ctx, bucketSketches, fn)
}

// Share returns what SaveShare saved for a blob.
func (x *Index) Share(d cas.Digest) ([]byte, bool) { return x.soft.get(bucketShares, d[:]) }

// SaveShare keeps what a blob shares with others, at most some 60 KiB; written
// within seconds.
func (x *Index) SaveShare(d cas.Digest, share []byte) error {
	return x.soft.put(bucketShares, d[:], share)
}

// EachShare is EachSketch for shares.
func (x *Index) EachShare(ctx context.Context, fn func(d cas.Digest, share []byte) error) error {
	return x.eachBlob(ctx, bucketShares, fn)
}

// DropShare forgets what a blob shares, and keeps its sketch.
func (x *Index) DropShare(d cas.Digest) { x.soft.drop(bucketShares, d[:]) }

// DropSharing forgets a blob's sketch and share: it is looked at again, if it is still there.
func (x *Index) DropSharing(d cas.Digest) {
	x.soft.drop(bucketSketches, d[:])
	x.soft.drop(bucketShares, d[:])
}

func (x *Index) eachBlob(
	ctx context.Context, bucket []byte, fn func(d cas.Digest, value []byte) error,
) error {
	return x.eachSoft(ctx, bucket, func(key, value []byte) error {
		if len(key) != len(cas.Digest{}) {
			return nil
		}
		return fn(cas.Digest(key), value)
	})
}
