package query

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

func TestAStreamKeepsABoundedNumberOfEvents(t *testing.T) {
	var s Stream
	for i := range 5 * MaxBehind {
		s.Add(index.Event{Sequence: uint64(i + 1)})
		require.LessOrEqual(t, len(s.latest), 2*MaxBehind)
	}
	events, missed, _ := s.since(1)
	require.Len(t, events, MaxBehind)
	require.EqualValues(t, 4*MaxBehind, missed)
}
