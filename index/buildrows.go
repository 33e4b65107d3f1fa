package index

import (
	"cmp"
	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// addBuild writes the rows of a build, unless it has them already.
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
	first, err := keysOf(tx, bucketRequests, b.RequestKey[:], 1)
	if err != nil {
		return err
	}
	if len(first) == 0 {
		space.Entries++
	}
	space.Builds++
	brief := briefOf(&b)
	// 0 if another process has deleted it; the next start drops the build
	brief.manifest, _ = cas.DiskBytes(x.manifests.path(b.ID))
	space.ManifestBytes += brief.manifest
	space.LogicalBytes += brief.LogicalBytes
	for d, size := range b.DistinctBlobs() {
		disk := x.blobBytes(d, size)
		more, needed, err := resize(tx, d, disk) // a packed blob may have become whole
		if err != nil {
			return err
		}
		if !needed {
			space.UniqueBytes += size
			more = disk
		}
		space.DiskBytes += more
		if err := put(tx, bucketBlobs, blobKey(d, b.ID),
			encodeNumbers(uint64(size), uint64(disk))); err != nil {
			return err
		}
	}
	err = put(tx, bucketBuilds, b.ID[:], body)
	for _, k := range b.Keys() {
		err = cmp.Or(err, put(tx, bucketRequests, requestRow(&b, k), nil))
	}
	for _, key := range b.nameRows() {
		err = cmp.Or(err, put(tx, bucketNames, key, nil))
	}
	err = cmp.Or(err, put(tx, bucketBriefs, b.ID[:], encodeBrief(&brief)))
	err = cmp.Or(err, changeUser(tx, &brief, 1))
	return cmp.Or(err, writeSpace(tx, space))
}

// removeBuild takes the rows of a build out again, those of its use and view included, and returns
// the bytes on disk of blobs that no build needs any more. It is not an error if there are none.
func removeBuild(tx *bbolt.Tx, id BuildID) (freed int64, err error) {
	b, err := readBuild(tx, id)
	if err != nil {
		return 0, cas.Ignore(ErrNotFound, err)
	}
	space, err := readSpace(tx)
	if err != nil {
		return freed, err
	}
	brief, err := briefRow(tx, id)
	if err != nil {
		return freed, err
	}
	space.Builds--
	space.LogicalBytes -= brief.LogicalBytes
	space.ManifestBytes -= brief.manifest
	for d, size := range b.DistinctBlobs() {
		n, err := firstNeed(tx, d)
		if err != nil {
			return freed, err
		}
		if err := drop(tx, bucketBlobs, blobKey(d, id)); err != nil {
			return freed, err
		}
		other, err := firstNeed(tx, d)
		if err != nil {
			return freed, err
		}
		if other.Build.IsZero() {
			space.UniqueBytes -= size
			freed += n.Disk
		}
	}
	space.DiskBytes -= freed
	for _, k := range b.Keys() {
		err = cmp.Or(err, drop(tx, bucketRequests, requestRow(&b, k)))
	}
	for _, key := range b.nameRows() {
		err = cmp.Or(err, drop(tx, bucketNames, key))
	}
	for _, bucket := range [][]byte{bucketBuilds, bucketBriefs, bucketUse, bucketViews} {
		err = cmp.Or(err, drop(tx, bucket, id[:]))
	}
	err = cmp.Or(err, changeUser(tx, &brief, -1))
	if err != nil {
		return freed, err
	}
	left, err := keysOf(tx, bucketRequests, b.RequestKey[:], 1)
	if err != nil {
		return freed, err
	}
	if len(left) == 0 {
		space.Entries--
	}
	return freed, writeSpace(tx, space)
}

// blobBytes returns the bytes of a blob on the disk, 0 for a missing one, which Check reports.
func (x *Index) blobBytes(d cas.Digest, size int64) int64 {
	if x.MeasureDisk == nil {
		return (size + 4095) / 4096 * 4096
	}
	n, _ := x.MeasureDisk(d)
	return n
}

var errBlobRow = &DamageError{File: "index.db", Reason: "a row of a blob without its sizes"}

// DiskBytes returns the accounted bytes of a blob on the disk, and whether any build needs it.
func (x *Index) DiskBytes(d cas.Digest) (disk int64, needed bool, err error) {
	n, err := x.blob(d)
	return n.Disk, !n.Build.IsZero(), err
}

// BlobBytes returns how many bytes the content of a blob has, by the manifests of the builds that
// need it. needed is false if there are none.
func (x *Index) BlobBytes(d cas.Digest) (size int64, needed bool, err error) {
	if x.sizes != nil {
		size, needed = x.sizes[d]
		return size, needed, nil
	}
	n, err := x.blob(d)
	return n.Size, !n.Build.IsZero(), err
}

func (x *Index) blob(d cas.Digest) (Need, error) {
	return read(x.db, func(tx *bbolt.Tx) (Need, error) { return firstNeed(tx, d) })
}

// firstNeed returns the first row of a blob; the zero Need if it has none.
func firstNeed(tx *bbolt.Tx, d cas.Digest) (n Need, err error) {
	err = eachRow(tx, bucketBlobs, d[:], nil, func(key, sealed []byte) (bool, error) {
		v, err := unseal(bucketBlobs, key, sealed)
		if err == nil {
			n, err = decodeNeed(key, v)
		}
		return false, err
	})
	return n, err
}

// Remeasure updates the accounted bytes of a blob from the file system, after it was quarantined,
// stored again or packed. It is no error if no build needs it.
func (x *Index) Remeasure(d cas.Digest) error {
	return x.db.write(func(tx *bbolt.Tx) error {
		// measured inside the transaction, so that the last writer wins
		more, _, err := resize(tx, d, x.blobBytes(d, 0))
		if err != nil || more == 0 {
			return err
		}
		space, err := readSpace(tx)
		if err != nil {
			return err
		}
		space.DiskBytes += more
		return writeSpace(tx, space)
	})
}

// resize writes the bytes on disk into all rows of a blob, which are equal, and returns by how many
// bytes they grew, and whether the blob has rows.
func resize(tx *bbolt.Tx, d cas.Digest, disk int64) (more int64, needed bool, err error) {
	n, err := firstNeed(tx, d)
	if err != nil || n.Build.IsZero() {
		return 0, false, err
	}
	if more = disk - n.Disk; more == 0 {
		return 0, true, nil
	}
	keys, err := keysOf(tx, bucketBlobs, d[:], maxSharers)
	for _, key := range keys {
		err = cmp.Or(err, put(tx, bucketBlobs, key, encodeNumbers(uint64(n.Size), uint64(disk))))
	}
	return more, true, err
}

// maxSharers bounds the builds of one blob, or of one request, that one transaction reads.
const maxSharers = 1 << 20
