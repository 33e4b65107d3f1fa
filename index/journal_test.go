package index

import (
	"errors"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/reserve"
)

// brokenDisk syncs nothing and makes no file while it is broken.
type brokenDisk struct {
	cas.OS
	broken bool
}

func (d *brokenDisk) Sync(f *os.File) error {
	return errors.Join(d.err(), d.OS.Sync(f))
}

func (d *brokenDisk) Create(path string) (*os.File, error) {
	if err := d.err(); err != nil {
		return nil, err
	}
	return d.OS.Create(path)
}

func (d *brokenDisk) err() error {
	if d.broken {
		return syscall.EIO
	}
	return nil
}

// If a shared sync fails and the journal cannot be rewritten, both waiting callers get an error.
func TestFailedSharedSyncFailsAllItsCallers(t *testing.T) {
	dir, disk := memoryDir(t), &brokenDisk{}
	j, damage, err := openJournal(disk, dir, reserve.New(disk, dir))
	require.NoError(t, errors.Join(damage, err))
	for i := range byte(2) {
		g := Tombstone{BuildID: BuildID{i + 1}}
		j.addTombstone(g)
		require.NoError(t, j.append(tombstoneRecord(&g)))
	}
	disk.broken = true
	require.ErrorIs(t, j.sync(1), syscall.EIO)
	require.ErrorIs(t, j.sync(2), syscall.EIO)
	disk.broken = false
	require.NoError(t, j.sync(2))
	require.NoError(t, j.close())
	j, damage, err = openJournal(disk, dir, reserve.New(disk, dir))
	require.NoError(t, errors.Join(damage, err))
	require.Len(t, j.tombstones, 2)
	require.NoError(t, j.close())
}
