package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock"
)

// The uids that /etc/subuid gives to a user count as that user, but those of root as no
// administrator.
func TestConnectionsOfTheUidsOfAContainer(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root can connect as other users")
	}
	const person, byRoot, own = stranger, 300_000, 256
	s := newSite(t)
	subuid := filepath.Join(filepath.Dir(s.socket), "subuid")
	ranges := fmt.Sprintf("%d:100000:65536\nroot:%d:65536\n", person, byRoot)
	require.NoError(t, os.WriteFile(subuid, []byte(ranges), 0o644))
	s.under = []string{"unshare", "--mount", "sh", "-c",
		`mount --bind "$0" /etc/subuid && exec "$@"`, subuid}
	d := s.start(t)
	connect := func(uid int) error {
		c, err := (&owner{epcached: d, uid: uid}).tryConnect()
		if err == nil {
			t.Cleanup(func() { c.Close() })
		}
		return err
	}
	for _, first := range []int{100_000, byRoot} {
		for uid := range own {
			require.NoError(t, connect(first+uid))
		}
		require.ErrorIs(t, connect(first+own), unixsock.ErrBusy)
	}
	require.ErrorIs(t, connect(person), unixsock.ErrBusy)
	require.NoError(t, connect(person+1))
	require.NoError(t, connect(0))
}
