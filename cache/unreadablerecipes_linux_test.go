package cache

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

// noReads is a file system that does not give the bytes of one file while it has an error for that.
type noReads struct {
	cas.OS
	path string
	err  atomic.Pointer[syscall.Errno]
}

func (f *noReads) ReadAt(file *os.File, p []byte, off int64) (int, error) {
	if err := f.err.Load(); err != nil && file.Name() == f.path {
		return 0, &os.PathError{Op: "read", Path: f.path, Err: *err}
	}
	return f.OS.ReadAt(file, p, off)
}

// A recipe that could not be read at the start is reported as a problem, and no build is evicted
// while its bases are unknown. The read is retried before an eviction, and when its build is
// requested; until it succeeds a request compiles the model, and the build is intact afterwards.
func TestARecipeThatTheSystemDidNotGive(t *testing.T) {
	ctx := context.Background()
	fs := &noReads{}
	b := newBenchWith(t, func(o *Options) { o.fs = fs })
	builds, files := b.similar(2)
	require.Positive(t, b.pack(builds[1]))
	fs.path = b.recipePath(large(builds[1]))
	again := func() {
		b.close()
		fs.err.Store(new(syscall.EMFILE))
		b.open()
	}
	again()
	found, err := b.cache.Check(ctx, b.self(), &wire.Check{}, nil)
	require.NoError(t, err)
	require.NotEmpty(t, found.Findings)
	require.Contains(t, found.Findings[0].Detail, "it cannot be read: ")
	b.later.Add(int64(time.Hour))
	plan := b.plan(0)
	require.Empty(t, plan.Steps)
	require.NotEmpty(t, plan.Kept)
	require.Equal(t, store.KeptUnreadable, plan.Kept[0].Reason)
	require.NoError(t, b.cache.Store.RemoveLeftovers(ctx))
	require.True(t, b.cache.cas.Has(large(builds[0])))

	a := b.acquire(b.variant(2))
	require.Equal(t, request.Compiled, a.Outcome)
	require.Equal(t, files[1], b.read(a))
	require.NotEqual(t, index.Damaged, b.cache.index.Journal.StateOf(builds[1].ID).Name)

	require.NoError(t, a.View.Close())
	again()
	fs.err.Store(nil)
	b.later.Add(int64(time.Hour))
	plan = b.plan(0)
	require.NotEmpty(t, plan.Steps, "%+v", plan.Kept)
	require.True(t, b.cache.packing.Recipes.Complete())
}

// A recipe that the disk never returns is quarantined when the store is repaired: its build is
// recompiled, and builds are evicted again.
func TestARecipeThatTheDiskNeverGivesIsRepaired(t *testing.T) {
	for _, whole := range []bool{false, true} {
		ctx := context.Background()
		fs := &noReads{}
		b := newBenchWith(t, func(o *Options) { o.fs = fs })
		builds, files := b.similar(2)
		require.Positive(t, b.pack(builds[1]))
		fs.path = b.recipePath(large(builds[1]))
		f, err := b.cache.packing.Open(ctx, large(builds[1]))
		require.NoError(t, err)
		content, err := io.ReadAll(f)
		require.NoError(t, errors.Join(err, f.Close()))
		b.close()
		fs.err.Store(new(syscall.EIO))
		b.open()
		if whole { // it was being made whole when the daemon ended
			hold := b.cache.cas.Hold()
			_, _, err := hold.Put(ctx, bytes.NewReader(content))
			hold.Release()
			require.NoError(t, err)
			require.True(t, b.cache.cas.Has(large(builds[1])))
		}
		require.False(t, b.cache.packing.Recipes.Complete())
		found, err := b.cache.Check(ctx, b.self(), &wire.Check{Deep: true, Repair: true}, nil)
		require.NoError(t, err)
		require.NotEmpty(t, found.Findings)
		require.True(t, b.cache.packing.Recipes.Complete())
		require.NoFileExists(t, fs.path)
		aside, err := filepath.Glob(b.cache.path("quarantine", "*-"+large(builds[1]).String()))
		require.NoError(t, err)
		require.NotEmpty(t, aside)

		a := b.acquire(b.variant(2))
		require.Equal(t, files[1], b.read(a))
		require.NoError(t, a.View.Close())
		if whole {
			require.Equal(t, request.Hit, a.Outcome)
		} else {
			require.Equal(t, request.Compiled, a.Outcome)
			require.Contains(t, a.Why, "damaged")
		}
		found, err = b.cache.Check(ctx, b.self(), &wire.Check{Deep: true}, nil)
		require.NoError(t, err)
		require.Empty(t, found.Findings)
		b.later.Add(int64(time.Hour))
		require.NotEmpty(t, b.plan(0).Steps)
	}
}
