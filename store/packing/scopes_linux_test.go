package packing

import (
	"context"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// passedOn is a base that all may take from until its shared build is removed: now it is of
// one user, another takes from it, and it would be packed with bytes of the one user alone.
func (b *bench) passedOn() (base, another, later cas.Digest, contents map[cas.Digest][]byte) {
	b.Helper()
	small := noise(1, mib/2)
	base, _ = b.looked(small)
	content := slices.Concat(noise(2, 4096), small[:mib/4], noise(3, 4096))
	another = b.put(content)
	b.scopeOf[another] = "another"
	_, err := b.Sharing.Examine(context.Background(), another, nil)
	require.NoError(b, err)
	require.Positive(b, b.pack(another))
	b.scopeOf[base] = "one"
	large := slices.Concat(noise(4, 5*mib/2), small, noise(5, 5*mib/2))
	later = b.put(large)
	b.scopeOf[later] = "one"
	_, err = b.Sharing.Examine(context.Background(), later, nil)
	require.NoError(b, err)
	found, err := b.Sharing.Examine(context.Background(), base, nil)
	require.NoError(b, err)
	require.Equal(b, []cas.Digest{later}, found.From)
	return base, another, later,
		map[cas.Digest][]byte{base: small, another: content, later: large}
}

// A base is not packed with what those may not take from who take from it.
func TestRecipesStayWithinTheirScope(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	base, another, later, contents := b.passedOn()
	require.Zero(t, b.pack(base))
	require.Contains(t, b.bases(another), base)
	require.NotContains(t, b.bases(another), later)
	_, packed := b.Recipes.Has(base)
	require.False(t, packed)
	b.requireAll(contents)

	b.scopeOf[another] = "one"
	_, err := b.Sharing.Examine(ctx, base, nil)
	require.NoError(t, err)
	require.Positive(t, b.pack(base))
	require.Contains(t, b.bases(another), later)
	b.requireAll(contents)
}

// Nor does what takes from a base become that of a blob that may not take from it.
func TestABaseStaysForThoseThatMayNotTakeFromAnother(t *testing.T) {
	b := newBench(t)
	all, contents := b.variants(3, mib)
	require.Positive(t, b.pack(all[1]))
	require.Positive(t, b.pack(all[2]))
	require.Len(t, b.families(all[1]), 1)
	b.scopeOf[all[1]] = "one"
	require.Empty(t, b.families(all[1]))
	for _, d := range all {
		b.scopeOf[d] = "one"
	}
	require.Len(t, b.families(all[1]), 1)
	for i, d := range all {
		require.Equal(t, contents[i], b.read(d))
	}
}

// A blob that takes from the literals of a packed blob which becomes whole, and that may not take
// from that, takes nothing from it: it has the bytes itself.
func TestForeignScopeGetsItsOwnBytes(t *testing.T) {
	b := newBench(t)
	common, own := noise(1, mib), noise(2, mib)
	first, _ := b.looked(common)
	content := slices.Concat(common, own)
	d, _ := b.looked(content)
	require.Positive(t, b.pack(d))
	p, _ := b.Recipes.Has(d)
	literals := p.Bases[p.Literals].Digest
	taken := slices.Concat(noise(3, 4096), own)
	another := b.put(taken)
	b.scopeOf[another] = "another"
	_, err := b.Sharing.Examine(context.Background(), another, nil)
	require.NoError(t, err)
	require.Positive(t, b.pack(another))
	require.Contains(t, b.bases(another), literals)
	b.scopeOf[d] = "one"
	require.NoError(t, b.MakeWhole(context.Background(), d))
	require.True(t, b.whole.Has(d))
	_, packed := b.Recipes.Has(d)
	require.False(t, packed)
	require.Empty(t, b.Recipes.Users(d))
	require.True(t, b.whole.Has(another))
	require.False(t, b.whole.Has(literals))
	b.requireAll(map[cas.Digest][]byte{first: common, d: content, another: taken})
	b.requireNothingLeft()
}
