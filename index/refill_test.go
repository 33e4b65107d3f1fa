package index

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// putManifests writes so many manifests beside a database that does not know them.
func putManifests(t *testing.T, dir string, from, n int) (last Build) {
	for i := from; i < from+n; i++ {
		b := sampleBuild()
		binary.BigEndian.PutUint32(b.ID[:], uint32(i)*2654435761) // all over the folders
		binary.BigEndian.PutUint32(b.RequestKey[:], uint32(i))
		b.ID[15] = 1
		file, err := encodeManifest(b)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(manifestFile(dir, b.ID), file, 0o600))
		last = b
	}
	return last
}

// Where many manifests were put beside a database it is made anew in one go, and what only it knew is kept.
func TestManyUnknownManifestsAreTakenInAtOnce(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	stays := publish(t, x)
	goes := publish(t, x, func(b *Build) { b.RequestKey, b.BuildKey = RequestKey{7}, BuildKey{7} })
	at := time.Unix(1e9, 0).UTC()
	for _, b := range []Build{stays, goes} {
		require.NoError(t, x.Use(b.ID, at, 3, 1))
		require.NoError(t, x.SaveView(b.ID, "view of "+b.ID.String()))
	}
	for i := range 2*fillRows + 3 { // more than are taken over at once
		require.NoError(t, x.SaveMemo(memoKey(i), []byte("kept")))
		if i%(maxPending/2) == 0 {
			require.NoError(t, x.flush())
		}
	}
	require.NoError(t, x.SaveSketch(cas.Digest{5}, []byte("sketch")))
	require.NoError(t, x.Close())

	const few = 100
	putManifests(t, dir, 0, few)
	before, err := os.Stat(filepath.Join(dir, "index.db"))
	require.NoError(t, err)
	x = open(t, dir)
	after, err := os.Stat(filepath.Join(dir, "index.db"))
	require.NoError(t, err)
	require.True(t, os.SameFile(before, after), "a few are taken in one by one")
	closeSound(t, x)

	require.NoError(t, os.Remove(manifestFile(dir, goes.ID)))
	damageMemo(t, dir, memoKey(5))
	last := putManifests(t, dir, few, manyMissing)
	x = open(t, dir)
	after, err = os.Stat(filepath.Join(dir, "index.db"))
	require.NoError(t, err)
	require.False(t, os.SameFile(before, after))
	require.Empty(t, x.Rebuilt(), "nothing was lost")
	space, err := x.Space()
	require.NoError(t, err)
	require.EqualValues(t, 1+few+manyMissing, space.Builds)
	_, err = x.Get(last.ID)
	require.NoError(t, err)
	used, hits := x.LastUse(stays.ID)
	require.Equal(t, at, used)
	require.EqualValues(t, 3, hits)
	view, ok := x.View(stays.ID)
	require.True(t, ok)
	require.Equal(t, "view of "+stays.ID.String(), view)
	memos := bucketRows(t, x, bucketMemo)
	require.Len(t, memos, 2*fillRows+3-1, "all but the damaged one")
	for i := range 2*fillRows + 3 {
		require.Equal(t, i != 5, memos[string(memoKey(i))] != "", i)
	}
	sketch, ok := x.Sketch(cas.Digest{5})
	require.True(t, ok)
	require.Equal(t, "sketch", string(sketch))
	require.NotContains(t, bucketRows(t, x, bucketViews), string(goes.ID[:]))
	left, err := filepath.Glob(filepath.Join(dir, "index.db?*"))
	require.NoError(t, err)
	require.Empty(t, left)
	publish(t, x, func(b *Build) { b.RequestKey, b.BuildKey = RequestKey{9}, BuildKey{9} }) // it is to be written to
	closeSound(t, x)
	require.Empty(t, open(t, dir).Rebuilt())
}

// What was taken in is known from then on, also where a folder's builds take several transactions.
func TestAFolderThatWasTakenInIsNotListedAgain(t *testing.T) {
	dir := memoryDir(t)
	closeSound(t, open(t, dir))
	const n = flushPage + 3
	var last BuildID
	for range n {
		b := sampleBuild()
		b.ID[0] = 7
		file, err := encodeManifest(b)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(manifestFile(dir, b.ID), file, 0o600))
		last = b.ID
	}
	later := func() time.Time { return time.Now().Add(2 * fresh) } // the times of the folder have settled
	for _, want := range []uint64{n, n - 1} {
		x, err := Open(dir, Options{now: later})
		require.NoError(t, err)
		space, err := x.Space()
		require.NoError(t, err)
		require.Equal(t, want, space.Builds)
		closeSound(t, x)
		fs := &listed{}
		x, err = Open(dir, Options{FS: fs, now: later})
		require.NoError(t, err)
		require.Empty(t, fs.folders)
		require.NoError(t, x.Close())
		if want == n {
			require.NoError(t, os.Remove(manifestFile(dir, last)))
		}
	}
}

func memoKey(i int) []byte { return binary.BigEndian.AppendUint32([]byte("memo"), uint32(i)) }

// damageMemo writes a row that its checksum does not fit.
func damageMemo(t *testing.T, dir string, key []byte) {
	db, err := bbolt.Open(filepath.Join(dir, "index.db"), 0o600, nil)
	require.NoError(t, err)
	require.NoError(t, db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucketMemo).Put(key, make([]byte, sealSize+9)) }))
	require.NoError(t, db.Close())
}
