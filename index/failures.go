package index

import (
	"bytes"
	"fmt"

	"go.etcd.io/bbolt"
)

// maxFailures bounds how many failures are read.
const maxFailures = 1 << 14

// Failures gives every failure that was saved, as far as it was not lost, by
// its key.
func (x *Index) Failures() (map[string][]byte, error) {
	rows, err := x.softRows(bucketFailures, maxFailures)
	if err != nil {
		return nil, fmt.Errorf("failures: %w", err)
	}
	return rows, nil
}

// softRows reads all of a bucket of soft rows, up to a bound.
func (x *Index) softRows(bucket []byte, most int) (map[string][]byte, error) {
	if err := x.soft.flush(); err != nil {
		return nil, err
	}
	rows := make(map[string][]byte)
	for after := []byte(nil); len(rows) < most; {
		keys, err := read(x.db, func(tx *bbolt.Tx) ([][]byte, error) { return keysFrom(tx, bucket, nil, after, page) })
		if err != nil {
			return nil, err
		}
		for _, key := range keys {
			if v, ok := x.soft.get(bucket, key); ok {
				rows[string(key)] = bytes.Clone(v)
			}
		}
		if len(keys) < page {
			break
		}
		after = keys[len(keys)-1]
	}
	return rows, nil
}

// SaveFailure keeps what is known of a compile that failed under a key,
// together at most some 60 KiB; written within seconds.
func (x *Index) SaveFailure(key, value []byte) error { return x.soft.put(bucketFailures, key, value) }

// DropFailure forgets a failure.
func (x *Index) DropFailure(key []byte) { x.soft.drop(bucketFailures, key) }
