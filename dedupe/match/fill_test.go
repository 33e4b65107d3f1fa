package match

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// A table between two tensors, of which pieces of 100 bytes are left, each at another distance:
// none is as long as the floor.
func TestGapsAreFilledFromBetweenTheSameNeighbours(t *testing.T) {
	a, b := randomBytes(71, 40<<20), randomBytes(72, 1<<20)
	table := randomBytes(73, 50_000)
	var changed []byte
	pieces := int64(0)
	for i := 0; i+120 <= len(table); i += 120 {
		changed = append(append(changed, table[i:i+100]...), randomBytes(uint64(i), 10+i/120%11)...)
		pieces++
	}
	require.Greater(t, newMatcher(source(a)).floor, int64(100))
	p := pack(t, bytes.Join([][]byte{[]byte("new"), a, changed, b}, nil),
		bytes.Join([][]byte{a, table, b}, nil))
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
	p := pack(t, append(changed, a...),
		bytes.Join([][]byte{randomBytes(76, 300<<10), table, a}, nil))
	require.LessOrEqual(t, p.LiteralSize(), 20*pieces)
}

// Of gaps only so many bytes are looked at: what is left of that is less by each gap, and one that
// is more is left out.
func TestGapsAreLookedAtUpToABound(t *testing.T) {
	const gap = 4000
	stored := randomBytes(151, 100<<10)
	target := bytes.Clone(stored)
	for _, at := range []int{10 << 10, 50 << 10} {
		target[at] ^= 1 // so that both gaps have something to be found
	}
	m := newMatcher(source(target))
	m.candidates = []Candidate{{Digest: cas.Digest{1}, Source: source(stored)}}
	m.covered = cover{
		{at: 0, from: 0, length: 10 << 10},
		{at: 10<<10 + gap, from: 10<<10 + gap, length: 40<<10 - gap},
		{at: 50<<10 + gap, from: 50<<10 + gap, length: 50<<10 - gap},
	}
	first, second := m.gaps(2 * gap)[0], m.gaps(2 * gap)[1]
	require.Equal(t, []int64{10 << 10, 50 << 10}, []int64{first.at, second.at})
	require.Len(t, m.gaps(2*gap-1), 1, "there is more of the second one than may be looked at")
	require.Len(t, m.gaps(gap), 1)
	require.Empty(t, m.gaps(gap-1))
	require.NoError(t, m.fill(context.Background()))
	require.EqualValues(t, len(target)-2, m.covered.bytes(),
		"all but the two bytes that are others")
}

// Filling gaps has the same result on any number of cores, and ends with the first error.
func TestGapsAreFilledOnAllCores(t *testing.T) {
	stored := randomBytes(152, 600<<10)
	target := bytes.Clone(stored)
	covered := cover{{length: 1000}}
	// a byte is another, and of a gap of 300 all but that is found
	for at := int64(1000); at+1000 <= int64(len(target)); at += 1000 {
		target[at+77] ^= 1
		covered = append(covered, match{at: at + 300, from: at + 300, length: 700})
	}
	fill := func(cores int, from dedupe.Source) (cover, int64, error) {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(cores))
		m := newMatcher(source(target))
		m.candidates = []Candidate{{Digest: cas.Digest{1}, Source: from}}
		m.covered = slices.Clone(covered)
		err := m.fill(context.Background())
		return m.covered, m.stats.compared, err
	}
	want, compared, err := fill(1, source(stored))
	require.NoError(t, err)
	require.Equal(t, int64(len(target)-len(covered)+1), want.bytes())
	got, again, err := fill(4, source(stored))
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.Equal(t, compared, again)
	bad := errors.New("bad sector")
	_, _, err = fill(4, &failingFrom{source(stored), 300 << 10, bad})
	require.ErrorIs(t, err, bad)
}
