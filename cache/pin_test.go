package cache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
)

func TestPins(t *testing.T) {
	b := newBench(t)
	other := request.Peer{UID: b.cache.uid + 1}
	shared := b.acquire(b.request(b.model(1)))
	private := b.request(b.model(2))
	private.Peer, private.Store = other, "user"
	own := b.acquire(private)
	ctx := context.Background()
	pinned := func() (n int) {
		for _, l := range b.list() {
			if l.row.Pinned {
				n++
			}
		}
		return n
	}

	_, err := b.cache.Pin(ctx, request.Peer{UID: b.cache.uid}, []string{"nothing.onnx"}, false)
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
	list, err := b.cache.Pin(ctx, request.Peer{UID: b.cache.uid},
		[]string{shared.Build.BuildKey.String()}, true)
	require.NoError(t, err)
	require.Len(t, list.Builds, 1)
	require.Zero(t, pinned(), "it was a dry run")

	list, err = b.cache.Pin(ctx, other, []string{own.Build.ModelName}, false)
	require.NoError(t, err)
	require.Len(t, list.Builds, 1)
	require.True(t, list.Builds[0].Pinned)
	b.reopen()
	require.Equal(t, 1, pinned())

	b.acquire(b.request(b.model(1)))
	b.cache.Rights.RecordSeen(other, shared.Build)
	_, err = b.cache.Pin(ctx, other, []string{shared.Build.BuildKey.String()}, false)
	require.Equal(t, apierr.NotAllowed, apierr.ClassOf(err), "it is everybody's")
	_, err = b.cache.Unpin(ctx, request.Peer{UID: b.cache.uid},
		[]string{own.Build.BuildKey.String()}, false)
	require.NoError(t, err)
	require.Zero(t, pinned())
}

func TestPinMovesToTheRecompiledBuild(t *testing.T) {
	b := newBench(t)
	r := b.request(b.model(1))
	first := b.acquire(r)
	_, err := b.cache.Pin(context.Background(), r.Peer, []string{first.Build.BuildKey.String()},
		false)
	require.NoError(t, err)
	r.OnMiss = request.Refresh
	second := b.acquire(r)
	require.NotEqual(t, first.Build.ID, second.Build.ID)
	list := b.list()
	require.Len(t, list, 1)
	require.True(t, list[0].row.Pinned)
}
