package index

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// schemaVersion is the version of index.db. A database of another version is rebuilt from the
// manifests, so it may change at any time. It must change with the format of manifests, because the
// database contains their bodies.
const schemaVersion = 4

// The buckets of index.db. Numbers in values are little-endian, in keys
// big-endian where their order counts. Every value is sealed, see seal.
var (
	bucketMeta   = []byte("meta")   // name -> "schema": u32; "space": Space
	bucketBuilds = []byte("builds") // BuildID 16 -> manifestpb.Manifest
	// RequestKey 32, length of scope u8, scope, BuildID 16 -> nothing
	bucketRequests = []byte("requests")
	// kind u8, first 8 bytes of a build key, of a model's digest or of the BLAKE3 of its name,
	// BuildID 16 -> nothing
	bucketNames = []byte("names")
	// Digest 32, BuildID 16 -> size i64, bytes on disk i64: the same in all rows of a blob
	bucketBlobs        = []byte("blobs")
	bucketBriefs       = []byte("briefs")   // BuildID 16 -> encodeBrief
	bucketUsers        = []byte("users")    // user id u32 -> UserSpace
	bucketDirs         = []byte("folders")  // first byte of BuildID -> dirTimes
	bucketStamps       = []byte("stamps")   // Digest 32 -> encodeStamp
	bucketMemo         = []byte("memo")     // key as given -> saved at, seconds i64; value as given
	bucketUse          = []byte("use")      // BuildID 16 -> encodeUse
	bucketViews        = []byte("views")    // BuildID 16 -> path
	bucketCounters     = []byte("counters") // name -> u64
	bucketFailures     = []byte("failures") // key as given -> value as given
	bucketUnpacked     = []byte("unpacked") // Digest 32 -> encodeStamp, of the unpacked copy
	bucketRecipeStamps = []byte("proven")   // Digest 32 -> encodeStamp, of the recipe
	bucketSketches     = []byte("sketches") // Digest 32 -> as given
	bucketShares       = []byte("shares")   // Digest 32 -> as given
)

var buckets = [][]byte{bucketMeta, bucketBuilds, bucketRequests, bucketNames, bucketBlobs,
	bucketBriefs, bucketUsers, bucketDirs,
	bucketStamps, bucketMemo, bucketUse, bucketViews, bucketCounters, bucketFailures,
	bucketUnpacked, bucketRecipeStamps, bucketSketches, bucketShares}

const sealSize = 16

// seal returns the stored bytes of a value: a checksum and the value. The checksum covers bucket
// and key too, because after a flipped bit in a page bbolt may return another key's value.
//
//	offset  size  what
//	0       16    first half of the BLAKE3 of: length of bucket u8, bucket,
//	              length of key u32, key, value
//	16            value
func seal(bucket, key, value []byte) []byte {
	var scratch []byte
	sum := rowSum(&scratch, bucket, key, value)
	return append(append(make([]byte, 0, sealSize+len(value)), sum[:sealSize]...), value...)
}

// unseal checks the checksum, and returns the value, a part of sealed.
func unseal(bucket, key, sealed []byte) ([]byte, error) {
	var scratch []byte
	return unsealIn(&scratch, bucket, key, sealed)
}

// unsealIn is unseal with memory that is used again for the next row.
func unsealIn(scratch *[]byte, bucket, key, sealed []byte) ([]byte, error) {
	if len(sealed) >= sealSize {
		if sum := rowSum(scratch, bucket, key, sealed[sealSize:]); bytes.Equal(sum[:sealSize],
			sealed[:sealSize]) {
			return sealed[sealSize:], nil
		}
	}
	return nil, &DamageError{File: "index.db",
		Reason: fmt.Sprintf("%s %x has a wrong checksum", bucket, key[:min(len(key), 64)])}

}

func rowSum(scratch *[]byte, bucket, key, value []byte) cas.Digest {
	b := slices.Grow((*scratch)[:0], 1+len(bucket)+4+len(key)+len(value))
	b = append(append(b, byte(len(bucket))), bucket...)
	b = append(binary.LittleEndian.AppendUint32(b, uint32(len(key))), key...)
	*scratch = append(b, value...)
	return cas.SumBytes(*scratch)
}

// bucketOf returns a bucket, or an error if the database lacks it.
func bucketOf(tx *bbolt.Tx, name []byte) (*bbolt.Bucket, error) {
	b := tx.Bucket(name)
	if b == nil {
		return nil, &DamageError{File: "index.db", Reason: fmt.Sprintf("no bucket %s", name)}
	}
	return b, nil
}

// get returns a row's value, which is valid until the transaction ends, or nil if there is none.
func get(tx *bbolt.Tx, bucket, key []byte) ([]byte, error) {
	b, err := bucketOf(tx, bucket)
	if err != nil {
		return nil, err
	}
	sealed := b.Get(key)
	if sealed == nil {
		return nil, nil
	}
	return unseal(bucket, key, sealed)
}

func put(tx *bbolt.Tx, bucket, key, value []byte) error {
	b, err := bucketOf(tx, bucket)
	if err != nil {
		return err
	}
	return b.Put(key, seal(bucket, key, value))
}

func drop(tx *bbolt.Tx, bucket, key []byte) error {
	b, err := bucketOf(tx, bucket)
	if err != nil {
		return err
	}
	return b.Delete(key)
}

// keysOf returns up to limit keys of a bucket that begin with prefix, checked, and copied, so that
// they outlive the transaction.
func keysOf(tx *bbolt.Tx, bucket, prefix []byte, limit int) (keys [][]byte, err error) {
	err = eachRow(tx, bucket, prefix, nil, func(k, v []byte) (bool, error) {
		if len(keys) == limit {
			return false, nil
		}
		if _, err := unseal(bucket, k, v); err != nil {
			return false, err
		}
		keys = append(keys, bytes.Clone(k))
		return true, nil
	})
	return keys, err
}

func requestPrefix(k RequestKey, scope string) []byte {
	b := append(make([]byte, 0, len(k)+1+len(scope)+16), k[:]...)
	return append(append(b, byte(len(scope))), scope...)
}

func idAtEnd(key []byte) (id BuildID, err error) {
	if len(key) < len(id) {
		return id, &DamageError{File: "index.db",
			Reason: fmt.Sprintf("key %x has no build id", key)}
	}
	copy(id[:], key[len(key)-len(id):])
	return id, nil
}

// fields reads the numbers of a value one after another. A value of a wrong length is noticed at
// the end.
type fields struct {
	b   []byte
	bad bool
}

func (f *fields) u64() uint64 {
	if len(f.b) < 8 {
		f.bad = true
		return 0
	}
	v := binary.LittleEndian.Uint64(f.b)
	f.b = f.b[8:]
	return v
}

func (f *fields) i64() int64 { return int64(f.u64()) }

func (f *fields) end() bool { return !f.bad && len(f.b) == 0 }

func encodeNumbers(values ...uint64) []byte {
	b := make([]byte, 0, 8*len(values)+40)
	for _, v := range values {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// A stamp: device, inode, size, mtime, ctime, 8 bytes each, and the boot id.
func encodeStamp(s cas.Stamp) []byte {
	return append(encodeNumbers(s.Dev, s.Ino, uint64(s.Size), uint64(s.Mtime), uint64(s.Ctime)),
		s.Boot...)
}

func decodeStamp(b []byte) (cas.Stamp, bool) {
	f := fields{b: b}
	s := cas.Stamp{Dev: f.u64(), Ino: f.u64(), Size: f.i64(), Mtime: f.i64(), Ctime: f.i64()}
	if f.bad || s.Size < 0 {
		return cas.Stamp{}, false
	}
	s.Boot = string(f.b)
	return s, true
}

// Usage is what is known of a build's use.
type Usage struct {
	Last         time.Time // zero: never used
	Hits         uint64
	SavedSeconds float64 // compile time that the hits saved
}

// A use: last, in nanoseconds since 1970; hits; saved seconds as IEEE 754; 8 bytes each.
func encodeUse(u Usage) []byte {
	return encodeNumbers(uint64(nanos(u.Last)), u.Hits, math.Float64bits(u.SavedSeconds))
}

// decodeUse returns the zero Usage for an invalid value, which counts as lost.
func decodeUse(b []byte) Usage {
	f := fields{b: b}
	u := Usage{Last: fromNanos(f.i64()), Hits: f.u64(), SavedSeconds: math.Float64frombits(f.u64())}
	if !f.end() || math.IsNaN(u.SavedSeconds) {
		return Usage{}
	}
	return u
}

// encodeRow returns the fields of a struct of numbers, little-endian.
func encodeRow(v any) []byte {
	b, err := binary.Append(nil, binary.LittleEndian, v)
	if err != nil {
		panic(err) // cannot happen: all fields have fixed sizes
	}
	return b
}

// decodeRow reads what encodeRow returned.
func decodeRow(b []byte, v any) bool {
	n, err := binary.Decode(b, binary.LittleEndian, v)
	return err == nil && n == len(b)
}

func writeSpace(tx *bbolt.Tx, s Space) error {
	return put(tx, bucketMeta, []byte("space"), encodeRow(s))
}
