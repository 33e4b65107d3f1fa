package match

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/epcached/epcached/dedupe/exact"
)

// sure is the length from which Find finds every run: with fewer bytes it may be
// that none of them is an anchor, one time in e^16 for random ones.
const sure = 16 << 10

// Find leaves at most those bytes as literals that an exact matcher of runs of at least sure bytes
// finds new, but for two costs. Where two extents meet, up to minPiece bytes may be left. A run
// with a period costs up to a period more, because a plan repeats one range of one base, and takes
// from a stored run what one alignment covers.
func TestMatchIsCloseToAnExactMatcher(t *testing.T) {
	const periodic, period = 7, 300
	parts := [][]byte{
		randomBytes(41, 3*sure), randomBytes(42, 2*sure), randomBytes(43, 700),
		randomBytes(44, 5*sure),
		make([]byte, 4*sure), bytes.Repeat([]byte{0xff}, 3*sure),
		bytes.Repeat([]byte("period!"), sure/2), bytes.Repeat(randomBytes(45, period), 300),
	}
	type piece struct{ part, from, length int }
	blob := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) piece {
		part := rapid.IntRange(0, len(parts)-1).Draw(t, "part")
		from := rapid.IntRange(0, len(parts[part])-1).Draw(t, "from")
		return piece{part, from, rapid.IntRange(1, len(parts[part])-from).Draw(t, "length")}
	}), 1, 7)
	join := func(pieces ...piece) (b []byte) {
		for _, p := range pieces {
			b = append(b, parts[p.part][p.from:p.from+p.length]...)
		}
		return b
	}
	check := func(t require.TestingT, target []piece, stored ...[]byte) *Plan {
		m := exact.NewMatcher(sure, 1<<20)
		for _, s := range stored {
			m.New(s)
		}
		b := append(join(target...), 'y')
		bound := m.New(b)
		p := pack(t, b, stored...)
		bound += minPiece * int64(len(p.Extents))
		for _, piece := range target {
			if piece.part == periodic {
				bound += period
			}
		}
		require.LessOrEqual(t, p.LiteralSize(), bound)
		return p
	}
	t.Run("a stored piece within the first period of a run", func(t *testing.T) {
		p := check(t, []piece{{periodic, 0, 16684}}, append(join(piece{periodic, 258, 96}), 'x'))
		require.EqualValues(t, 258+period+1, p.LiteralSize())
	})
	t.Run("a stored run that begins elsewhere in the period", func(t *testing.T) {
		p := check(t, []piece{{periodic, 0, 16641}},
			append(join(piece{periodic, 857, 16427}), 'x'))
		require.EqualValues(t, 1, p.LiteralSize())
	})
	t.Run("a stored run that is found where it stands for the second time", func(t *testing.T) {
		p := check(t, []piece{{0, 69, sure}, {0, 0, sure}},
			join(piece{0, 0, sure + 69}))
		require.EqualValues(t, 1, p.LiteralSize())
	})
	t.Run("random", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			stored := [][]byte{join(blob.Draw(t, "stored")...),
				append(join(blob.Draw(t, "also stored")...), 'x')}
			check(t, blob.Draw(t, "target"), stored...)
		})
	})
}
