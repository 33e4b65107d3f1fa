package dedupe

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
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
