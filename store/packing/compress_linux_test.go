package packing

import (
	"context"
	"encoding/hex"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// digits are n bytes that compress to little more than half.
func digits(seed uint64, n int) []byte { return []byte(hex.EncodeToString(noise(seed, n/2))) }

// The literals of a blob are kept compressed with its recipe where that gains an eighth, and else
// as a blob that later ones take from.
func TestLiteralsAreCompressedWhereThatGains(t *testing.T) {
	common := noise(1, mib/2)
	for name, c := range map[string]struct {
		own        []byte
		compressed bool
	}{
		"digits":                            {digits(2, mib), true},
		"noise":                             {noise(2, mib), false},
		"an eighth, but less than 64 KiB":   {digits(2, 120<<10), false},
		"half of it, which is just as much": {digits(2, 140<<10), true},
		"a third of them digits": {slices.Concat(digits(2, mib/3), noise(3, mib*2/3)),
			true},
		"a tenth of them digits, too little": {slices.Concat(digits(2, mib/10), noise(3, mib*9/10)),
			false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.looked(common)
			content := slices.Concat(c.own, common)
			d, _ := b.looked(content)
			promised := b.Sharing.Saving(d)
			freed := b.pack(d)
			p, _ := b.Recipes.Has(d)
			require.Equal(t, c.compressed, p.Compressed > 0)
			if c.compressed {
				require.InDelta(t, len(c.own), p.Compressed, 1024)
				require.Len(t, p.Bases, 1, "it has no literals besides")
				require.Greater(t, freed, promised+minSaving/2)
			} else {
				require.Len(t, p.Bases, 2)
				require.InDelta(t, promised, freed, 8192)
			}
			b.requireAll(map[cas.Digest][]byte{d: content})
			require.NoError(t, b.MakeWhole(context.Background(), d))
			b.requireAll(map[cas.Digest][]byte{d: content})
			b.requireNothingLeft()
		})
	}
}

// Bytes that others take from are never compressed: the literals of a base that is packed are the
// base of the others.
func TestBasesAreNotCompressed(t *testing.T) {
	b := newBench(t)
	text := digits(1, mib/2)
	content := slices.Concat(text, noise(2, 300), text)
	base, _ := b.looked(content)
	other := slices.Concat(noise(3, 4096), text)
	user, _ := b.looked(other)
	require.Positive(t, b.pack(user))
	require.Equal(t, []cas.Digest{user}, b.Recipes.Users(base))
	require.Positive(t, b.pack(base))
	p, _ := b.Recipes.Has(base)
	require.Zero(t, p.Compressed)
	require.Contains(t, b.bases(user), p.Bases[p.Literals].Digest)
	b.requireAll(map[cas.Digest][]byte{base: content, user: other})
}

// Nor is what others would take from that are not packed yet: the order in which blobs are packed
// does not decide how much is stored.
func TestFutureBasesAreNotCompressed(t *testing.T) {
	b := newBench(t)
	text := digits(1, mib/2)
	content := slices.Concat(text, noise(2, 300), text)
	base, _ := b.looked(content)
	other := slices.Concat(noise(3, 4096), text)
	user, found := b.looked(other)
	require.Equal(t, []cas.Digest{base}, found.From)
	require.Positive(t, b.pack(base))
	p, _ := b.Recipes.Has(base)
	require.Zero(t, p.Compressed)
	_, err := b.Sharing.Examine(context.Background(), user, nil)
	require.NoError(t, err)
	require.Positive(t, b.pack(user))
	require.Equal(t, []cas.Digest{p.Bases[p.Literals].Digest}, b.bases(user)[:1])
	b.requireAll(map[cas.Digest][]byte{base: content, user: other})
}
