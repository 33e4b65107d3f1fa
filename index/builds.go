package index

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

func blobKey(d cas.Digest, id BuildID) []byte {
	return append(append(make([]byte, 0, len(d)+len(id)), d[:]...), id[:]...)
}

func readSpace(tx *bbolt.Tx) (s Space, err error) {
	v, err := get(tx, bucketMeta, []byte("space"))
	if err == nil && !decodeRow(v, &s) {
		err = &DamageError{File: "index.db", Reason: "no account of the space"}
	}
	return s, err
}

func readBuild(tx *bbolt.Tx, id BuildID) (Build, error) {
	body, err := get(tx, bucketBuilds, id[:])
	if err != nil {
		return Build{}, err
	}
	if body == nil {
		return Build{}, ErrNotFound
	}
	b, err := unmarshalBuild(body)
	if err != nil {
		return Build{}, &DamageError{File: "index.db", Reason: err.Error()}
	}
	return b, nil
}

type lookupKey struct {
	request RequestKey
	scope   string
}

// Lookup returns the builds of a request in a scope, in any state: newest first, and then those of
// layers. None is no error. A repeated look-up is answered from memory. The result is shared with
// other callers.
func (x *Index) Lookup(k RequestKey, scope string) (builds []Build, err error) {
	if x.Lower != nil && scope == "shared" {
		defer func() {
			if below := x.Lower.Of(k); err == nil && len(below) > 0 {
				builds = slices.Concat(builds, below)
			}
		}()
	}
	key := lookupKey{k, scope}
	builds, drops, ok := x.entries.Get(key)
	if ok {
		return builds, nil
	}
	builds, err = read(x.db, func(tx *bbolt.Tx) ([]Build, error) { return buildsOf(tx, key) })
	if err != nil {
		return nil, err
	}
	builds = slices.DeleteFunc(builds, func(b Build) bool { return x.isRetracting(b.ID) })
	slices.SortFunc(builds, func(a, b Build) int { return b.Created.Compare(a.Created) })
	if len(builds) > 0 {
		x.entries.Fill(drops, key, builds, costOf(builds))
	}
	return builds, nil
}

// dropEntries forgets the look-ups that found the build, or will find it now.
func (x *Index) dropEntries(b *Build) {
	for _, k := range b.Keys() {
		x.entries.Drop(lookupKey{k, b.Scope})
	}
}

func buildsOf(tx *bbolt.Tx, k lookupKey) ([]Build, error) {
	prefix := requestPrefix(k.request, k.scope)
	// An entry's builds are few: one for each EP library that was ever in use.
	keys, err := keysOf(tx, bucketRequests, prefix, maxSharers)
	if err != nil {
		return nil, err
	}
	var builds []Build
	for _, key := range keys {
		if len(key) != len(prefix)+len(BuildID{}) {
			continue
		}
		id, err := idAtEnd(key)
		if err != nil {
			return nil, err
		}
		b, err := readBuild(tx, id)
		if errors.Is(err, ErrNotFound) {
			return nil, &DamageError{File: "index.db",
				Reason: "build " + id.String() + " has a request and no record"}

		}
		if err != nil {
			return nil, err
		}
		builds = append(builds, b)
	}
	return builds, nil
}

// costOf is roughly the memory that builds take.
func costOf(builds []Build) int {
	cost := 0
	for _, b := range builds {
		cost += 2048 + len(b.Record) + len(b.RecordJSON) + 160*len(b.Files) + 512*len(b.EPs) +
			512*len(b.Members)
	}
	return cost
}

// Get returns one build, which may be a layer's, or ErrNotFound.
func (x *Index) Get(id BuildID) (Build, error) {
	if x.Lower != nil {
		if b, ok := x.Lower.Get(id); ok {
			return b, nil
		}
	}
	if x.isRetracting(id) {
		return Build{}, ErrNotFound
	}
	return read(x.db, func(tx *bbolt.Tx) (Build, error) { return readBuild(tx, id) })
}

// Each calls fn with every build, in order of ids, and stops at its first error, which it returns.
// No transaction is open during fn, which may call any method. fn may or may not be called with
// builds that are published or removed in the meantime.
func (x *Index) Each(ctx context.Context, fn func(Build) error) error {
	return x.EachAfter(ctx, BuildID{}, fn)
}

// EachAfter is Each, for the builds with ids after this one. The zero id, which
// no build has, is before all.
func (x *Index) EachAfter(ctx context.Context, id BuildID, fn func(Build) error) error {
	return x.db.rowsFrom(ctx, bucketBuilds, nil, id[:], func(key, value []byte) error {
		b, err := unmarshalBuild(value)
		if err != nil || !bytes.Equal(b.ID[:], key) {
			return &DamageError{File: "index.db",
				Reason: fmt.Sprintf("the record of build %x is invalid", key)}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if x.isRetracting(b.ID) {
			return nil
		}
		return fn(b)
	})
}

// idsOf returns the ids at the end of the keys that begin with prefix, in order of keys.
func (x *Index) idsOf(ctx context.Context, bucket, prefix []byte) (ids []BuildID, err error) {
	err = x.db.rowsFrom(ctx, bucket, prefix, nil, func(key, _ []byte) error {
		id, err := idAtEnd(key)
		ids = append(ids, id)
		return err
	})
	return ids, err
}

// Needs returns the builds that refer to the blob. If there are none, the blob may still be needed
// unless Complete is true.
func (x *Index) Needs(d cas.Digest) ([]BuildID, error) {
	ids, err := x.idsOf(context.Background(), bucketBlobs, d[:])
	return slices.DeleteFunc(ids, x.isRetracting), err
}

// Need is a blob that a build needs.
type Need struct {
	Blob       cas.Digest
	Size, Disk int64 // bytes: of the content, and accounted for on the disk
	Build      BuildID
}

// EachNeed calls fn with every blob that is needed, in order of digests from this one on, once for
// each build that needs it, and stops at fn's first error, which it returns. No transaction is open
// during fn.
func (x *Index) EachNeed(ctx context.Context, from cas.Digest, fn func(Need) error) error {
	return x.eachNeed(ctx, nil, from[:], fn)
}

func (x *Index) eachNeed(ctx context.Context, prefix, after []byte, fn func(Need) error) error {
	return x.db.rowsFrom(ctx, bucketBlobs, prefix, after, func(key, value []byte) error {
		n, err := decodeNeed(key, value)
		if err != nil || x.isRetracting(n.Build) {
			return err
		}
		return fn(n)
	})
}

func decodeNeed(key, value []byte) (n Need, err error) {
	f := fields{b: value}
	n.Size, n.Disk = f.i64(), f.i64()
	if !f.end() || len(key) != len(n.Blob)+len(n.Build) {
		return n, errBlobRow
	}
	copy(n.Blob[:], key)
	copy(n.Build[:], key[len(n.Blob):])
	return n, nil
}

// NeededIn returns the referenced blobs with digests that begin with that byte, and the bytes
// accounted for each on the disk.
func (x *Index) NeededIn(ctx context.Context, first byte) (map[cas.Digest]int64, error) {
	out := make(map[cas.Digest]int64)
	err := x.eachNeed(ctx, []byte{first}, nil, func(n Need) error {
		out[n.Blob] = n.Disk
		return nil
	})
	return out, err
}

// Space returns the sums of sizes over all builds.
func (x *Index) Space() (Space, error) { return read(x.db, readSpace) }
