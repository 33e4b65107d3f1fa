package packing

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// framed stores the recipe with compressed literals that an earlier version wrote, after harm,
// which may be nil, has changed its file, and its base.
func (b *bench) framed(harm func(file []byte)) cas.Digest {
	b.Helper()
	file, err := os.ReadFile(filepath.Join("..", "..", "testdata", "format", "v2", "recipe"))
	require.NoError(b, err)
	d := cas.Digest(file[16:48])
	if harm != nil {
		harm(file)
	}
	b.put(bytes.Repeat([]byte("weights of a layer, "), 20000))
	path := dedupe.RecipePath(b.Store.dir, d)
	require.NoError(b, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(b, os.WriteFile(path, file, 0o444))
	b.reopen()
	p, ok := b.Recipes.Has(d)
	require.True(b, ok)
	b.need(d, p.Size)
	require.Positive(b, p.Own)
	require.Equal(b, dedupe.NoLiterals, p.Literals)
	return d
}

// A blob whose literals an earlier version compressed is verified, served byte for byte, made
// whole, and packed without frames then.
func TestBlobOfAnEarlierVersionIsServed(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	d := b.framed(nil)
	require.NoError(t, b.Verify(ctx, d))
	require.NoError(t, b.Check(ctx, d))
	require.Empty(t, b.DamageOf(ctx, d))
	content := b.read(d)
	require.Equal(t, d, cas.Digest(blake3.Sum256(content)))
	require.NoError(t, b.MakeWhole(ctx, d))
	require.Equal(t, content, b.read(d))
	_, err := b.Sharing.Examine(ctx, d, nil)
	require.NoError(t, err)
	require.Positive(t, b.pack(d))
	r, err := b.Recipes.Get(d)
	require.NoError(t, err)
	require.Nil(t, r.Frames)
	require.Equal(t, content, b.read(d))
	b.requireNothingLeft()
}

// No byte of damaged frames is served.
func TestDamagedFramesAreFound(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	d := b.framed(func(file []byte) { file[len(file)-3000] ^= 1 })
	require.True(t, IsDamage(b.Verify(ctx, d)))
	require.True(t, IsDamage(b.Check(ctx, d)))
	require.Len(t, b.DamageOf(ctx, d), 1)
	_, err := b.Open(ctx, d)
	require.True(t, IsDamage(err), "%v", err)
}
