package dedupe

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// Zeros of either sign, and now and then a copy of 400 bytes of an earlier place: no anchor anywhere.
func TestQuietRangesAreSearched(t *testing.T) {
	r := rand.New(rand.NewPCG(81, 0))
	b := make([]byte, 1<<20)
	for i := 3; i < len(b); i += 4 {
		b[i] = byte(r.IntN(2)) << 7
	}
	var copies []int
	for i := 1 << 19; i+400 < len(b); i += 1000 + 4*r.IntN(50) {
		copy(b[i:i+400], b[4*r.IntN(1<<16):])
		copies = append(copies, i)
	}
	_, found := nextAnchor(b, 0, leastProduct(denseLevel))
	require.False(t, found)
	p := pack(t, b)
	missing := make([]int, len(b)) // 1: a literal
	for _, l := range p.literals {
		for i := l.From; i < l.From+l.Length; i++ {
			missing[i] = 1
		}
	}
	for _, at := range copies {
		n := 0
		for _, m := range missing[at : at+400] {
			n += m
		}
		require.Less(t, n, 2*windowSize, "of 400 bytes at %d", at) // what is left at either end may be less than a window
	}
}
