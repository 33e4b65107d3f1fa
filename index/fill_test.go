package index

import (
	"bytes"
	"context"
	"math/rand/v2"
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
	require.NoError(t, x.rows(context.Background(), bucket, func(key, value []byte) error {
		out[string(key)] = string(value)
		return nil
	}))
	return out
}

// A database that is made of the manifests has the rows of one that took the builds in one after the other.
func TestAFilledDatabaseIsTheOneThatGrew(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	for i := range byte(40) {
		publish(t, x, func(b *Build) {
			b.RequestKey, b.BuildKey, b.UID, b.Put = RequestKey{i % 7, 1}, BuildKey{i}, uint32(i%3), i%5 == 0
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
	made := []([]byte){bucketBuilds, bucketRequests, bucketNames, bucketBlobs, bucketBriefs, bucketUsers}
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

// Who waits for a database that is made is told how far it is, up to the end.
func TestMakingADatabaseIsTold(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	publish(t, x)
	closeSound(t, x)
	require.NoError(t, os.Remove(filepath.Join(dir, "index.db")))
	at := time.Unix(1e9, 0)
	var told []int
	x, err := Open(dir, Options{now: func() time.Time { at = at.Add(2 * tellFill); return at }, Making: func(builds uint64, percent int) {
		require.LessOrEqual(t, builds, uint64(1))
		told = append(told, percent)
	}})
	require.NoError(t, err)
	require.False(t, x.Making(), "it is there")
	require.True(t, slices.IsSorted(told))
	require.GreaterOrEqual(t, len(told), 256, "once for each folder, at the least")
	require.LessOrEqual(t, told[len(told)-1], 100)
	require.NoError(t, x.Close())
}

// Rows come out in order whatever they come in, and as many as came, also where memory does not hold them.
func TestRowsAreSorted(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	spilled := spill{fs: cas.OS{}, path: filepath.Join(memoryDir(t), "rows")}
	s := sorter{of: byFirstByte, spill: &spilled}
	var want, got []string
	for i := range 4000 {
		key := make([]byte, 20+random.IntN(40))
		for j := range key {
			key[j] = byte(random.Uint32())
		}
		key[0] %= 3 // into three parts, of more than memory holds
		require.NoError(t, s.add(key, byte(i), byte(i>>8)))
		want = append(want, string(key)+string([]byte{byte(i), byte(i >> 8)}))
	}
	require.Positive(t, spilled.size)
	require.NoError(t, s.each(func(rows []sortRow) error {
		for _, r := range rows {
			got = append(got, string(r.key)+string(r.value))
		}
		return nil
	}))
	slices.Sort(want)
	require.True(t, slices.Equal(want, got), "%d rows came, %d went", len(want), len(got))
	require.NoError(t, spilled.close())
	_, err := os.Stat(spilled.path)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// A bucket of several pages is read in order and whole, from anywhere on, and no further than is wanted.
func TestALongBucketIsReadPageByPage(t *testing.T) {
	x := open(t, memoryDir(t))
	const rows = 3*scanRows + 5
	require.NoError(t, x.db.write(func(tx *bbolt.Tx) error {
		for i := range uint64(rows) {
			if err := put(tx, bucketMemo, bigEndian(i), numbers(i)); err != nil {
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
		require.NoError(t, x.rowsAfter(context.Background(), bucketMemo, after, func(key, value []byte) error {
			require.Equal(t, bigEndian(next), key)
			require.Equal(t, numbers(next), value)
			next++
			return nil
		}))
		require.EqualValues(t, rows, next)
	}
	n := 0
	require.ErrorIs(t, x.rows(context.Background(), bucketMemo, func([]byte, []byte) error {
		if n++; n == scanRows+3 {
			return os.ErrExist
		}
		return nil
	}), os.ErrExist)
	ctx, stop := context.WithCancel(context.Background())
	require.ErrorIs(t, x.rows(ctx, bucketMemo, func([]byte, []byte) error { stop(); return nil }), context.Canceled)
	closeSound(t, x)
}

func bigEndian(i uint64) []byte {
	b := numbers(i)[:8:8]
	slices.Reverse(b)
	return bytes.Clone(b)
}
