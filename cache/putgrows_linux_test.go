package cache

import (
	"context"
	"os"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
)

// A file that grows when it has been announced is refused: its place was set aside for what it was.
func TestAFileThatGrowsAfterItWasAnnouncedIsRefused(t *testing.T) {
	b := newBench(t)
	cl := newClaimed(b, nil)
	next := b.options()
	next.Space = store.SpaceOptions{Budget: store.Amount{Bytes: 4 << 20}}
	require.NoError(t, b.cache.Reload(next))
	var grown atomic.Bool
	_, err := b.cache.Claims.Put(context.Background(), request.Peer{UID: stranger}, cl.put,
		func(p request.Progress) {
			if p.Phase == "reading" && grown.CompareAndSwap(false, true) {
				if err := os.Truncate(cl.put.Files[1].File.Name(), 0); err == nil {
					_ = os.WriteFile(cl.put.Files[1].File.Name(), make([]byte, 8<<20), 0o644)
				}
			}
		})
	require.True(t, grown.Load())
	require.ErrorContains(t, err, "changed")
	require.Equal(t, apierr.BadRequest, apierr.ClassOf(err))
	require.Less(t, b.account().Disk, int64(4<<20))
}
