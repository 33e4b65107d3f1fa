package packing

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Every write has a reservation of all of its blocks, and names the bytes that it replaces: else
// the budget would be exceeded, or packing be refused for lack of space.
func TestWrittenBytesAreReserved(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	common, own := noise(0, mib), noise(9, mib/2)
	content := append(bytes.Clone(own), common...)
	asked := func() (all []reservation) {
		all, b.reservations = b.reservations, nil
		known, err := b.Space(false)
		require.NoError(t, err)
		now, err := b.Space(true)
		require.NoError(t, err)
		require.Equal(t, now, known, "what is remembered is as it is")
		return all
	}
	var all []cas.Digest
	for _, one := range [][]byte{common, content} {
		d := b.put(one)
		_, err := b.Sharing.Examine(ctx, d, nil)
		require.NoError(t, err)
		all = append(all, d)
	}
	require.Empty(t, asked(), "what is only looked at takes none")
	whole := cas.RoundUpToBlock(int64(len(content)))

	freed := b.pack(all[1])
	p, _ := b.Recipes.Has(all[1])
	literals := p.Bases[p.Literals].Size
	require.Equal(t, []reservation{{cas.RoundUpToBlock(literals) + p.Disk, whole}}, asked())
	require.Equal(t, whole-cas.RoundUpToBlock(literals)-p.Disk, freed)
	require.NoError(t, b.Unpack(ctx, all[1], nil, nil))
	require.Equal(t, []reservation{{whole, 0}}, asked())
	require.NoError(t, b.DropCopy(all[1]))
	require.Empty(t, asked())
	require.NoError(t, b.MakeWhole(ctx, all[1]))
	require.Equal(t, []reservation{{whole, cas.RoundUpToBlock(literals) + p.Disk}}, asked(),
		"no build is evicted for it")

	// Compacting writes the one whole, and then what the other has of its own.
	require.Positive(t, b.pack(all[1]))
	asked()
	require.NoError(t, b.Compact(ctx, Family{Hot: all[1], Base: all[0]}, nil))
	require.True(t, b.OnlyPacked(all[0]))
	recipe, _ := b.Recipes.Has(all[0])
	require.Equal(t, []reservation{{whole, cas.RoundUpToBlock(literals) + p.Disk},
		{recipe.Disk, mib}},
		asked())
	require.Zero(t, b.reserved)
	for _, d := range all {
		delete(b.needed, d)
		_, err := b.Remove(d)
		require.NoError(t, err)
		require.Empty(t, asked())
	}
}

// A recipe that was left beside the whole form is used only as long as its blob may take from where
// it does.
func TestForbiddenBaseIsNotUsed(t *testing.T) {
	b := newBench(t)
	all, contents := b.variants(2, mib)
	require.Positive(t, b.pack(all[1]))
	b.put(contents[1])
	b.scopeOf = map[cas.Digest]string{all[0]: "7", all[1]: "8"}
	freed, err := b.Pack(context.Background(), all[1], Worth, nil)
	require.NoError(t, err)
	require.Zero(t, freed)
	require.True(t, b.whole.Has(all[1]))
	_, packed := b.Recipes.Has(all[1])
	require.False(t, packed, "and it goes")
	require.Equal(t, contents[1], b.read(all[1]))
}

// A blob that a request is given, or another recipe takes from, just when it was let go, keeps its
// form.
func TestBaseTakenAfterReleaseStays(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(3, mib)
	stays := func() {
		t.Helper()
		freed, err := b.Pack(ctx, all[1], Worth, nil)
		require.NoError(t, err)
		require.Zero(t, freed)
		require.True(t, b.whole.Has(all[1]))
	}
	b.onDropViews = func() { b.beingServed = map[cas.Digest]bool{all[1]: true} }
	stays()
	b.beingServed = nil
	size := int64(len(contents[1]))
	b.onDropViews = func() {
		require.NoError(t, b.recipeStore.Put(&dedupe.Recipe{
			Blob: all[2], Size: 9, Literals: dedupe.NoLiterals,
			Bases:   []dedupe.Base{{Digest: all[1], Size: size}},
			Extents: []dedupe.Extent{{Length: 9}}}, nil))
	}
	stays()
	require.NoError(t, b.recipeStore.Remove(all[2]))
	b.onDropViews = nil
	require.Positive(t, b.pack(all[1]))

	require.NoError(t, b.Unpack(ctx, all[1], nil, nil))
	b.onDropViews = func() { b.beingServed = map[cas.Digest]bool{all[1]: true} }
	require.ErrorIs(t, b.DropCopy(all[1]), ErrInUse)
	_, _, copied := b.Bytes(all[1])
	require.Positive(t, copied)
}
