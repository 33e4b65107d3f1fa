package cache

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/evict"
)

// slowly is a file system on a disk with slow syncs, which may run concurrently.
type slowly struct{ cas.OS }

const slowSync = 5 * time.Millisecond

func (s slowly) Sync(f *os.File) error { time.Sleep(slowSync); return s.OS.Sync(f) }

func (s slowly) SyncDir(path string) error { time.Sleep(slowSync); return s.OS.SyncDir(path) }

// BenchmarkEvict frees space for one large artefact by evicting 64 small builds, each of a graph
// and a context of 64 KiB: on this disk, and on one where each sync but those of bbolt takes 5 ms
// more. "evictions/s" stands beside "syncs/s", which is how often a block is appended to a file and
// synced on this disk, one after the other; "put-ms" is the longest time of a caller that put one
// small build after the other meanwhile, and "alone-ms" the same without evictions; "waited-ms" is
// the longest wait of a put for the eviction, and "worked-ms" its processor time meanwhile.
func BenchmarkEvict(b *testing.B) {
	b.Run("here", func(b *testing.B) { benchmarkEvict(b, cas.OS{}) })
	b.Run("slow", func(b *testing.B) { benchmarkEvict(b, slowly{}) })
}

func benchmarkEvict(b *testing.B, fs cas.FS) {
	const builds = 64
	ctx := context.Background()
	bench := newBench(b)
	bench.close()
	bench.state = filepath.Join(b.TempDir(), "state")
	bench.change = func(o *Options) { o.fs = fs }
	bench.open()
	c := bench.cache
	like := bench.acquire(bench.variant(1)).Build
	content := make([]byte, 64<<10)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(content)
	turn := uint32(0)
	put := func() {
		turn++
		binary.LittleEndian.PutUint32(content, turn)
		staged := filepath.Join(c.dir, "staging", jobs.NewID())
		require.NoError(b, os.Mkdir(staged, 0o700))
		build := *like
		binary.LittleEndian.PutUint32(build.RequestKey[:], turn)
		build.Files = slices.Clone(like.Files[:1])
		build.Files = append(build.Files, like.Files[0])
		build.Files[1].Name = "weights.bin"
		for i, size := range []int{2000, len(content)} {
			build.Files[i].Size = int64(size)
			require.NoError(b,
				os.WriteFile(filepath.Join(staged, build.Files[i].Name), content[:size], 0o600))
		}
		hold := c.cas.Hold()
		err := c.Store.Publish(ctx, store.Publication{Build: &build, Dir: staged, Kind: "test"},
			hold)
		hold.Release()
		require.NoError(b, err)
		c.Store.ExpectTakers(build.ID, 0) // no request waits for it
		require.NoError(b, os.RemoveAll(staged))
	}
	longest := func(until func() bool) (most time.Duration) {
		for !until() {
			began := time.Now()
			put()
			most = max(most, time.Since(began))
		}
		return most
	}
	var took, syncs, meanwhile, alone time.Duration
	var evicted int
	for b.Loop() {
		for range builds {
			put()
		}
		syncs += appends(b, bench.state, builds)
		to := int64(0)
		plan, err := c.PlanCollection(ctx, request.Peer{UID: c.uid},
			store.Goal{Bytes: &to, Urgent: true}, nil)
		require.NoError(b, err)
		began := time.Now()
		require.NoError(b, c.Store.Collector().Collect(ctx, plan, func(int64, int64) {}))
		took += time.Since(began)
		evicted += int(plan.Count(evict.Evict))

		for range builds {
			put()
		}
		plan, err = c.PlanCollection(ctx, request.Peer{UID: c.uid},
			store.Goal{Bytes: &to, Urgent: true}, nil)
		require.NoError(b, err)
		done := make(chan error, 1)
		go func() { done <- c.Store.Collector().Collect(ctx, plan, func(int64, int64) {}) }()
		meanwhile = max(meanwhile, longest(func() bool { return len(done) > 0 }))
		require.NoError(b, <-done)
		n := 0
		alone = max(alone, longest(func() bool { n++; return n > builds/2 }))
	}
	b.ReportMetric(float64(evicted)/took.Seconds(), "evictions/s")
	b.ReportMetric(float64(b.N*builds)/syncs.Seconds(), "syncs/s")
	b.ReportMetric(float64(meanwhile.Microseconds())/1000, "put-ms")
	b.ReportMetric(float64(alone.Microseconds())/1000, "alone-ms")
}

// appends appends blocks to a file, each made durable.
func appends(b *testing.B, dir string, n int) time.Duration {
	path := filepath.Join(dir, "appended")
	f, err := cas.OS{}.Create(path)
	require.NoError(b, err)
	began := time.Now()
	for i := range n {
		_, err := f.WriteAt(make([]byte, cas.Block), int64(i)*cas.Block)
		require.NoError(b, errors.Join(err, f.Sync()))
	}
	took := time.Since(began)
	require.NoError(b, errors.Join(f.Close(), os.Remove(path)))
	return took
}
