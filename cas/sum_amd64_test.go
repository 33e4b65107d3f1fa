package cas

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3/guts"
)

func TestAFullPieceIsTheSameOnEveryProcessor(t *testing.T) {
	b := random(pieceSize)
	for _, way := range []int{16, 8} {
		t.Run(fmt.Sprint(way, " lanes"), func(t *testing.T) {
			if lanes < way {
				t.Skip("SKIPPED: this processor has no vectors as wide")
			}
			// with the last chunk counter of 32 bits, and beyond
			for _, index := range []uint64{0, 1, 1<<22 - 1, 1 << 22, 1<<33 + 5} {
				chunk := index * (pieceSize / guts.ChunkSize)
				require.Equal(t, guts.ChainingValue(groupsNode(b, chunk)),
					guts.ChainingValue(fullPieceOf(way, b, chunk)), "piece %d", index)
			}
		})
	}
}
