package cache

import (
	"context"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
)

// Published builds are surveyed in the background, and packed as soon as they are cold; a restart
// continues where the last run ended.
func TestBuildsArePackedByThemselves(t *testing.T) {
	b := newBenchWith(t, func(o *Options) { o.Pack, o.PackAfter = store.PackCold, time.Hour })
	var builds []*index.Build
	var files []map[string]string
	for i := range 3 {
		a := b.acquire(b.variant(i + 1))
		builds, files = append(builds, a.Build), append(files, b.read(a))
		require.NoError(t, a.View.Close())
		if i == 1 {
			b.reopen() // in the middle of it, for all anybody knows
		}
	}
	looked := func() bool {
		for _, build := range builds {
			d := large(build)
			if _, ok := b.cache.index.Shares.Get(d[:]); !ok {
				return false
			}
		}
		return true
	}
	require.Eventually(t, looked, 2*time.Minute, 5*time.Millisecond)
	for _, build := range builds {
		require.False(t, b.cache.packing.OnlyPacked(large(build)), "it was just made")
	}
	b.later.Add(int64(2 * time.Hour))
	b.reopen()
	require.Eventually(t, func() bool {
		return b.cache.packing.OnlyPacked(large(builds[1])) &&
			b.cache.packing.OnlyPacked(large(builds[2]))
	}, 20*time.Second, 5*time.Millisecond)
	require.False(t, b.cache.packing.OnlyPacked(large(builds[0])), "it is their base")
	for i := range builds {
		a := b.acquire(b.variant(i + 1))
		require.Equal(t, request.Hit, a.Outcome)
		require.Equal(t, files[i], b.read(a))
	}
	require.EqualValues(t, 3, b.compiler.Compiles.Load())
}

// During requests the background reads no blobs.
func TestGateIsShutDuringRequests(t *testing.T) {
	b := newBench(t)
	done := b.cache.Store.Packer().BeginRequest()
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, b.cache.Store.Packer().AwaitIdle(ctx), context.DeadlineExceeded)
	done()
	require.NoError(t, b.cache.Store.Packer().AwaitIdle(context.Background()))
}

func TestAPinnedOrWarmBuildIsNotPackedByItself(t *testing.T) {
	b := newBench(t)
	builds, _ := b.similar(3)
	_, err := b.cache.Pin(context.Background(), b.self(), []string{builds[1].BuildKey.String()},
		false)
	require.NoError(t, err)
	s := b.cache.Store.Packer()
	require.NoError(t,
		s.Pack(context.Background(), store.Packing{When: store.PackCold, After: 2 * time.Hour}))
	require.False(t, b.cache.packing.OnlyPacked(large(builds[2])), "an hour is not two")
	b.later.Add(int64(2 * time.Hour))
	require.NoError(t,
		s.Pack(context.Background(), store.Packing{When: store.PackCold, After: 2 * time.Hour}))
	require.True(t, b.cache.packing.OnlyPacked(large(builds[2])))
	require.False(t, b.cache.packing.OnlyPacked(large(builds[1])), "pinned")
}

// A copy that was made for a request is removed when its build is cold again.
func TestUnusedUnpackedCopyIsRemoved(t *testing.T) {
	b, builds, files := packedPair(t)
	s, ctx := b.cache.Store.Packer(), context.Background()
	unpacked := func() int64 {
		_, _, bytes := b.cache.packing.Bytes(large(builds[1]))
		return bytes
	}
	for _, mode := range []string{store.PackCold, store.PackAlways} {
		a := b.acquire(b.variant(2))
		require.Equal(t, files[1], b.read(a))
		b.later.Add(int64(90 * time.Minute))
		require.NoError(t, s.Pack(ctx, store.Packing{When: mode, After: time.Hour}))
		require.Positive(t, unpacked(), "it is held")
		require.NoError(t, a.View.Close())
		require.NoError(t, s.Pack(ctx, store.Packing{When: mode, After: 2 * time.Hour}))
		require.Positive(t, unpacked(), "it was used")
		require.NoError(t, s.Pack(ctx, store.Packing{When: mode, After: time.Hour}))
		require.Zero(t, unpacked())
	}
	require.Equal(t, files[1], b.read(b.acquire(b.variant(2))))
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
}

// The bytes that a large variant shares are found whether its sketch is known or not.
func TestALargeVariantIsComparedWithItsSketchKnownOrNot(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	builds, _ := b.stores([]*request.Request{b.dense(2100, 1), b.dense(2100, 2)})
	d := large(builds[1])
	for _, known := range []bool{true, false} {
		if !known {
			b.cache.index.Sketches.Drop(d[:])
			b.cache.index.Shares.Drop(d[:])
		}
		m, err := b.cache.packing.Sharing.Match(ctx, d, nil)
		require.NoError(t, err)
		require.NotNil(t, m)
		m.Close()
		require.Greater(t, m.Plan.Size, int64(16<<20))
		found, err := b.cache.packing.Sharing.Examine(ctx, d, nil)
		require.NoError(t, err)
		require.Equal(t, large(builds[0]), found.From[0])
		require.Positive(t, found.Saving)
	}
}

// quietSharing makes a cache with no background packing any more, after all blobs were surveyed.
func quietSharing(t *testing.T, builds int) (*bench, []*index.Build) {
	b := newBenchWith(t, func(o *Options) { o.Pack, o.PackAfter = store.PackCold, time.Hour })
	var out []*index.Build
	for i := range builds {
		a := b.acquire(b.variant(i + 1))
		out = append(out, a.Build)
		require.NoError(t, a.View.Close())
	}
	b.cache.Store.Packer().RequestSweep()
	b.cache.Store.Packer().Sweep(context.Background())
	return b, out
}

// The scan every ten minutes reads only changes, not the whole store. A blob that was made whole
// again has changed.
func TestPeriodicScanReadsOnlyChanges(t *testing.T) {
	b, builds := quietSharing(t, 2)
	ctx, s := context.Background(), b.cache.Store.Packer()
	packed := large(builds[1])
	b.later.Add(int64(2 * time.Hour))
	s.RetrySweep()
	allToRead, _ := s.Pending()
	require.False(t, allToRead)
	s.Sweep(ctx)
	require.True(t, b.cache.packing.OnlyPacked(packed), "it is cold")
	_, known := b.cache.index.Shares.Get(packed[:])
	require.False(t, known)
	s.RetrySweep()
	s.Sweep(ctx) // of what was packed there is nothing to be found out

	_, err := b.cache.Unpack(ctx, b.self(), []string{builds[1].BuildKey.String()}, false, false,
		nil)
	require.NoError(t, err)
	require.False(t, b.cache.packing.OnlyPacked(packed))
	s.RetrySweep()
	allToRead, _ = s.Pending()
	require.False(t, allToRead)
	s.Sweep(ctx)
	require.True(t, b.cache.packing.Sharing.IsKnown(packed) ||
		b.cache.packing.OnlyPacked(packed), "looked at again")
}

// Storing one build does not scan all blobs for packing; that is done periodically.
func TestAStoredBuildHasNothingElsePacked(t *testing.T) {
	b, builds := quietSharing(t, 2)
	b.later.Add(int64(2 * time.Hour))
	s := b.cache.Store.Packer()
	s.EnqueueBuild(builds[0])
	s.Sweep(context.Background())
	require.False(t, b.cache.packing.OnlyPacked(large(builds[1])))
	s.RetrySweep()
	s.Sweep(context.Background())
	require.True(t, b.cache.packing.OnlyPacked(large(builds[1])))
}

// badDisk opens no file of a name while that is set.
type badDisk struct {
	cas.OS
	name atomic.Pointer[string]
}

func (d *badDisk) Open(path string) (*os.File, error) {
	if name := d.name.Load(); name != nil && strings.HasSuffix(path, *name) {
		return nil, syscall.EMFILE
	}
	return d.OS.Open(path)
}

// A blob that could not be looked at is tried again with the next tick.
func TestFailedComparisonIsRetried(t *testing.T) {
	b, builds := quietSharing(t, 1)
	disk, change := &badDisk{}, b.change
	b.change = func(o *Options) { change(o); o.fs = disk }
	b.reopen()
	ctx, s, d := context.Background(), b.cache.Store.Packer(), large(builds[0])
	s.RequestSweep()
	s.Sweep(ctx)
	name := d.String()
	disk.name.Store(&name)
	b.cache.index.Sketches.Drop(d[:])
	b.cache.index.Shares.Drop(d[:])
	s.EnqueueChanged(d)
	s.Sweep(ctx)
	_, failed := s.Pending()
	require.Equal(t, []cas.Digest{d}, failed)
	disk.name.Store(nil)
	s.Sweep(ctx)
	require.False(t, b.cache.packing.Sharing.IsKnown(d), "not before the tick")
	s.RetrySweep()
	allToRead, _ := s.Pending()
	require.False(t, allToRead)
	s.Sweep(ctx)
	require.True(t, b.cache.packing.Sharing.IsKnown(d))
	_, failed = s.Pending()
	require.Empty(t, failed)
}
