package index

import (
	"context"
	"errors"
	"slices"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// addBuild writes the rows of a build. A build that is there already is left,
// for after a fault a transaction may run twice.
func addBuild(tx *bbolt.Tx, b Build) error {
	there, err := get(tx, bucketBuilds, b.ID[:])
	if there != nil || err != nil {
		return err
	}
	body, err := marshalBuild(b)
	if err != nil {
		return err
	}
	space, err := readSpace(tx)
	if err != nil {
		return err
	}
	first, err := keysFrom(tx, bucketRequests, b.RequestKey[:], nil, 1)
	if err != nil {
		return err
	}
	if len(first) == 0 {
		space.Entries++
	}
	space.Builds++
	for _, f := range b.Blobs() {
		space.LogicalBytes += f.Size
	}
	for d, size := range distinct(b) {
		others, err := keysFrom(tx, bucketBlobs, d[:], nil, 1)
		if err != nil {
			return err
		}
		if len(others) == 0 {
			space.StoredBytes += size
		}
		if err := put(tx, bucketBlobs, blobKey(d, b.ID), numbers(uint64(size))); err != nil {
			return err
		}
	}
	err = put(tx, bucketBuilds, b.ID[:], body)
	err = firstOf(err, putRequests(tx, &b))
	return firstOf(err, put(tx, bucketMeta, []byte("space"), encodeSpace(space)))
}

// removeBuild takes the rows of a build out again, those of its use and view
// included. It is not an error if there are none.
func removeBuild(tx *bbolt.Tx, id BuildID) error {
	body, err := get(tx, bucketBuilds, id[:])
	if body == nil || err != nil {
		return err
	}
	b, err := unmarshalBuild(body)
	if err != nil {
		return &DamageError{"index.db", err.Error()}
	}
	space, err := readSpace(tx)
	if err != nil {
		return err
	}
	space.Builds--
	for _, f := range b.Blobs() {
		space.LogicalBytes -= f.Size
	}
	for d, size := range distinct(b) {
		if err := drop(tx, bucketBlobs, blobKey(d, id)); err != nil {
			return err
		}
		others, err := keysFrom(tx, bucketBlobs, d[:], nil, 1)
		if err != nil {
			return err
		}
		if len(others) == 0 {
			space.StoredBytes -= size
		}
	}
	err = drop(tx, bucketBuilds, id[:])
	err = firstOf(err, dropRequests(tx, &b))
	err = firstOf(err, drop(tx, bucketUse, id[:]))
	err = firstOf(err, drop(tx, bucketViews, id[:]))
	if err != nil {
		return err
	}
	left, err := keysFrom(tx, bucketRequests, b.RequestKey[:], nil, 1)
	if err != nil {
		return err
	}
	if len(left) == 0 {
		space.Entries--
	}
	return put(tx, bucketMeta, []byte("space"), encodeSpace(space))
}

func blobKey(d cas.Digest, id BuildID) []byte {
	return append(append(make([]byte, 0, len(d)+len(id)), d[:]...), id[:]...)
}

func readSpace(tx *bbolt.Tx) (Space, error) {
	v, err := get(tx, bucketMeta, []byte("space"))
	if err != nil {
		return Space{}, err
	}
	s, ok := decodeSpace(v)
	if !ok {
		return Space{}, &DamageError{"index.db", "no account of the space"}
	}
	return s, nil
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
		return Build{}, &DamageError{"index.db", err.Error()}
	}
	return b, nil
}

// page bounds a read transaction: so many builds take well below 5 ms.
const page = 64

type lookupKey struct {
	request RequestKey
	scope   string
}

// Lookup returns the builds of a request in a scope, newest first, whatever
// their states; none is no error. A repeated look-up is answered from memory.
// The result is shared with other callers.
func (x *Index) Lookup(k RequestKey, scope string) ([]Build, error) {
	key := lookupKey{k, scope}
	if builds, ok := x.entries.get(key); ok {
		return builds, nil
	}
	turn := x.entries.now()
	builds, err := read(x.db, func(tx *bbolt.Tx) ([]Build, error) { return buildsOf(tx, key) })
	if err != nil {
		return nil, err
	}
	builds = slices.DeleteFunc(builds, func(b Build) bool { return x.isGone(b.ID) })
	slices.SortFunc(builds, func(a, b Build) int { return b.Created.Compare(a.Created) })
	if len(builds) > 0 {
		x.entries.fill(turn, key, builds, costOf(builds))
	}
	return builds, nil
}

func buildsOf(tx *bbolt.Tx, k lookupKey) ([]Build, error) {
	prefix := requestPrefix(k.request, k.scope)
	// An entry's builds are few: one for each EP library that was ever in use.
	keys, err := keysFrom(tx, bucketRequests, prefix, nil, 4*page)
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
			return nil, &DamageError{"index.db", "build " + id.String() + " has a request and no record"}
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
		cost += 2048 + len(b.Record) + len(b.RecordJSON) + 160*len(b.Files) + 512*len(b.EPs) + 512*len(b.Members)
	}
	return cost
}

// Get returns one build, or ErrNotFound.
func (x *Index) Get(id BuildID) (Build, error) {
	if x.isGone(id) {
		return Build{}, ErrNotFound
	}
	return read(x.db, func(tx *bbolt.Tx) (Build, error) { return readBuild(tx, id) })
}

// Each calls fn with every build, in order of ids, and stops at its first
// error, which it returns. No transaction is open during fn, which may call
// any method. Builds published or retracted meanwhile may be given or not.
func (x *Index) Each(ctx context.Context, fn func(Build) error) error {
	var after []byte
	for {
		builds, err := read(x.db, func(tx *bbolt.Tx) ([]Build, error) {
			keys, err := keysFrom(tx, bucketBuilds, nil, after, page)
			if err != nil {
				return nil, err
			}
			builds := make([]Build, 0, len(keys))
			for _, key := range keys {
				id, err := idAtEnd(key)
				if err != nil {
					return nil, err
				}
				b, err := readBuild(tx, id)
				if err != nil {
					return nil, err
				}
				builds = append(builds, b)
			}
			return builds, nil
		})
		if err != nil || len(builds) == 0 {
			return err
		}
		for _, b := range builds {
			if err := ctx.Err(); err != nil {
				return err
			}
			if x.isGone(b.ID) {
				continue
			}
			if err := fn(b); err != nil {
				return err
			}
		}
		after = builds[len(builds)-1].ID[:]
	}
}

// Needs returns the builds that refer to the blob. None does not
// mean that the blob may go unless Complete is true.
func (x *Index) Needs(d cas.Digest) ([]BuildID, error) {
	var ids []BuildID
	for after := []byte(nil); ; {
		keys, err := read(x.db, func(tx *bbolt.Tx) ([][]byte, error) {
			return keysFrom(tx, bucketBlobs, d[:], after, 16*page)
		})
		if err != nil {
			return nil, err
		}
		for _, key := range keys {
			id, err := idAtEnd(key)
			if err != nil {
				return nil, err
			}
			if !x.isGone(id) {
				ids = append(ids, id)
			}
		}
		if len(keys) < 16*page {
			return ids, nil
		}
		after = keys[len(keys)-1]
	}
}

// Space returns the store's size as far as builds tell it.
func (x *Index) Space() (Space, error) { return read(x.db, readSpace) }
