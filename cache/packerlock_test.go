package cache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Background work pauses during a request, and ends if its lock is needed for that: by the
// collector, which the request waits for.
func TestRunningPackerDoesNotWaitForItsSuccessor(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	defer b.cache.Store.Packer().BeginRequest()()
	leave, err := b.cache.packing.LockRepresentation(ctx)
	require.NoError(t, err)
	shut, stop := context.WithTimeout(ctx, 100*time.Millisecond)
	defer stop()
	require.ErrorIs(t, b.cache.Store.Packer().AwaitIdle(shut), context.DeadlineExceeded,
		"somebody asks, and nobody waits for the turn")
	taken := make(chan error, 1)
	go func() {
		leave, err := b.cache.packing.LockRepresentation(ctx)
		if err == nil {
			leave()
		}
		taken <- err
	}()
	require.NoError(t, b.cache.Store.Packer().AwaitIdle(ctx))
	leave()
	require.NoError(t, <-taken)
}
