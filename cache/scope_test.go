package cache

import (
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestScopes(t *testing.T) {
	b := newBench(t)
	alice, bob := request.Peer{UID: 4001}, request.Peer{UID: 4002}
	private := func(p request.Peer, seed uint64) *request.Request {
		r := b.request(b.model(seed))
		require.NoError(t, os.Chmod(r.Graph.Name(), 0o600))
		r.Peer = p
		return r
	}
	shared := func(p request.Peer, seed uint64) *request.Request {
		r := b.request(b.model(seed))
		r.Peer = p
		return r
	}
	require.Equal(t, "uid:4001", b.acquire(private(alice, 1)).Build.Scope)
	require.Equal(t, request.Compiled, b.acquire(private(bob, 1)).Outcome,
		"another user's private build is no hit")
	require.Equal(t, "shared", b.acquire(shared(alice, 2)).Build.Scope)
	require.Equal(t, request.Hit, b.acquire(private(bob, 2)).Outcome,
		"whoever has the bytes gets what is shared")
	unnamed := shared(alice, 4)
	require.NoError(t, os.Remove(unnamed.Graph.Name())) // as a memfd is: mode 0644, and no name
	require.Equal(t, "uid:4001", b.acquire(unnamed).Build.Scope)
	require.NoError(t, b.remove(b.acquire(unnamed).Build))
	page, err := b.cache.Queries.List(context.Background(), alice, &wire.List{}, nil)
	require.NoError(t, err)
	require.Len(t, page.Builds, 2)
	b.acquire(shared(bob, 3))
	page, err = b.cache.Queries.List(context.Background(), alice, &wire.List{}, nil)
	require.NoError(t, err)
	require.Len(t, page.Builds, 2, "a shared build that alice never had is not listed to her")
	_, err = b.cache.Invalidate(context.Background(), alice, []string{page.Builds[0].Build}, "",
		false)
	if page.Builds[0].Scope == "shared" {
		require.Equal(t, apierr.NotAllowed, apierr.ClassOf(err))
	} else {
		require.NoError(t, err)
	}
}
