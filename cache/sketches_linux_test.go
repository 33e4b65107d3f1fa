package cache

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/dedupe/match"
)

// Sketches of another version are replaced, for builds' blobs and for bases that only recipes need,
// and so are the matches that they led to.
func TestSketchesOfAnotherVersionAreReplaced(t *testing.T) {
	b, builds, _ := packedPair(t)
	build, base := large(b.acquire(b.variant(3)).Build), large(builds[0])
	literals := b.literalsOf(large(builds[1]))
	for _, d := range []cas.Digest{build, base, literals} {
		if d == build {
			_, err := b.cache.packing.Sharing.Examine(context.Background(), d, nil)
			require.NoError(t, err)
		}
		raw, ok := b.cache.index.Sketches.Get(d[:])
		require.True(t, ok)
		require.NoError(t,
			b.cache.index.Sketches.Save(d[:], append([]byte{raw[0] + 1}, raw[1:]...)))
		// it shares nothing
		require.NoError(t,
			b.cache.index.Shares.Save(d[:], append([]byte{3, 0}, make([]byte, 8)...)))
		require.True(t, b.cache.packing.Sharing.IsKnown(d))
	}
	require.NoError(t,
		b.cache.packing.Sharing.RefreshSketches(context.Background(),
			b.cache.Store.Packer().AwaitIdle))
	for _, d := range []cas.Digest{base, literals} {
		b.requireSketch(d)
	}
	todo, err := b.cache.Store.Packer().UnknownBlobs(context.Background())
	require.NoError(t, err)
	require.Contains(t, todo, build)
	_, err = b.cache.packing.Sharing.Examine(context.Background(), build, nil)
	require.NoError(t, err)
	b.requireSketch(build)
}

// requireSketch finds a sketch of this version in the index.
func (b *bench) requireSketch(d cas.Digest) {
	b.Helper()
	raw, ok := b.cache.index.Sketches.Get(d[:])
	require.True(b, ok)
	_, err := match.DecodeSketch(raw)
	require.NoError(b, err)
}

func (b *bench) literalsOf(d cas.Digest) cas.Digest {
	p, ok := b.cache.packing.Recipes.Has(d)
	require.True(b, ok)
	require.NotEqual(b, dedupe.NoLiterals, p.Literals)
	return p.Bases[p.Literals].Digest
}
