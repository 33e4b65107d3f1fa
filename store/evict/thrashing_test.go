package evict

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

func TestThrashes(t *testing.T) {
	tombstone := func(key byte, scope string, seconds float64, bytes int64) index.Tombstone {
		return index.Tombstone{RequestKey: index.RequestKey{key}, Scope: scope,
			CompileSeconds: seconds, Bytes: bytes}
	}
	tombstones := []index.Tombstone{
		tombstone(1, "shared", 2, 10), // twice gone, and there again
		tombstone(2, "shared", 4, 20), // gone for good
		tombstone(1, "shared", 3, 30),
		tombstone(2, "uid:7", 8, 40), // another entry, that went twice and has not come back since
		tombstone(2, "uid:7", 16, 80),
	}
	seen := FindThrashing(tombstones, func(g *index.Tombstone) bool { return g.RequestKey[0] == 1 })
	require.Equal(t, Thrashing{Evicted: 3, Back: 2, Seconds: 2 + 3 + 8, Bytes: 10 + 40}, seen)
	require.Equal(t, Thrashing{}, FindThrashing(nil, nil))
	require.False(t, seen.IsSignificant(), "two are not many")
	require.True(t, Thrashing{Evicted: 12, Back: 3}.IsSignificant())
	require.False(t, Thrashing{Evicted: 13, Back: 3}.IsSignificant(), "less than a quarter")
}
