package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// The line shows stored bytes beside logical ones, because a packed store takes less than its
// builds.
func TestSpaceLineNamesItsBound(t *testing.T) {
	s := wire.Space{DiskBytes: 95 << 20, ManifestBytes: 1 << 20, LogicalBytes: 485 << 20,
		UniqueBytes: 485 << 20,
		Entries:     11, Builds: 1}
	require.Equal(t, "96.0 MiB on disk, for files of 485.0 MiB, 11 entries, 1 build", spaceLine(&s))
	s.BudgetBytes, s.UniqueBytes = 1<<30, 400<<20
	require.Equal(t, "96.0 MiB on disk of 1.0 GiB, for files of 485.0 MiB (400.0 MiB with equal "+
		"files counted once), 11 entries, 1 build", spaceLine(&s))
}
