package match

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Windows that are equal everywhere, with nothing that is as long as the floor, are compared in
// vain only as often as is worth it: with candidates, within the target, and where runs begin.
func TestComparingInVainIsBounded(t *testing.T) {
	noise := randomBytes(101, 1<<20)
	at, _ := nextAnchor(noise, 0, minProduct(0))
	window := noise[at : at+2*windowSize]
	crowd := func(seed uint64) []byte {
		b := randomBytes(seed, 1<<20)
		for i := 0; i+len(window) <= len(b); i += len(window) + 16 {
			copy(b[i:], window)
		}
		return b
	}
	target, stored := crowd(102), crowd(103)
	match := func(target []byte, candidates ...Candidate) (*Plan, error) {
		m := newMatcher(source(target))
		m.floor = 2 << 10
		return m.match(context.Background(), among(candidates...))
	}
	p, err := match(target, Candidate{Digest: cas.Digest{1}, Source: source(stored)})
	require.NoError(t, err)
	size := int64(len(target))
	// As much for the target's own copies and for the candidate, and one comparison more each.
	require.LessOrEqual(t, p.stats.compared, 2*(spareWork+workPerByte*size+8*maxCompare))
	require.Greater(t, p.stats.compared, size, "it was worth trying")

	runs := randomBytes(104, 1<<20)
	for i := 0; i+600 <= len(runs); i += 600 {
		clear(runs[i : i+560])
	}
	p, err = match(runs)
	require.NoError(t, err)
	require.LessOrEqual(t, p.stats.compared, spareWork+workPerByte*size+8*maxCompare)
}

// Bytes found in one candidate are not compared with the next one, and each byte of a candidate is
// either scanned or compared.
func TestEveryByteIsComparedOnce(t *testing.T) {
	a := randomBytes(105, 5<<20)
	target := append(bytes.Clone(a), randomBytes(106, 200<<10)...)
	candidates := []Candidate{{Digest: cas.Digest{1}, Source: source(a)},
		{Digest: cas.Digest{2}, Source: source(append([]byte("x"), a...))}}
	p, err := Find(context.Background(), source(target), among(candidates[:1]...))
	require.NoError(t, err)
	require.Less(t, p.stats.compared, int64(len(a)+4*maxCompare))
	require.Less(t, p.stats.scanned, int64(len(target)+4*maxStreams))
	both, err := Find(context.Background(), source(target), among(candidates...))
	require.NoError(t, err)
	require.Less(t, both.stats.compared-p.stats.compared, int64(maxStreams))
}

// However large a target is, its anchors have room, and it has sparse ones up to a GiB.
func TestLevelsKeepTheBoundOfAnchors(t *testing.T) {
	last := denseLevel
	for size := int64(1); size <= dedupe.MaxSize; size += size/7 + 1 {
		level := levelOf(size)
		require.GreaterOrEqual(t, level, last)
		last = level
		segments := (size + segmentSize - 1) / segmentSize
		require.LessOrEqual(t, segments*int64(denseSegment(level, int(segments))),
			int64(maxAnchors), "%d bytes", size)
		anchors := float64(size) / anchorEvery
		for k := level; k < 0; k++ {
			anchors *= 2
		}
		for k := level; k > 0; k-- {
			anchors /= 2
		}
		require.LessOrEqual(t, anchors, float64(usualAnchors+1), "%d bytes", size)
		if size <= 16<<20 {
			require.Equal(t, denseLevel, level, "%d bytes", size)
		}
		if size <= 1<<30 {
			require.LessOrEqual(t, level, 0, "%d bytes", size)
		}
	}
}
