package store

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFloorIsLowerForPacking(t *testing.T) {
	require.NoError(t, fitsLeaving("the file's own bytes", 1200, 12<<20, copyReserveOfSmall),
		"it makes "+
			"room on a disk that is nearly full")
	require.Error(t, Fits("the file's own bytes", 1200, 12<<20))
}
