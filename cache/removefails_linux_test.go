package cache

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/epcached/epcached/cache/request"
	"github.com/stretchr/testify/require"
)

// The view of an earlier run is opened for a removal, which may fail.
func TestAFailedRemovalClosesTheViewOfAnEarlierRun(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	require.NoError(t, a.View.Close())
	b.reopen()
	id := a.Build.ID.String()
	manifests, err := filepath.Glob(filepath.Join(b.state, "manifests", "*", "*"+id[2:]+"*"))
	require.NoError(t, err)
	require.Len(t, manifests, 1)
	require.NoError(t, os.Remove(manifests[0]))
	require.NoError(t, os.MkdirAll(filepath.Join(manifests[0], "no file"), 0o700))
	_, err = b.cache.Remove(context.Background(), request.Peer{}, nil, true, false)
	require.Error(t, err)
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, fd := range fds {
		to, _ := os.Readlink("/proc/self/fd/" + fd.Name())
		require.False(t, strings.HasPrefix(to, a.Path), to)
	}
}
