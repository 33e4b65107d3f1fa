package cache

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/store"
)

// A user with a quota of one and a half builds asks for a second one.
func TestAQuotaKeepsTheNewestOrReportsThatItDoesNot(t *testing.T) {
	quota := func(b *bench, builds float64) (first *request.Answer) {
		first = b.acquire(b.held(1))
		size := int64(0)
		for _, f := range first.Build.Files {
			size += f.Size
		}
		next := b.options()
		next.Space.UserBytes = store.Amount{Bytes: int64(float64(size) * builds)}
		require.NoError(b, b.cache.Reload(next))
		return first
	}
	t.Run("the first goes, though it pays more", func(t *testing.T) {
		b := newBench(t)
		first := quota(b, 1.5)
		require.NoError(t, first.View.Close())
		for range 9 {
			b.use(1)
		}
		second := b.use(2)
		require.Empty(t, second.Warnings)
		require.Eventually(t, func() bool { return len(b.list()) == 1 }, soon, time.Millisecond)
		require.Equal(t, second.Build.ID, b.list()[0].Build.ID)
		require.Equal(t, request.Hit, b.use(2).Outcome)
	})
	t.Run("the first is in use", func(t *testing.T) {
		b := newBench(t)
		first := quota(b, 1.5)
		defer first.View.Close()
		second := b.use(2)
		require.Len(t, second.Warnings, 1)
		require.Contains(t, second.Warnings[0], "not stored: it has ")
		require.Contains(t, second.Warnings[0], " with this build; ")
		require.Contains(t, second.Warnings[0], "of them are pinned, in use or served recently")
		require.Equal(t, first.Build.ID, b.list()[0].Build.ID)
		require.Empty(t, b.cache.index.Journal.Tombstones(nil))
	})
	t.Run("nothing goes for what never fits", func(t *testing.T) {
		b := newBench(t)
		require.NoError(t, quota(b, 1.5).View.Close())
		path := filepath.Join(t.TempDir(), "large.onnx")
		require.NoError(t, os.WriteFile(path, compilertest.Dense(3, 256, 1), 0o644))
		r := b.request(b.openFile(path))
		r.KeepsView = true
		large := b.acquire(r)
		require.NoError(t, large.View.Close())
		require.Len(t, large.Warnings, 1)
		require.Contains(t, large.Warnings[0], "not stored: it has ")
		rounds := func() uint64 {
			begun, done := b.cache.Store.Ledger().CountLacking(0, 0)
			done()
			return begun
		}
		// the collector has looked
		for begun := rounds(); rounds() < begun+2; time.Sleep(time.Millisecond) {
			b.cache.Store.Ledger().WakeCollector()
		}
		require.Empty(t, b.cache.index.Journal.Tombstones(nil))
		require.Equal(t, request.Hit, b.use(1).Outcome)
	})
}
