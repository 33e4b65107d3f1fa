package main

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A process that has no descriptors left tells its clients, and serves and stores again as soon as
// it has some. (A file system cannot be remounted read-only under a daemon, because index.db is
// open; package store meets EROFS in each of its calls.)
func TestDaemonRecoversFromHavingNoDescriptors(t *testing.T) {
	t.Parallel()
	d := newSite(t, runtimeFolder(t, openVINO)).start(t)
	c, dir := d.dial(), t.TempDir()
	first, other := writeModel(t, dir, 1), writeModel(t, dir, 2)
	get(t, c, first)

	var before unix.Rlimit
	require.NoError(t, unix.Prlimit(d.pid(), unix.RLIMIT_NOFILE, nil, &before))
	none := unix.Rlimit{Cur: 8, Max: before.Max}
	require.NoError(t, unix.Prlimit(d.pid(), unix.RLIMIT_NOFILE, &none, nil))
	_, err := tryGet(t, c, other)
	require.Error(t, err, "the client compiles by itself")
	require.True(t, d.running())
	require.NoError(t, unix.Prlimit(d.pid(), unix.RLIMIT_NOFILE, &before, nil))
	c = d.dial()
	require.Equal(t, "hit", get(t, c, first, onMissFail).Outcome)
	get(t, c, other)
	require.Equal(t, "hit", get(t, c, other, onMissFail).Outcome)
}
