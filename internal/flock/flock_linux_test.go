package flock

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func open(t *testing.T, dir string) *os.File {
	f, err := os.Open(dir)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func requireLeased(t *testing.T, dir string, want bool) {
	t.Helper()
	f := open(t, dir)
	held, err := Leased(f)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Equal(t, want, held)
}

func TestLeaseLastsAsLongAsADuplicateIsOpen(t *testing.T) {
	dir := t.TempDir()
	requireLeased(t, dir, false)
	f := open(t, dir)
	require.NoError(t, Lease(f))
	requireLeased(t, dir, true)
	duplicate, err := unix.Dup(int(f.Fd()))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	requireLeased(t, dir, true)
	require.NoError(t, unix.Close(duplicate))
	requireLeased(t, dir, false)
}

func TestHolderOfALeaseKeepsNoOtherFromOne(t *testing.T) {
	dir := t.TempDir()
	first := open(t, dir)
	require.NoError(t, Lease(first))
	locked, err := TryLock(first)
	require.NoError(t, err)
	require.True(t, locked)
	_, err = fcntl(first, unix.F_OFD_SETLK, unix.F_WRLCK)
	require.ErrorIs(t, err, unix.EBADF)
	second := open(t, dir)
	require.NoError(t, Lease(second))
	require.NoError(t, first.Close())
	requireLeased(t, dir, true)
	require.NoError(t, second.Close())
	requireLeased(t, dir, false)
}

func TestLeasesOfEarlierVersionsCount(t *testing.T) {
	dir := t.TempDir()
	f := open(t, dir)
	shared, err := TryShare(f)
	require.NoError(t, err)
	require.True(t, shared)
	requireLeased(t, dir, true)
	require.NoError(t, f.Close())
	requireLeased(t, dir, false)
}
