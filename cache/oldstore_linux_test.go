package cache

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/unixsock/wire"
)

// earlierStore unpacks the store that a version wrote which had more ways to keep blobs. Of its ten
// builds, seven are packed: with a base that another one replaced, with that one, with literals in
// the recipe's own file, with nothing but those, with literals that others take from, and with a
// base that is whole and has a recipe, since the daemon was killed while that one was exchanged.
// Whole objects that are noise are not in the archive; they are made here.
func earlierStore(t *testing.T, state string) {
	require.NoError(t, os.RemoveAll(state))
	f, err := os.Open(filepath.Join("..", "testdata", "format", "v2", "store.tar.gz"))
	require.NoError(t, err)
	defer f.Close()
	unzipped, err := gzip.NewReader(f)
	require.NoError(t, err)
	for in := tar.NewReader(unzipped); ; {
		head, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		path := filepath.Join(state, head.Name)
		if head.Typeflag == tar.TypeDir {
			require.NoError(t, os.MkdirAll(path, 0o700))
			continue
		}
		content, err := io.ReadAll(in)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, content, os.FileMode(head.Mode)))
	}
	noise := func(seed byte, n int) []byte {
		out := make([]byte, n)
		_, _ = rand.NewChaCha8([32]byte{seed}).Read(out) // never fails
		return out
	}
	weights, others := noise(1, 320<<10), noise(2, 300<<10)
	for _, content := range [][]byte{
		slices.Concat(noise(12, 512), weights), slices.Concat(noise(18, 512), others),
		slices.Concat(noise(19, 512), others),
		// the literals of one that has a part twice
		slices.Concat(noise(3, 200<<10), noise(4, 70<<10)),
	} {
		name := cas.Digest(blake3.Sum256(content)).String()
		require.NoError(t, os.MkdirAll(filepath.Join(state, "objects", name[:2]), 0o700))
		require.NoError(t,
			os.WriteFile(filepath.Join(state, "objects", name[:2], name), content, 0o444))
	}
}

// A store that an earlier version wrote opens, and serves what it held, before and after it is
// packed by this one.
func TestAStoreOfAnEarlierVersionIsServed(t *testing.T) {
	ctx := context.Background()
	for _, known := range []bool{true, false} { // with its database, and without
		b := newBenchWith(t, nil)
		b.close()
		earlierStore(t, b.state)
		if !known {
			require.NoError(t, os.Remove(filepath.Join(b.state, "index.db")))
		}
		b.open()
		require.Len(t, b.cache.packing.Recipes.Users(blobNamed(t, "dc66f368", b)), 1,
			"it is half exchanged")
		framed := 0
		require.NoError(t, b.cache.packing.Recipes.Walk(ctx,
			func(d cas.Digest, _ dedupe.Packed) error {
				r, err := b.cache.packing.Recipes.Get(d)
				if err == nil && r.Frames != nil {
					framed++
				}
				return err
			}))
		require.Equal(t, 2, framed)
		serveAll := func() {
			t.Helper()
			served := 0
			require.NoError(t, b.cache.index.Each(ctx, func(build index.Build) error {
				v, err := lookup.View(ctx, b.cache.Store, &build, func(string) {})
				require.NoError(t, err)
				for _, f := range build.Files {
					content, err := os.ReadFile(filepath.Join(v.Path(), v.ID(), f.Name))
					require.NoError(t, err)
					require.Equal(t, f.Digest, cas.Digest(blake3.Sum256(content)), f.Name)
				}
				served++
				return nil
			}))
			require.Equal(t, 10, served)
		}
		serveAll()
		result, err := b.cache.Check(ctx, b.self(), &wire.Check{Deep: true}, nil)
		require.NoError(t, err)
		require.Empty(t, result.Findings)
		require.NoError(t, b.cache.Store.RemoveLeftovers(ctx))
		b.exact()
		b.later.Add(int64(30 * 24 * time.Hour))
		for range 2 {
			require.NoError(t, b.cache.Store.Packer().ReadUnknown(ctx))
			b.pass(time.Hour)
		}
		b.exact()
		serveAll()
		b.requireSound()
	}
}

// blobNamed is the blob with a digest that begins with prefix.
func blobNamed(t *testing.T, prefix string, b *bench) cas.Digest {
	found, err := filepath.Glob(filepath.Join(b.state, "objects", prefix[:2], prefix+"*"))
	require.NoError(t, err)
	require.Len(t, found, 1)
	d, err := cas.ParseDigest(filepath.Base(found[0]))
	require.NoError(t, err)
	return d
}
