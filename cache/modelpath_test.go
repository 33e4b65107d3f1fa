package cache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/unixsock/wire"
)

// Where a model lies is shown to the user that sent it and to administrators, and not to other
// users of the shared build.
func TestPathsOfModelsStayWithTheirUsers(t *testing.T) {
	b := newBench(t)
	alice, bob := b.others(2001, 1), b.others(2002, 1)
	alice.Name, alice.Path = "secret/model.onnx", "/home/alice/secret/model.onnx"
	for _, r := range []*request.Request{alice, bob} {
		require.NoError(t, b.acquire(r).View.Close())
	}
	for uid, path := range map[uint32]string{2001: alice.Path, 2002: "", b.self().UID: alice.Path} {
		page, err := b.cache.Queries.List(context.Background(), request.Peer{UID: uid},
			&wire.List{}, nil)
		require.NoError(t, err)
		require.Len(t, page.Builds, 1)
		require.Equal(t, path, page.Builds[0].ModelPath, uid)
	}
}
