package main

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// A crash on a full disk costs no stored build: without any worker the next daemon serves all of
// them, though their views are to be made again.
func TestStoredBuildsAreServedOnAFullDiskAfterACrash(t *testing.T) {
	t.Parallel()
	s := newSite(t, runtimeDir(t, openVINO))
	disk, dir := smallDisk(t, 64<<20), t.TempDir()
	s.state = filepath.Join(disk, "state")
	// else the collector evicts for the files that fill the disk
	s.config += "[space]\nfree_floor = \"\"\n"
	d := s.start(t)
	models := []string{writeModel(t, dir, 1), writeModel(t, dir, 2)}
	for _, model := range models {
		require.Equal(t, "compiled", get(t, d.dial(), model).Outcome)
	}
	fillDisk(t, filepath.Join(disk, "filler"), 0)
	d.kill()
	made, err := filepath.Glob(filepath.Join(s.state, "views", "shared", "*"))
	require.NoError(t, err)
	for _, view := range made {
		removeAll(t, view)
	}
	fillDisk(t, filepath.Join(disk, "filler2"), 0)

	none, err := exec.LookPath("false")
	require.NoError(t, err)
	s.config = "worker = \"" + none + "\"\n" + s.config
	d = s.start(t)
	for _, model := range models {
		a := get(t, d.dial(), model, func(r *wire.Acquire) { r.OnMiss = wire.OnMiss_FAIL })
		require.Equal(t, "hit", a.Outcome)
		a.requireRight(t)
	}
	d.stop()
}
