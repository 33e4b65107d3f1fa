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
	if err := x.soft.flush(); err != nil {
		return nil, fmt.Errorf("failures: %w", err)
	}
	rows := make(map[string][]byte)
	for after := []byte(nil); len(rows) < maxFailures; {
		keys, err := read(x.db, func(tx *bbolt.Tx) ([][]byte, error) { return keysFrom(tx, bucketFailures, nil, after, page) })
		if err != nil {
			return nil, fmt.Errorf("failures: %w", err)
		}
		for _, key := range keys {
			if v, ok := x.soft.get(bucketFailures, key); ok {
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
