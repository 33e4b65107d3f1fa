package packing

import (
	"bytes"
	"context"
	"encoding/binary"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// looked stores bytes, and looks at what they share.
func (b *bench) looked(content []byte) (cas.Digest, Share) {
	b.Helper()
	d := b.put(content)
	found, err := b.Sharing.Examine(context.Background(), d, nil)
	require.NoError(b, err)
	return d, found
}

func (b *bench) requireAll(contents map[cas.Digest][]byte) {
	b.Helper()
	for d, content := range contents {
		require.NoError(b, b.Check(context.Background(), d))
		require.True(b, bytes.Equal(content, b.read(d)), "%s", d)
	}
}

// A base that has something twice is packed as well: its literals are the base then.
func TestABaseThatRepeatsItselfIsPacked(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	const part = mib / 2
	twice, once := noise(1, part), noise(2, 2*part)
	content := slices.Concat(twice, once, twice)
	base, found := b.looked(content)
	require.Empty(t, found.From)
	require.False(t, found.Little)
	require.Greater(t, b.Sharing.Saving(base), int64(part-16<<10))
	// One that takes of both copies, and over where the second begins, and one that is all in it.
	first := slices.Concat(noise(3, 4096), content[part/2:part*3/2], content[3*part-part/4:],
		noise(4, 4096))
	second := slices.Concat(once, noise(5, 4096))
	all := map[cas.Digest][]byte{base: content}
	var users []cas.Digest
	for _, content := range [][]byte{first, second} {
		d, _ := b.looked(content)
		require.Positive(t, b.pack(d))
		require.Contains(t, b.bases(d), base)
		all[d], users = content, append(users, d)
	}
	require.InDelta(t, part, b.pack(base), 16<<10)
	require.True(t, b.OnlyPacked(base))
	literals := b.bases(base)
	require.Len(t, literals, 1)
	for _, d := range users {
		require.NotContains(t, b.bases(d), base)
		require.Contains(t, b.bases(d), literals[0])
	}
	b.requireAll(all)

	// Later blobs take from what is left of it.
	later, found := b.looked(slices.Concat(noise(6, 4096), content[part/2:]))
	require.Equal(t, literals, found.From)
	require.Positive(t, b.pack(later))

	// Whole again it is the base of all of them, and no literals stay besides.
	require.NoError(t, b.MakeWhole(ctx, base))
	require.False(t, b.whole.Has(literals[0]))
	for _, d := range append(users, later) {
		require.Contains(t, b.bases(d), base)
	}
	b.requireAll(all)
}

// A base from which others take stays packed, when no build needs it, as long as they need its
// literals.
func TestLiteralsOfABaseStayAsLongAsTheyAreTakenFrom(t *testing.T) {
	b := newBench(t)
	twice := noise(1, mib/2)
	base, _ := b.looked(slices.Concat(twice, noise(2, mib/2), twice))
	content := slices.Concat(noise(3, 4096), twice)
	user, _ := b.looked(content)
	require.Positive(t, b.pack(user))
	require.Positive(t, b.pack(base))
	literals := b.bases(base)
	delete(b.needed, base)
	_, err := b.Remove(base)
	require.NoError(t, err)
	_, packed := b.Recipes.Has(base)
	require.False(t, packed)
	require.True(t, b.whole.Has(literals[0]))
	b.requireAll(map[cas.Digest][]byte{user: content})
	delete(b.needed, user)
	_, err = b.Remove(user)
	require.NoError(t, err)
	require.Empty(t, b.objects())
}

// A blob that frees little is packed where that is wanted.
func TestSmallSavingsArePackedOnRequest(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	part := noise(1, 128<<10)
	content := slices.Concat(part, noise(2, 2*mib), part)
	d, found := b.looked(content)
	require.True(t, found.Little)
	require.False(t, b.Sharing.mayBePacked(d), "others take from it")
	require.Zero(t, b.pack(d))
	require.True(t, b.whole.Has(d))
	freed, err := b.Pack(ctx, d, Little, nil)
	require.NoError(t, err)
	require.InDelta(t, 128<<10, freed, 8<<10)
	b.requireAll(map[cas.Digest][]byte{d: content})

	none, found := b.looked(slices.Concat(noise(8, mib), noise(9, 64<<10)))
	require.Zero(t, found.Saving)
	freed, err = b.Pack(ctx, none, Little, nil)
	require.NoError(t, err)
	require.Zero(t, freed)
}

// A base that came first, and is a part of a larger one which came later and shares little
// else, takes from that.
func TestASmallBaseTakesFromALargerOneThatCameLater(t *testing.T) {
	b := newBench(t)
	small := noise(1, mib/2)
	base, found := b.looked(small)
	require.Zero(t, found.Saving)
	content := slices.Concat(noise(2, 4096), small[:mib/4], noise(3, 4096))
	user, _ := b.looked(content)
	require.Positive(t, b.pack(user))
	large := slices.Concat(noise(4, 5*mib/2), small, noise(5, 5*mib/2))
	later, found := b.looked(large)
	require.True(t, found.Little)
	require.False(t, b.Sharing.IsKnown(base), "it came too early")
	found, err := b.Sharing.Examine(context.Background(), base, nil)
	require.NoError(t, err)
	require.Equal(t, []cas.Digest{later}, found.From)
	require.True(t, b.Sharing.IsKnown(later), "or they would have each other looked at for ever")
	require.Positive(t, b.pack(base))
	require.Equal(t, []cas.Digest{later}, b.bases(base))
	require.Contains(t, b.bases(user), later)
	b.requireAll(map[cas.Digest][]byte{base: small, user: content, later: large})
}

// Shares that versions before 55b10d1 found, or that are damaged, are found again.
func TestMatchesOfEarlierVersionsAreComparedAgain(t *testing.T) {
	b := newBench(t)
	d := b.put(noise(1, mib))
	old := func(version byte, saving uint64) []byte {
		return binary.LittleEndian.AppendUint64([]byte{version}, saving)
	}
	for _, c := range []struct {
		raw    []byte
		looked bool
	}{{old(1, 0), false}, {old(2, 0), false}, {old(1, 4096), false}, {Share{}.encode(), true},
		{[]byte{3, 2, 0, 0, 0, 0, 0, 0, 0, 0}, true}, {[]byte{4, 0}, false}, {nil, false}} {
		b.shares.rows[string(d[:])] = c.raw
		require.Equal(t, c.looked, b.Sharing.IsKnown(d), "%x", c.raw)
	}
	b.shares.rows[string(d[:])] = old(1, 0)
	_, err := b.Sharing.Examine(context.Background(), d, nil)
	require.NoError(t, err)
	require.True(t, b.Sharing.IsKnown(d))
	for _, want := range []Share{{}, {Saving: 5, Little: true},
		{Saving: 1 << 40, From: []cas.Digest{d}}, {Little: true, Saving: 7}} {
		got, ok := decodeShare(want.encode())
		require.True(t, ok)
		require.Equal(t, want, got)
	}
}
