package match

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// marked returns for each byte of the target which source it is taken from, and
// from how far behind; it fails where two matches have the same byte, or they are
// out of order.
func marked(t *testing.T, c cover, size int64) []match {
	t.Helper()
	out := make([]match, size)
	for i := range out {
		out[i].source = -1
	}
	end := int64(0)
	for _, m := range c {
		require.GreaterOrEqual(t, m.at, end,
			"%+v overlaps what is before it, or is out of order: %+v", m, c)
		require.Positive(t, m.length)
		end = m.end()
		require.LessOrEqual(t, end, size)
		for i := m.at; i < m.end(); i++ {
			out[i] = match{from: m.from - m.at, source: m.source}
		}
	}
	return out
}

// Adding a match to a cover removes nothing, omits nothing, and covers no byte twice, also where
// the match spans several adjoining ones.
func TestCoverHasEachByteOnce(t *testing.T) {
	const size = 40
	for seed := range uint64(2_000) {
		random := rand.New(rand.NewPCG(seed, 0))
		some := func(source int) (all []match) {
			for range random.IntN(6) {
				at := random.Int64N(size)
				all = append(all,
					match{at: at, from: random.Int64N(100), length: 1 + random.Int64N(size-at),
						source: source})
			}
			return all
		}
		first, second, third := some(0), some(1), some(2)
		c := cover(nil).add(first, 1)
		before := marked(t, c, size)
		for _, more := range [][]match{second, third} {
			given := append([]match(nil), more...)
			c = c.add(more, 1)
			after := marked(t, c, size)
			for i := range after {
				if before[i].source >= 0 {
					require.Equal(t, before[i], after[i], "seed %d: byte %d was covered before",
						seed, i)
					continue
				}
				possible := []match{{source: -1}}
				for _, m := range given {
					if m.at <= int64(i) && int64(i) < m.end() {
						possible = append(possible, match{from: m.from - m.at, source: m.source})
					}
				}
				if len(possible) > 1 {
					possible = possible[1:]
				}
				require.Contains(t, possible, after[i], "seed %d: byte %d", seed, i)
			}
			before = after
		}
	}
}
