package packing

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// families lists those of which some blob is used, and all others are idle.
func (b *bench) families(used ...cas.Digest) []Family {
	b.Helper()
	hot := func(d cas.Digest) bool { return slices.Contains(used, d) }
	all, err := b.CompactableFamilies(context.Background(), hot, func(d cas.Digest) bool {
		return !hot(d)
	})
	require.NoError(b, err)
	return all
}

// The blob that is used becomes the base of its family; where there is no room for both for a
// moment, another time.
func TestTheBlobThatIsUsedBecomesTheBase(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(3, mib)
	require.Positive(t, b.pack(all[1]))
	require.Positive(t, b.pack(all[2]))
	require.Empty(t, b.families())
	require.Empty(t, b.families(all[0], all[2]), "the base is used as well")
	found := b.families(all[2])
	require.Equal(t, []Family{{Hot: all[2], Base: all[0]}}, found)

	b.diskFull = true
	require.ErrorIs(t, b.Compact(ctx, found[0], nil), ErrInUse)
	require.True(t, b.OnlyPacked(all[2]))
	b.diskFull, b.fitsError = false, syscall.ENOSPC
	require.ErrorIs(t, b.Compact(ctx, found[0], nil), ErrInUse)
	b.fitsError = nil
	require.Equal(t, contents[2], b.read(all[2]))
	b.Store.memory.dropSharing(all[2]) // as the index does when it is lost
	require.NoError(t, b.Compact(ctx, found[0], nil))
	require.True(t, b.whole.Has(all[2]))
	_, _, copied := b.Bytes(all[2])
	require.Zero(t, copied, "the whole form does for that")
	require.True(t, b.OnlyPacked(all[0]) && b.OnlyPacked(all[1]))
	require.Contains(t, b.bases(all[1]), all[2])
	require.Empty(t, b.families(all[2]))
	require.NoError(t, b.Compact(ctx, found[0], nil), "nothing is left to do")
	for i, d := range all {
		require.NoError(t, b.Check(ctx, d))
		require.Equal(t, contents[i], b.read(d))
	}
	b.requireNothingLeft()
}

// So does one that was never packed: what was known of it, that it could be, is forgotten first.
func TestABlobThatWasNeverPackedBecomesTheBase(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(2, mib)
	require.Positive(t, b.Sharing.Saving(all[1]))
	found := b.families(all[1])
	require.Equal(t, []Family{{Hot: all[1], Base: all[0]}}, found)
	b.diskFull = true
	require.ErrorIs(t, b.Compact(ctx, found[0], nil), ErrInUse, "there may be room another time")
	b.diskFull = false
	require.NoError(t, b.Compact(ctx, found[0], nil))
	require.True(t, b.whole.Has(all[1]))
	require.True(t, b.OnlyPacked(all[0]))
	for i, d := range all {
		require.NoError(t, b.Check(ctx, d))
		require.Equal(t, contents[i], b.read(d))
	}
}

// Compacting that was stopped half way leaves each blob in one form, and goes on with what is
// listed then.
func TestInterruptedCompactingContinuesLater(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(4, mib)
	for _, d := range all[1:] {
		require.Positive(t, b.pack(d))
	}
	stopped := errors.New("stopped")
	require.ErrorIs(t, b.Compact(ctx, Family{Hot: all[1], Base: all[0]},
		func(context.Context) error {
			if slices.Contains(b.bases(all[2]), all[1]) ||
				slices.Contains(b.bases(all[3]), all[1]) {
				return stopped
			}
			return nil
		}), stopped)
	require.True(t, b.whole.Has(all[0]) && b.whole.Has(all[1]))
	for _, d := range all {
		_, packed := b.Recipes.Has(d)
		require.NotEqual(t, packed, b.whole.Has(d))
	}
	for _, d := range all[:2] { // as is done by itself
		_, err := b.Sharing.Examine(ctx, d, nil)
		require.NoError(t, err)
	}
	for _, f := range b.families(all[1]) {
		require.NoError(t, b.Compact(ctx, f, nil))
	}
	if b.whole.Has(all[0]) {
		require.Positive(t, b.pack(all[0]))
	}
	require.True(t, b.whole.Has(all[1]))
	for i, d := range all {
		require.Equal(t, contents[i], b.read(d))
	}
	b.requireNothingLeft()
}

// A base that no build needs is removed: what takes most of it becomes whole, and the base of the
// others.
func TestABaseThatNoBuildNeedsIsRemoved(t *testing.T) {
	ctx := context.Background()
	large := noise(0, 2*mib)
	most, less := append(noise(1, 4096), large[:mib]...),
		append(noise(2, 4096), large[mib/2:mib]...)
	other := append(noise(3, 4096), large[mib+mib/2:]...) // shares nothing with these
	for _, hot := range []bool{false, true} {
		b := newBench(t)
		base, _ := b.looked(large)
		contents := make(map[cas.Digest][]byte)
		var users []cas.Digest
		for _, content := range [][]byte{less, other, most} {
			d := b.put(content)
			require.Positive(t, b.pack(d))
			contents[d], users = content, append(users, d)
		}
		require.Empty(t, b.families(), "a build needs it")
		delete(b.needed, base)
		f := Family{Base: base}
		require.Equal(t, []Family{f}, b.families())
		if hot {
			f.Hot = users[2]
		}
		require.NoError(t, b.Compact(ctx, f, nil))
		require.False(t, b.whole.Has(base))
		require.True(t, b.whole.Has(users[1]) && b.whole.Has(users[2]))
		require.True(t, b.OnlyPacked(users[0]))
		require.Contains(t, b.bases(users[0]), users[2])
		require.Empty(t, b.families())
		b.requireAll(contents)
		b.requireNothingLeft()
	}
}

// Of a base that no build needs nothing stays either when another one has taken its place.
func TestUnneededBasesAreRemoved(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(3, mib)
	require.Positive(t, b.pack(all[1]))
	require.Positive(t, b.pack(all[2]))
	delete(b.needed, all[0])
	require.Equal(t, Family{Hot: all[2], Base: all[0]}, b.families(all[2])[0])
	require.NoError(t, b.Compact(ctx, Family{Hot: all[2], Base: all[0]}, nil))
	require.True(t, b.whole.Has(all[2]))
	_, packed := b.Recipes.Has(all[0])
	require.False(t, packed || b.whole.Has(all[0]))
	for _, i := range []int{1, 2} {
		require.NoError(t, b.Check(ctx, all[i]))
		require.Equal(t, contents[i], b.read(all[i]))
	}
	b.requireNothingLeft()
}

// A blob that another took from besides its base, and that no build needs any more, is removed with
// it when they are compacted.
func TestUnreferencedBlobsAreRemovedWithTheBase(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		evicted int
		objects []int
	}{{evicted: 1, objects: []int{2}}, {evicted: 0, objects: []int{1, 2}}} {
		b := newBenchIn(t, inMemory(t))
		one, other := noise(1, mib/2), noise(2, mib/2)
		var all []cas.Digest
		for _, content := range [][]byte{one, other, slices.Concat(noise(3, 4096), one, other)} {
			d, _ := b.looked(content)
			all = append(all, d)
		}
		require.Positive(t, b.pack(all[2]))
		b.evict(all[c.evicted])
		require.True(t, b.whole.Has(all[c.evicted]), "it is taken from")
		require.NoError(t, b.Compact(ctx, Family{Hot: all[2], Base: all[0]}, nil))
		var want []cas.Digest
		for _, i := range c.objects {
			want = append(want, all[i])
		}
		require.ElementsMatch(t, want, b.objects())
		b.requireNothingLeft()
	}
}

// A blob that was packed for little is whole again once it is used.
func TestABlobThatIsMostlyItsOwnBecomesWholeWhenItIsUsed(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	part := noise(1, 128<<10)
	little := slices.Concat(part, noise(2, 2*mib), part)
	packed, found := b.looked(little)
	require.True(t, found.Little)
	_, err := b.Pack(ctx, packed, Little, nil)
	require.NoError(t, err)
	for d, content := range map[cas.Digest][]byte{packed: little} {
		require.Empty(t, b.families())
		require.Equal(t, content, b.read(d))
		require.Equal(t, []Family{{Hot: d}}, b.families(d))
		require.NoError(t, b.Compact(ctx, Family{Hot: d}, nil))
		require.True(t, b.whole.Has(d))
		_, _, copied := b.Bytes(d)
		require.Zero(t, copied)
		require.Equal(t, content, b.read(d))
	}
	b.requireNothingLeft()
}

// Literals that others take from, and no blob is packed with any more, are removed: those that took
// from them take from the blob.
func TestLiteralsOfABlobThatIsWholeAreNotTakenFrom(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	common, own := noise(1, mib), noise(2, mib)
	contents := make(map[cas.Digest][]byte)
	var all []cas.Digest
	for _, content := range [][]byte{common, slices.Concat(common, own),
		slices.Concat(noise(3, 4096), own)} {
		d, _ := b.looked(content)
		all, contents[d] = append(all, d), content
		if len(all) > 1 {
			require.Positive(t, b.pack(d))
		}
	}
	p, _ := b.Recipes.Has(all[1])
	literals := p.Bases[p.Literals].Digest
	require.Contains(t, b.bases(all[2]), literals)
	// only the reservation for the whole file succeeds
	b.onReserve = func() { b.failOnce = b.reserveCalls > 0 }
	b.reserveCalls = 0
	require.NoError(t, b.MakeWhole(ctx, all[1]))
	b.onReserve, b.failOnce = nil, false
	require.True(t, b.whole.Has(literals), "there was no room to pack the other again")
	require.Equal(t, []Family{{Base: literals}}, b.families())
	require.NoError(t, b.Compact(ctx, Family{Base: literals}, nil))
	require.False(t, b.whole.Has(literals))
	require.Contains(t, b.bases(all[2]), all[1])
	b.requireAll(contents)
	b.requireNothingLeft()
}
