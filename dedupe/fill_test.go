package dedupe

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// A table between two tensors, of which pieces of 100 bytes are left, each at another distance: none is as long as the floor.
func TestGapsAreFilledFromBetweenTheSameNeighbours(t *testing.T) {
	a, b := randomBytes(71, 40<<20), randomBytes(72, 1<<20)
	table := randomBytes(73, 50_000)
	var changed []byte
	pieces := int64(0)
	for i := 0; i+120 <= len(table); i += 120 {
		changed = append(append(changed, table[i:i+100]...), randomBytes(uint64(i), 10+i/120%11)...)
		pieces++
	}
	require.Greater(t, newMatcher(source(a), Options{}).floor, int64(100))
	p := pack(t, bytes.Join([][]byte{[]byte("new"), a, changed, b}, nil), bytes.Join([][]byte{a, table, b}, nil))
	require.LessOrEqual(t, p.LiteralSize(), 3+20*pieces)
}

// The same before the first match, where there is but the neighbour behind.
func TestTheGapBeforeTheFirstMatchIsFilled(t *testing.T) {
	a, table := randomBytes(74, 40<<20), randomBytes(75, 50_000)
	var changed []byte
	pieces := int64(0)
	for i := 0; i+120 <= len(table); i += 120 {
		changed = append(append(changed, table[i:i+100]...), randomBytes(uint64(i), 10+i/120%11)...)
		pieces++
	}
	p := pack(t, append(changed, a...), bytes.Join([][]byte{randomBytes(76, 300<<10), table, a}, nil))
	require.LessOrEqual(t, p.LiteralSize(), 20*pieces)
}

// Of gaps only so many bytes are looked at: what is left of that is less by each gap, and one that is more is left out.
func TestGapsAreLookedAtUpToABound(t *testing.T) {
	const gap = 4000
	stored := randomBytes(151, 100<<10)
	target := bytes.Clone(stored)
	for _, at := range []int{10 << 10, 50 << 10} {
		target[at] ^= 1 // so that both gaps have something to be found
	}
	m := newMatcher(source(target), Options{})
	m.candidates = []Candidate{{Digest: cas.Digest{1}, Source: source(stored)}}
	m.covered = cover{
		{at: 0, from: 0, length: 10 << 10},
		{at: 10<<10 + gap, from: 10<<10 + gap, length: 40<<10 - gap},
		{at: 50<<10 + gap, from: 50<<10 + gap, length: 50<<10 - gap},
	}
	f := &filler{matcher: m, left: gap + gap/2}
	require.NoError(t, f.gap(1))
	require.EqualValues(t, gap/2, f.left)
	found := len(f.found)
	require.Positive(t, found)
	require.NoError(t, f.gap(2))
	require.Len(t, f.found, found, "there is more of it than may be looked at")
	f.left = gap
	require.NoError(t, f.gap(2))
	require.Greater(t, len(f.found), found)
	require.Zero(t, f.left)
}
