package cache

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/store"
)

// Background packing is aborted for a caller that waits for the lock, however much is left, and is
// retried later.
func TestBackgroundPackingReleasesTheLockForWaiters(t *testing.T) {
	b := newBench(t)
	builds, files := b.similar(2)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	kept := b.cache.packing
	var comes sync.Once
	had := make(chan struct{})
	freed, err := b.cache.Store.Packer().PackBuildWith(ctx, builds[1].ID,
		store.Packing{When: store.PackAlways}, func(ctx context.Context) error {
			comes.Do(func() {
				go func() {
					leave, err := kept.LockRepresentation(ctx)
					if assert.NoError(t, err) {
						close(had)
						leave()
					}
				}()
				for !kept.LockContended() {
					time.Sleep(time.Millisecond)
				}
			})
			return b.cache.Store.Packer().AwaitIdleLocked(ctx)
		})
	require.NoError(t, err)
	require.Zero(t, freed)
	require.False(t, kept.OnlyPacked(large(builds[1])))
	<-had
	require.NoError(t, b.cache.Store.Packer().Pack(ctx, store.Packing{When: store.PackAlways}))
	require.True(t, kept.OnlyPacked(large(builds[1])))
	a := b.acquire(b.variant(2))
	require.Equal(t, files[1], b.read(a))
	require.NoError(t, a.View.Close())
}
