package unixsock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// A burst does not wait; then events follow each other by the interval, and a rest earns a burst
// again.
func TestAPaceAllowsABurst(t *testing.T) {
	var p pace
	now := time.Unix(1000, 0)
	wait := func() time.Duration { return p.wait(now, 5*time.Millisecond, 3) }
	for range 4 { // the burst, and the event that is due
		require.Zero(t, wait())
	}
	require.Equal(t, 5*time.Millisecond, wait())
	require.Equal(t, 10*time.Millisecond, wait())
	now = now.Add(10 * time.Millisecond)
	require.Equal(t, 5*time.Millisecond, wait())
	now = now.Add(time.Hour)
	for range 4 {
		require.Zero(t, wait())
	}
	require.Equal(t, 5*time.Millisecond, wait())
}

// While another user is served, a user that connects again and again waits for the answers to its
// Hellos, also if none of its connections overlap and none sends a request.
func TestHellosOfOneUserArePacedBesideAnother(t *testing.T) {
	const interval = 20 * time.Millisecond
	s := serveUsers(t, &standIn{}, limits{HelloInterval: interval, HelloBurst: 2},
		func(uid uint32) uint32 { return uid })
	connect := func(n int) time.Duration {
		began := time.Now()
		for range n {
			c, err := dialAs(t, s, 4001)
			require.NoError(t, err)
			require.NoError(t, c.Close())
		}
		return time.Since(began)
	}
	require.Less(t, connect(20), 20*interval, "alone")
	other, err := dialAs(t, s, 4002)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		_, err := Ask[wire.StatusReply](t.Context(), other, &wire.Status{}, nil)
		require.NoError(t, err)
		connect(1)
		return s.Crowded()
	}, patience, time.Millisecond, "connections alone count")
	require.GreaterOrEqual(t, connect(8), 5*interval)
}
