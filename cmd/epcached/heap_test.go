package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A heap of little grows to the floor, and one of much to twice its size as by default.
func TestHeapGrowsToTheFloor(t *testing.T) {
	for live, percent := range map[uint64]int{0: 800, 1 << 20: 800, 8 << 20: 300, 15 << 20: 113,
		16 << 20: 100, 1 << 40: 100} {
		require.Equal(t, percent, gcPercentFor(live), "%d live bytes", live)
	}
}
