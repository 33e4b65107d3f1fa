package index

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/bbolt"

	"github.com/epcached/epcached/cas"
)

// bucketRows reads a whole bucket.
func bucketRows(t *testing.T, x *Index, bucket []byte) map[string]string {
	out := make(map[string]string)
	require.NoError(t, x.db.rows(context.Background(), bucket, func(key, value []byte) error {
		out[string(key)] = string(value)
		return nil
	}))
	return out
}

// A database that is made of the manifests has the rows of one that took the builds in one after
// the other.
func TestADatabaseThatIsMadeAgainIsTheOneThatGrew(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	for i := range byte(40) {
		publish(t, x, func(b *Build) {
			b.RequestKey, b.BuildKey, b.UID, b.Put = RequestKey{i % 7, 1}, BuildKey{i}, uint32(i%3),
				i%5 == 0
			if i%2 == 0 {
				b.Scope = "uid:7"
			}
			b.Files[1].Digest = cas.Digest{i % 4, 9} // which some share
			if i%9 == 0 {
				group(b)
				b.Members[1].AloneKey = RequestKey{i, 32}
			}
		})
	}
	made := []([]byte){bucketBuilds, bucketRequests, bucketNames, bucketBlobs, bucketBriefs,
		bucketUsers}
	grown := make([]map[string]string, len(made))
	for i, bucket := range made {
		grown[i] = bucketRows(t, x, bucket)
		require.NotEmpty(t, grown[i], "%s", bucket)
	}
	space, err := x.Space()
	require.NoError(t, err)
	closeSound(t, x)
	require.NoError(t, os.Remove(filepath.Join(dir, "index.db")))
	x = open(t, dir)
	require.Contains(t, x.Rebuilt(), "missing")
	for i, bucket := range made {
		require.Equal(t, grown[i], bucketRows(t, x, bucket), "%s", bucket)
	}
	filled, err := x.Space()
	require.NoError(t, err)
	require.Equal(t, space, filled)
	closeSound(t, x)
	left, err := filepath.Glob(filepath.Join(dir, "index.db?*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// Callers that wait for a database that is being made get its progress up to the end.
func TestRebuildingTheDatabaseReportsProgress(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	publish(t, x)
	closeSound(t, x)
	require.NoError(t, os.Remove(filepath.Join(dir, "index.db")))
	at := time.Unix(1e9, 0)
	var told []int
	x, err := Open(dir,
		Options{now: func() time.Time { at = at.Add(2 * reportLearned); return at },
			Rebuilding: func(builds uint64, percent int) {
				require.EqualValues(t, 1, builds)
				told = append(told, percent)
			}})
	require.NoError(t, err)
	require.True(t, slices.IsSorted(told))
	require.Equal(t, 100, told[len(told)-1])
	require.NoError(t, x.Close())
}

// A bucket of several pages is read in order and whole, from anywhere on, and no further than is
// wanted.
func TestALongBucketIsReadPageByPage(t *testing.T) {
	x := open(t, memoryDir(t))
	const rows = 3*scanRows + 5
	require.NoError(t, x.db.write(func(tx *bbolt.Tx) error {
		for i := range uint64(rows) {
			if err := put(tx, bucketMemo, bigEndian(i), encodeNumbers(i)); err != nil {
				return err
			}
		}
		return nil
	}))
	for _, from := range []uint64{0, 7, scanRows - 1, scanRows, 2*scanRows + 1, rows - 1, rows} {
		next := from
		var after []byte
		if from > 0 {
			after = bigEndian(from - 1)
		}
		require.NoError(t,
			x.db.rowsFrom(context.Background(), bucketMemo, nil, after,
				func(key, value []byte) error {
					require.Equal(t, bigEndian(next), key)
					require.Equal(t, encodeNumbers(next), value)
					next++
					return nil
				}))
		require.EqualValues(t, rows, next)
	}
	n := 0
	require.ErrorIs(t, x.db.rows(context.Background(), bucketMemo, func([]byte, []byte) error {
		if n++; n == scanRows+3 {
			return os.ErrExist
		}
		return nil
	}), os.ErrExist)
	ctx, stop := context.WithCancel(context.Background())
	require.ErrorIs(t,
		x.db.rows(ctx, bucketMemo, func([]byte, []byte) error { stop(); return nil }),
		context.Canceled)
	closeSound(t, x)
}

func bigEndian(i uint64) []byte {
	b := encodeNumbers(i)[:8:8]
	slices.Reverse(b)
	return bytes.Clone(b)
}

// putManifest writes a manifest as another process would.
func putManifest(t *testing.T, dir string, id BuildID, file []byte) {
	path := manifestFile(dir, id)
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, file, 0o600))
}

// putManifests writes so many manifests beside a database that does not know them.
func putManifests(t *testing.T, dir string, from, n int) (last Build) {
	for i := from; i < from+n; i++ {
		b := sampleBuild()
		binary.BigEndian.PutUint32(b.ID[:], uint32(i)*2654435761) // all over the directories
		binary.BigEndian.PutUint32(b.RequestKey[:], uint32(i))
		b.ID[15] = 1
		file, err := encodeManifest(b)
		require.NoError(t, err)
		putManifest(t, dir, b.ID, file)
		last = b
	}
	return last
}

// Manifests that were put beside a database are taken in, and what only the database knew is kept.
func TestUnknownManifestsAreTakenIn(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	stays := publish(t, x)
	goes := publish(t, x, func(b *Build) { b.RequestKey, b.BuildKey = RequestKey{7}, BuildKey{7} })
	at := time.Unix(1e9, 0).UTC()
	for _, b := range []Build{stays, goes} {
		x.Uses.Add(b.ID, at, 3, 1)
		require.NoError(t, x.Views.Save(b.ID[:], []byte("view of "+b.ID.String())))
	}
	require.NoError(t, x.Close())
	const few = differencesPage + 7 // in two transactions
	require.NoError(t, os.Remove(manifestFile(dir, goes.ID)))
	last := putManifests(t, dir, 0, few)
	x = open(t, dir)
	require.Empty(t, x.Rebuilt(), "nothing was lost")
	space, err := x.Space()
	require.NoError(t, err)
	require.EqualValues(t, 1+few, space.Builds)
	_, err = x.Get(last.ID)
	require.NoError(t, err)
	used, hits := x.Uses.LastUse(stays.ID)
	require.Equal(t, at, used)
	require.EqualValues(t, 3, hits)
	view, ok := x.Views.Get(stays.ID[:])
	require.True(t, ok)
	require.Equal(t, "view of "+stays.ID.String(), string(view))
	require.NotContains(t, bucketRows(t, x, bucketViews), string(goes.ID[:]))
	// it can be written to
	publish(t, x, func(b *Build) { b.RequestKey, b.BuildKey = RequestKey{9}, BuildKey{9} })
	closeSound(t, x)
	require.Empty(t, open(t, dir).Rebuilt())
}

// Builds that were taken in are found from then on, also where a directory needs several
// transactions.
func TestADirectoryThatWasTakenInIsNotListedAgain(t *testing.T) {
	dir := memoryDir(t)
	closeSound(t, open(t, dir))
	const n = differencesPage + 3
	var last BuildID
	for range n {
		b := sampleBuild()
		b.ID[0] = 7
		file, err := encodeManifest(b)
		require.NoError(t, err)
		putManifest(t, dir, b.ID, file)
		last = b.ID
	}
	// the times of the directory have settled
	later := func() time.Time { return time.Now().Add(2 * timeGranularity) }
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
		require.Empty(t, fs.dirs)
		require.NoError(t, x.Close())
		if want == n {
			require.NoError(t, os.Remove(manifestFile(dir, last)))
		}
	}
}
