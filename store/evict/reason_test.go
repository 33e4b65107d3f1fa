package evict

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A build without a later request was never used: the time is that of its making.
func TestHitsAreCountedInWords(t *testing.T) {
	last := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for hits, want := range map[uint64]string{0: "no hits since 2026-01-02T03:04:05Z",
		1: "1 hit, last used 2026-01-02T03:04:05Z", 2: "2 hits, last used 2026-01-02T03:04:05Z"} {
		w := cause{hits: hits, class: classServed}
		require.Equal(t, "least valuable for its size: 0s of compiling, "+want, w.text(last))
	}
}
