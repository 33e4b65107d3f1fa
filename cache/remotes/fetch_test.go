package remotes

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/remote"
)

func TestTheFirstBytesOfATransferAreNoEstimateOfTheRest(t *testing.T) {
	began, left := time.Now(), time.Duration(-1)
	s := &stopLoss{began: began, ask: &Ask{Progress: func(_, _ int64, rest time.Duration) {
		left = rest
	}}}
	s.last.Store(&arrival{began, remote.Progress{Total: 64 << 20}})
	s.arrived(began.Add(300*time.Millisecond), remote.Progress{Done: 512 << 10, Total: 64 << 20})
	require.Zero(t, left)
	s.arrived(began.Add(2*time.Second), remote.Progress{Done: 32 << 20, Total: 64 << 20})
	require.Equal(t, 2*time.Second, left)
}
