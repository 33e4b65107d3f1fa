package index

import (
	"context"

	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// What is known of blobs beside their bytes: sketches, by which those are found
// that share something, and what was found. Both are made again where they are
// lost; a blob without a sketch has not been looked at yet.

// Sketch returns what SaveSketch saved for a blob.
func (x *Index) Sketch(d cas.Digest) ([]byte, bool) { return x.soft.get(bucketSketches, d[:]) }

// SaveSketch keeps a blob's sketch, at most some 60 KiB; written within seconds.
func (x *Index) SaveSketch(d cas.Digest, sketch []byte) error {
	return x.soft.put(bucketSketches, d[:], sketch)
}

// Share returns what SaveShare saved for a blob.
func (x *Index) Share(d cas.Digest) ([]byte, bool) { return x.soft.get(bucketShares, d[:]) }

// SaveShare keeps what a blob shares with others, at most some 60 KiB; written
// within seconds.
func (x *Index) SaveShare(d cas.Digest, share []byte) error {
	return x.soft.put(bucketShares, d[:], share)
}

// EachShare calls fn with every share, in order of digests, and stops at its
// first error, which it returns. fn must not keep the bytes; no transaction is
// open meanwhile.
func (x *Index) EachShare(ctx context.Context, fn func(d cas.Digest, share []byte) error) error {
	if err := x.soft.flush(); err != nil {
		return err
	}
	return x.rows(ctx, bucketShares, func(key, value []byte) error {
		if len(key) != len(cas.Digest{}) {
			return nil
		}
		return fn(cas.Digest(key), value)
	})
}

// DropSharing forgets a blob's sketch and what it shares: it is looked at again,
// if it is still there.
func (x *Index) DropSharing(d cas.Digest) {
	x.soft.drop(bucketSketches, d[:])
	x.soft.drop(bucketShares, d[:])
}

// DropShare forgets what a blob shares, and keeps its sketch.
func (x *Index) DropShare(d cas.Digest) { x.soft.drop(bucketShares, d[:]) }

// EachSketch calls fn with every sketch, in order of digests, and stops at its
// first error, which it returns. The bytes are fn's to read until it returns; no
// transaction is open meanwhile.
func (x *Index) EachSketch(ctx context.Context, fn func(d cas.Digest, sketch []byte) error) error {
	if err := x.soft.flush(); err != nil {
		return err
	}
	for after := []byte(nil); ; {
		keys, err := read(x.db, func(tx *bbolt.Tx) ([][]byte, error) { return keysFrom(tx, bucketSketches, nil, after, page) })
		if err != nil {
			return err
		}
		for _, key := range keys {
			v, ok := x.soft.get(bucketSketches, key)
			if err := ctx.Err(); err != nil {
				return err
			}
			if !ok || len(key) != len(cas.Digest{}) {
				continue
			}
			if err := fn(cas.Digest(key), v); err != nil {
				return err
			}
		}
		if len(keys) < page {
			return nil
		}
		after = keys[len(keys)-1]
	}
}

// UnpackedStamps remembers the stamps of unpacked blobs, which are other files
// than those that LoadStamp is about.
func (x *Index) UnpackedStamps() cas.StampBook { return stamps{x, bucketUnpacked} }

// RecipeStamps remembers the stamps of recipes of which it was proven that they
// give their blobs, by the digests of these.
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
