package index

import (
	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// addBuild writes the rows of a build. A build that is there already is left,
// for after a fault a transaction may run twice.
func (x *Index) addBuild(tx *bbolt.Tx, b Build) error {
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
	brief := briefOf(&b)
	brief.manifest = x.manifestBytes(b.ID)
	space.ManifestBytes += brief.manifest
	space.LogicalBytes += brief.LogicalBytes
	for d, size := range distinct(b) {
		others, err := keysFrom(tx, bucketBlobs, d[:], nil, 1)
		if err != nil {
			return err
		}
		disk := x.blobBytes(d, size)
		if len(others) == 0 {
			space.StoredBytes += size
			space.DiskBytes += disk
		} else {
			more, err := resize(tx, d, disk) // it may have been packed, and is whole again
			if err != nil {
				return err
			}
			space.DiskBytes += more
		}
		if err := put(tx, bucketBlobs, blobKey(d, b.ID), numbers(uint64(size), uint64(disk))); err != nil {
			return err
		}
	}
	err = put(tx, bucketBuilds, b.ID[:], body)
	err = firstOf(err, putRequests(tx, &b))
	err = firstOf(err, putNames(tx, &b))
	err = firstOf(err, put(tx, bucketBriefs, b.ID[:], encodeBrief(&brief)))
	err = firstOf(err, changeUser(tx, &brief, 1))
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
	brief, err := readBrief(tx, id)
	if err != nil {
		return err
	}
	space.Builds--
	space.LogicalBytes -= brief.LogicalBytes
	space.ManifestBytes -= brief.manifest
	for d, size := range distinct(b) {
		disk, err := diskOfRow(tx, blobKey(d, id))
		if err != nil {
			return err
		}
		if err := drop(tx, bucketBlobs, blobKey(d, id)); err != nil {
			return err
		}
		others, err := keysFrom(tx, bucketBlobs, d[:], nil, 1)
		if err != nil {
			return err
		}
		if len(others) == 0 {
			space.StoredBytes -= size
			space.DiskBytes -= disk
		}
	}
	err = drop(tx, bucketBuilds, id[:])
	err = firstOf(err, dropRequests(tx, &b))
	err = firstOf(err, dropNames(tx, &b))
	err = firstOf(err, drop(tx, bucketUse, id[:]))
	err = firstOf(err, drop(tx, bucketViews, id[:]))
	err = firstOf(err, drop(tx, bucketBriefs, id[:]))
	err = firstOf(err, changeUser(tx, &brief, -1))
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

// blobBytes is what a blob takes on the disk. One that is not there, which a
// check will tell of, takes nothing.
func (x *Index) blobBytes(d cas.Digest, size int64) int64 {
	if x.disk == nil {
		return (size + 4095) / 4096 * 4096
	}
	n, err := x.disk(d)
	if err != nil {
		return 0
	}
	return n
}

// manifestBytes is what a manifest takes on the disk.
func (x *Index) manifestBytes(id BuildID) int64 {
	n, err := cas.DiskBytes(x.manifestPath(id))
	if err != nil {
		return 0 // deleted behind our back; the next start drops the build
	}
	return n
}

var errBlobRow = &DamageError{"index.db", "a row of a blob without its sizes"}

// diskOfRow reads the bytes on disk from a row of bucketBlobs.
func diskOfRow(tx *bbolt.Tx, key []byte) (int64, error) {
	v, err := get(tx, bucketBlobs, key)
	if err != nil {
		return 0, err
	}
	f := fields{b: v}
	_, disk := f.i64(), f.i64()
	if !f.end() {
		return 0, errBlobRow
	}
	return disk, nil
}

// DiskBytes returns what is accounted for a blob on the disk, and whether any
// build needs it.
func (x *Index) DiskBytes(d cas.Digest) (disk int64, needed bool, err error) {
	type result struct {
		disk   int64
		needed bool
	}
	r, err := read(x.db, func(tx *bbolt.Tx) (r result, err error) {
		keys, err := keysFrom(tx, bucketBlobs, d[:], nil, 1)
		if err != nil || len(keys) == 0 {
			return r, err
		}
		r.needed = true
		r.disk, err = diskOfRow(tx, keys[0])
		return r, err
	})
	return r.disk, r.needed, err
}

// BlobBytes returns how many bytes the content of a blob has, by the manifests
// of the builds that need it. needed is false where none does.
func (x *Index) BlobBytes(d cas.Digest) (size int64, needed bool, err error) {
	row, err := read(x.db, func(tx *bbolt.Tx) ([]byte, error) {
		keys, err := keysFrom(tx, bucketBlobs, d[:], nil, 1)
		if err != nil || len(keys) == 0 {
			return nil, err
		}
		return get(tx, bucketBlobs, keys[0])
	})
	if row == nil || err != nil {
		return 0, false, err
	}
	f := fields{b: row}
	size, _ = f.i64(), f.i64()
	if !f.end() {
		return 0, false, errBlobRow
	}
	return size, true, nil
}

// Remeasure asks the file system again what a blob takes on the disk, after it
// was moved away, stored anew or packed. It is no error if no build needs it.
func (x *Index) Remeasure(d cas.Digest) error {
	return x.db.write(func(tx *bbolt.Tx) error {
		more, err := resize(tx, d, x.blobBytes(d, 0)) // asked in its turn: whoever asks last has the last word
		if err != nil || more == 0 {
			return err
		}
		space, err := readSpace(tx)
		if err != nil {
			return err
		}
		space.DiskBytes += more
		return put(tx, bucketMeta, []byte("space"), encodeSpace(space))
	})
}

// resize writes the bytes on disk into all rows of a blob, and returns how many
// more these are.
func resize(tx *bbolt.Tx, d cas.Digest, disk int64) (more int64, err error) {
	keys, err := keysFrom(tx, bucketBlobs, d[:], nil, maxSharers)
	if err != nil || len(keys) == 0 {
		return 0, err
	}
	before, err := diskOfRow(tx, keys[0])
	if err != nil || before == disk {
		return 0, err
	}
	for _, key := range keys {
		v, err := get(tx, bucketBlobs, key)
		if err != nil {
			return 0, err
		}
		f := fields{b: v}
		if err := put(tx, bucketBlobs, key, numbers(f.u64(), uint64(disk))); err != nil {
			return 0, err
		}
	}
	return disk - before, nil
}

// maxSharers bounds the builds of one blob that are written in a transaction.
const maxSharers = 1 << 20
