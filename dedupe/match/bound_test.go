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
// finds new.
func TestMatchIsCloseToAnExactMatcher(t *testing.T) {
	parts := [][]byte{
		randomBytes(41, 3*sure), randomBytes(42, 2*sure), randomBytes(43, 700),
		randomBytes(44, 5*sure),
		make([]byte, 4*sure), bytes.Repeat([]byte{0xff}, 3*sure),
		bytes.Repeat([]byte("period!"), sure/2), bytes.Repeat(randomBytes(45, 300), 300),
	}
	type piece struct{ part, from, length int }
	blob := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) piece {
		part := rapid.IntRange(0, len(parts)-1).Draw(t, "part")
		from := rapid.IntRange(0, len(parts[part])-1).Draw(t, "from")
		return piece{part, from, rapid.IntRange(1, len(parts[part])-from).Draw(t, "length")}
	}), 1, 7)
	join := func(pieces []piece) (b []byte) {
		for _, p := range pieces {
			b = append(b, parts[p.part][p.from:p.from+p.length]...)
		}
		return b
	}
	rapid.Check(t, func(t *rapid.T) {
		stored := [][]byte{join(blob.Draw(t, "stored")),
			append(join(blob.Draw(t, "also stored")), 'x')}
		target := append(join(blob.Draw(t, "target")), 'y')
		m := exact.NewMatcher(sure, 1<<20)
		for _, s := range stored {
			m.New(s)
		}
		bound := m.New(target)
		p := pack(t, target, stored...)
		// Where two extents meet, up to minPiece bytes may be left.
		require.LessOrEqual(t, p.LiteralSize(), bound+minPiece*int64(len(p.Extents)))
	})
}
