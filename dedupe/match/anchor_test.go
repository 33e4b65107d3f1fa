package match

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// nextAnchor is the definition, one position after the other: the first anchor
// of b at i or later.
func nextAnchor(b []byte, i int, least uint64) (at int, found bool) {
	for ; i+windowSize <= len(b); i++ {
		if (b[i]^b[i+1])&0x3f == 0x03 && product(b[i:]) >= least {
			return i, true
		}
	}
	return i, false
}

func anchorsAll(b []byte, from int, least uint64) (all []int) {
	var f finder
	for i := from; ; {
		found, next := f.step(b, i, least)
		if next == i {
			return all
		}
		i = next
		for _, at := range found {
			all = append(all, int(at))
		}
	}
}

// A finder finds what the definition says, on every processor, however many anchors there are and
// wherever b ends.
func TestFinderFindsEveryAnchor(t *testing.T) {
	noise := randomBytes(71, 3*finderStep)
	crowded := bytes.Repeat([]byte{0x41, 0x42}, finderStep) // an anchor at every position
	rapid.Check(t, func(t *rapid.T) {
		var b []byte
		for range rapid.IntRange(0, 5).Draw(t, "parts") {
			part := rapid.SampledFrom([][]byte{noise, crowded, make([]byte, 300)}).Draw(t, "part")
			from := rapid.IntRange(0, len(part)).Draw(t, "from")
			b = append(b, part[from:rapid.IntRange(from, len(part)).Draw(t, "end")]...)
		}
		from := rapid.IntRange(0, len(b)).Draw(t, "first position")
		least := minProduct(rapid.IntRange(denseLevel, 1).Draw(t, "level"))
		var want []int
		for at, ok := nextAnchor(b, from, least); ok; at, ok = nextAnchor(b, at+1, least) {
			want = append(want, at)
		}
		require.Equal(t, want, anchorsAll(b, from, least))
	})
	got, want := make([]int32, finderStep+pairsSpare), make([]int32, finderStep+pairsSpare)
	for _, b := range [][]byte{noise, crowded[1:]} {
		n := pairsPortable(want, b, 7, finderStep/64)
		require.Equal(t, n, pairs(got, b, 7, finderStep/64))
		require.Equal(t, want[:n], got[:n])
	}
}
