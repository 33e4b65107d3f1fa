package index

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/bbolt"
)

func TestFailuresOutliveARestart(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	want := make(map[string][]byte)
	for i := range 3 * page { // several pages
		key := fmt.Sprintf("key %03d", i)
		want[key] = fmt.Appendf(nil, "value %d", i)
		require.NoError(t, x.SaveFailure([]byte(key), want[key]))
	}
	x.DropFailure([]byte("key 007"))
	delete(want, "key 007")
	for range 2 {
		got, err := x.Failures()
		require.NoError(t, err)
		require.Equal(t, want, got)
		closeSound(t, x)
		x = open(t, dir)
	}
	closeSound(t, x)
}

// A database that an earlier epcached wrote has no failures, and everything else is kept.
func TestDatabaseFromBeforeFailures(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	b := publish(t, x)
	require.NoError(t, x.SaveMemo([]byte("k"), []byte("v")))
	require.NoError(t, x.Close())
	require.NoError(t, inDatabase(filepath.Join(dir, "index.db"), func(tx *bbolt.Tx) error { return tx.DeleteBucket(bucketFailures) }))
	x = open(t, dir)
	require.Empty(t, x.Rebuilt())
	memo, ok := x.Memo([]byte("k"))
	require.True(t, ok)
	require.Equal(t, "v", string(memo))
	got, err := x.Lookup(b.RequestKey, b.Scope)
	require.NoError(t, err)
	require.Len(t, got, 1)
	require.NoError(t, x.SaveFailure([]byte("k"), []byte("v")))
	failures, err := x.Failures()
	require.NoError(t, err)
	require.Len(t, failures, 1)
	closeSound(t, x)
}
