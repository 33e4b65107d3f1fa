package cache

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// A blob that was packed or unpacked just before a crash is accounted for by the next start.
func TestTheAccountIsCorrectedAfterACrash(t *testing.T) {
	b := newBench(t)
	d := large(b.use(1).Build)
	b.use(2)
	path := filepath.Join(b.state, "objects", d.String()[:2], d.String())
	require.NoError(t, os.Rename(path, path+".away")) // as if it were packed, for a moment
	require.NoError(t, b.cache.index.Remeasure(d))
	require.NoError(t, os.Rename(path+".away", path))
	accounted := func() int64 {
		disk, _, err := b.cache.index.DiskBytes(d)
		require.NoError(t, err)
		return disk
	}
	require.Zero(t, accounted())
	b.reopen()
	require.Eventually(t, func() bool { return accounted() == cas.Block }, soon, time.Millisecond)
	b.exact()
}

// A crash right after an eviction leaves the tombstone and no event: why reports the eviction
// anyway.
func TestWhyReadsTheTombstoneWithoutAnEvent(t *testing.T) {
	b, builds := stored(t, 2)
	gone := &builds[0]
	id := gone.ID.String()
	dir := filepath.Join(b.state, "manifests", id[:2])
	require.NoError(t, os.Rename(dir, dir+".away")) // the tombstone is all that is written
	change := &index.Change{ID: gone.ID,
		Tombstone: &index.Tombstone{BuildID: gone.ID, RequestKey: gone.RequestKey,
			BuildKey:  gone.BuildKey,
			ModelName: gone.ModelName, Scope: gone.Scope, At: b.cache.now(),
			Reason: "evicted on a day to make room"}}
	b.cache.index.Commit([]*index.Change{change})
	require.Error(t, change.Err)
	b.close()
	require.NoError(t, os.Rename(dir+".away", dir))
	require.NoError(t, os.Remove(filepath.Join(dir, id)))
	b.open()
	why, err := b.cache.Queries.Why(context.Background(), b.self(), gone.BuildKey.String())
	require.NoError(t, err)
	require.Equal(t, "no build is left; the last event: evicted on a day to make room",
		why.Reason)
	other := b.self()
	other.UID++
	_, err = b.cache.Queries.Why(context.Background(), other, gone.BuildKey.String())
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err), "somebody else's")
}

// The next start removes a blob that no build needs, whatever files are beside it.
func TestStartRemovesLeftoverBlobs(t *testing.T) {
	b := newBench(t)
	needed := large(b.use(1).Build)
	left := needed
	left[31] ^= 1
	path := func(d cas.Digest) string {
		return filepath.Join(b.state, "objects", d.String()[:2],
			d.String())
	}
	require.NoError(t, os.MkdirAll(filepath.Dir(path(left)), 0o700))
	require.NoError(t, os.WriteFile(path(left), []byte("nobody's"), 0o444))
	b.reopen()
	<-b.cache.sweptUnpacked
	require.NoFileExists(t, path(left))
	require.FileExists(t, path(needed))
	b.exact()
}

// A blob that is accounted for but missing is noticed too, at any position of its digest in the
// order.
func TestAccountOfMissingBlobsIsRepaired(t *testing.T) {
	b := newBench(t)
	for i := range 6 {
		b.use(uint64(i + 1))
	}
	var gone []cas.Digest
	for _, l := range b.list() {
		gone = append(gone, large(&l.Build))
	}
	away := b.state
	for _, d := range gone {
		path := filepath.Join(b.state, "objects", d.String()[:2], d.String())
		require.NoError(t, os.Rename(path, filepath.Join(away, d.String())))
		// the store is checked at the end
		defer func() { require.NoError(t, os.Rename(filepath.Join(away, d.String()), path)) }()
	}
	b.reopen()
	<-b.cache.sweptUnpacked
	for _, d := range gone {
		disk, _, err := b.cache.index.DiskBytes(d)
		require.NoError(t, err)
		require.Zero(t, disk)
	}
}
