package acquire

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// A compile's duration does not contain the time in the queue.
func TestJobResultLineSeparatesTheQueue(t *testing.T) {
	job := &wire.Job{Ep: "A", Build: "0123456789abcdef", QueuedMs: 1_000, StartedMs: 415_200,
		ElapsedMs: 428_000}
	require.Equal(t, "A build 0123456789ab in 13.8s (queued for 6m54s)", JobResultLine(job))
	job.StartedMs = 0
	require.Equal(t, "A build 0123456789ab in 7m8s", JobResultLine(job))
}
