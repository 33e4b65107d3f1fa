package cache

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/epcached/epcached/cache/request"
	"github.com/stretchr/testify/require"
)

// After everything was removed no file of a model is left, neither leftovers of a crash nor the
// quarantine.
func TestRemoveAllLeavesNothing(t *testing.T) {
	b := newBench(t)
	<-b.cache.sweptUnpacked // a start removes unneeded blobs, and the test is to
	a := b.acquire(b.request(b.model(1)))
	require.NoError(t, a.View.Close())
	put := b.cache.cas.Hold()
	_, _, err := put.Put(context.Background(),
		strings.NewReader("of a put that was never acknowledged"))
	put.Release()
	require.NoError(t, err)
	require.NoError(t,
		os.WriteFile(b.cache.path("quarantine", "20260101-x"), []byte("damaged"), 0o600))

	me := request.Peer{UID: b.cache.uid}
	would, err := b.cache.Remove(context.Background(), me, nil, true, true)
	require.NoError(t, err)
	require.Len(t, b.list(), 1, "a dry run")
	freed, err := b.cache.Remove(context.Background(), me, nil, true, false)
	require.NoError(t, err)
	require.Equal(t, would.FreedBytes, freed.FreedBytes, "a dry run reports it")
	for _, dir := range []string{"objects", "manifests", "views", "staging", "quarantine"} {
		err := filepath.WalkDir(b.cache.path(dir),
			func(path string, d fs.DirEntry, err error) error {
				if err == nil {
					require.False(t, d.Type().IsRegular(), path)
				}
				return err
			})
		require.NoError(t, err)
	}
}
