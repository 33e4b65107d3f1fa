package cache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/refusal"
)

func TestRemove(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	files := b.read(a)
	me := Peer{UID: b.cache.uid}
	would, err := b.cache.Remove(context.Background(), me, []string{"model.onnx"}, false, true)
	require.NoError(t, err)
	require.Len(t, would.Builds, 1)
	require.Len(t, b.list(), 1, "a dry run changes nothing")
	really, err := b.cache.Remove(context.Background(), me, []string{"model.onnx"}, false, false)
	require.NoError(t, err)
	require.Equal(t, would.FreedBytes, really.FreedBytes)
	require.Positive(t, really.FreedBytes)
	require.Empty(t, b.list())
	require.Equal(t, files, b.read(a), "who holds the view goes on with it")
	require.NoError(t, a.View.Close())
	b.cache.views.Sweep()
	require.NoDirExists(t, a.Path)
	require.Equal(t, Compiled, b.acquire(b.request(b.model(1))).Outcome)
	_, err = b.cache.Remove(context.Background(), me, []string{"nothing-like-that"}, false, false)
	require.Equal(t, refusal.NotFound, refusal.ClassOf(err))
}

func TestInvalidate(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	_, err := b.cache.Invalidate(context.Background(), Peer{UID: b.cache.uid}, []string{a.RequestKey.String()[:12]}, "looks wrong", false)
	require.NoError(t, err)
	b.reopen()
	again := b.acquire(b.request(b.model(1)))
	require.Equal(t, Compiled, again.Outcome)
	require.Contains(t, again.Why, "looks wrong")
}
