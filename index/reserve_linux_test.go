package index

import (
	"cmp"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/reserve"
)

// fullDisk has room for nothing, but for what is given up of the reserve: each
// write takes its bytes of that, wherever it goes.
type fullDisk struct {
	cas.OS
	full bool
	err  error // what it says then
	free int64 // bytes, while it is full
}

func (d *fullDisk) Truncate(f *os.File, size int64) error {
	info, err := f.Stat()
	if err == nil {
		err = d.OS.Truncate(f, size)
	}
	if err == nil {
		d.free += info.Size() - size
	}
	return err
}

func (d *fullDisk) WriteAt(f *os.File, p []byte, off int64) (int, error) {
	if d.full && int64(len(p)) > d.free {
		return 0,
			&fs.PathError{Op: "write", Path: f.Name(), Err: cmp.Or[error](d.err, syscall.ENOSPC)}
	}
	if d.full {
		d.free -= int64(len(p))
	}
	return d.OS.WriteAt(f, p, off)
}

// A quota of the file system's is as good as a full disk.
func TestReserveServesRequiredWritesOnly(t *testing.T) {
	for _, full := range []error{syscall.ENOSPC, syscall.EDQUOT} {
		t.Run(full.Error(), func(t *testing.T) { requireReserve(t, full) })
	}
}

// On a full disk tombstones, states and pins are made durable in what is given up of the reserve, a
// piece at a time, and events are not.
func requireReserve(t *testing.T, full error) {
	dir, disk := t.TempDir(), &fullDisk{err: full}
	x, err := Open(dir, Options{FS: disk})
	require.NoError(t, err)
	b := publish(t, x)
	reserved := func() int64 { return x.Reserve.Size() }
	require.NoError(t, x.Reserve.Replenish(2*reserve.Bytes-1))
	require.Zero(t, reserved(), "there is not so much room")
	require.NoError(t, x.Reserve.Replenish(2*reserve.Bytes))
	require.EqualValues(t, reserve.Bytes, reserved())
	taken, err := cas.DiskBytes(filepath.Join(dir, "reserve"))
	require.NoError(t, err)
	require.GreaterOrEqual(t, taken, int64(reserve.Bytes))

	disk.full = true
	require.ErrorIs(t, x.Journal.AddEvent(ctx, Event{Kind: "failed"}), full)
	require.EqualValues(t, reserve.Bytes, reserved(), "for what may be lost nothing is given up")
	require.NoError(t,
		x.Journal.AddTombstones([]Tombstone{{BuildID: BuildID{1}, Reason: "evicted"}}))
	require.EqualValues(t, reserve.Bytes-reserve.Piece, reserved())
	disk.free = 0 // another process took the rest
	require.NoError(t, x.Journal.SetState(b.ID, State{Name: Withheld, Reason: "bad"}))
	require.EqualValues(t, reserve.Bytes-2*reserve.Piece, reserved())
	disk.free = 0
	require.NoError(t, x.Journal.Pin(b.ID, Pin{}))
	disk.free = 0
	require.NoError(t,
		x.Journal.AddTombstones([]Tombstone{{BuildID: BuildID{2}, Reason: "evicted"}}))
	require.Zero(t, reserved())
	disk.free = 0
	require.ErrorIs(t, x.Journal.AddTombstones([]Tombstone{{BuildID: BuildID{3}}}), full)

	disk.full = false
	require.NoError(t, x.Reserve.Replenish(2*reserve.Bytes))
	require.EqualValues(t, reserve.Bytes, reserved())
	require.NoError(t, x.Close())
	x = open(t, dir)
	require.EqualValues(t, reserve.Bytes, reserved())
	require.Equal(t, Withheld, x.Journal.StateOf(b.ID).Name)
	_, pinned := x.Journal.Pinned(b.ID)
	require.True(t, pinned)
	require.GreaterOrEqual(t, len(x.Journal.Tombstones(nil)), 2)
}

// A store with a journal that has to be rewritten opens on a full disk.
func TestTheReserveLetsAStoreBeOpenedOnAFullDisk(t *testing.T) {
	dir := t.TempDir()
	x := open(t, dir)
	b := publish(t, x)
	require.NoError(t, x.Journal.Pin(b.ID, Pin{}))
	require.NoError(t, x.Reserve.Replenish(2*reserve.Bytes))
	require.NoError(t, x.Close())
	journal := filepath.Join(dir, "journal")
	file, err := os.ReadFile(journal)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(journal, append(file, 1), 0o600)) // torn

	x, err = Open(dir, Options{FS: &fullDisk{full: true}})
	require.NoError(t, err)
	_, pinned := x.Journal.Pinned(b.ID)
	require.True(t, pinned)
	require.EqualValues(t, reserve.Bytes-reserve.Piece, x.Reserve.Size())
	closeSound(t, x)
}

// A reserve that is no regular file, or has no blocks, as a copied store may have it, is made
// again.
func TestBadReserveIsReplaced(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "reserve")
	x := open(t, dir)
	for name, spoil := range map[string]func(){
		"missing": func() { require.NoError(t, os.Remove(path)) },
		"short":   func() { require.NoError(t, os.Truncate(path, 5)) },
		"a link": func() {
			require.NoError(t, os.Remove(path))
			require.NoError(t, os.Symlink("journal", path))
		},
	} {
		require.NoError(t, x.Reserve.Replenish(2*reserve.Bytes))
		spoil()
		require.NoError(t, x.Reserve.Replenish(2*reserve.Bytes), name)
		info, err := os.Lstat(path)
		require.NoError(t, err, name)
		require.True(t, info.Mode().IsRegular(), name)
		require.EqualValues(t, reserve.Bytes, info.Size(), name)
	}
	closeSound(t, x)
	require.NoError(t, os.Truncate(path, 0))
	require.NoError(t, os.Truncate(path, reserve.Bytes))
	x = open(t, dir)
	require.Zero(t, x.Reserve.Size())
	require.NoError(t, os.Mkdir(path, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(path, "mine"), nil, 0o600))
	require.Error(t, x.Reserve.Replenish(2*reserve.Bytes))
	require.NoError(t, x.Reserve.Replenish(2*reserve.Bytes), "it is reported once")
	require.False(t, x.Reserve.Use(func() error { return syscall.ENOSPC }) == nil)
	closeSound(t, x)
}
