package cache

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
)

func TestSecondCacheOnOneState(t *testing.T) {
	b := newBench(t)
	_, err := Open(b.state, Options{Compiler: b.compiler})
	var locked *store.LockedError
	require.ErrorAs(t, err, &locked)
	require.Equal(t, fmt.Sprintf("process %d", os.Getpid()), locked.Holder)
}

func TestBlobsOfANewerVersionStay(t *testing.T) {
	b := newBench(t)
	a := b.acquire(b.request(b.model(1)))
	b.close()
	manifest := filepath.Join(b.state, "manifests", a.Build.ID.String()[:2], a.Build.ID.String())
	text, err := os.ReadFile(manifest)
	require.NoError(t, err)
	require.NoError(t, os.Remove(manifest))
	text[8] = 0xff // the version, see doc/format.md
	newer := index.BuildID{1, 2, 3}.String()
	shard := filepath.Join(b.state, "manifests", newer[:2])
	require.NoError(t, os.MkdirAll(shard, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(shard, newer), text, 0o600))
	b.open()
	require.False(t, b.cache.index.Complete())
	removed, err := b.cache.packing.Remove(a.Build.Files[1].Digest)
	require.NoError(t, err)
	require.Zero(t, removed,
		"after an upgrade is taken back, the newer version's builds are not this one's to judge")
	require.NoError(t, b.cache.Store.RemoveLeftovers(context.Background()))
	require.True(t, b.cache.cas.Has(a.Build.Files[1].Digest))
}
