package index

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas/crashfs"
)

// The first build of a new index survives a power cut with the directories above it, also where an
// earlier start was stopped while it made these.
func TestTheFirstBuildSurvivesAPowerCut(t *testing.T) {
	for _, stopped := range []int{0, 2, 3, 4, 100, 260, 262, 264} {
		t.Run(fmt.Sprintf("a start stopped at step %d", stopped), func(t *testing.T) {
			root := memoryDir(t)
			dir := filepath.Join(root, "state")
			fs, err := crashfs.New(root)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, fs.Close()) })
			if stopped > 0 {
				fs.StopAt(stopped)
				x, err := Open(dir, Options{FS: fs})
				if err == nil {
					_ = x.Close() // of a store that has stopped
				}
				fs.StopAt(0)
			}
			x, err := Open(dir, Options{FS: fs})
			require.NoError(t, err)
			t.Cleanup(func() { _ = x.Close() }) // of a machine that has lost its power
			b := publish(t, x)
			require.NoError(t, x.Journal.SetState(b.ID, State{Name: Withheld}))
			requireAfterCrash(t, fs, []outcome{{build: b, there: true, state: Withheld}})
		})
	}
}

// A manifest that was retracted after its commit point does not come back, because its publisher
// was told that it is not there.
func TestRetractedBuildStaysAway(t *testing.T) {
	fs, x, old := start(t, 0)
	b := sampleBuild()
	c, err := x.Stage(ctx, b)
	require.NoError(t, err)
	x.manifests.linkAndUnlink([]*Change{c})
	require.NoError(t, c.Err)
	require.NoError(t, x.manifests.uncommit(b.ID))
	requireAfterCrash(t, fs, []outcome{{build: old, there: true}, {build: b, absent: true}})
}

// A damaged manifest that was reported, and moved, is reported once.
func TestADamagedManifestIsMovedDurably(t *testing.T) {
	root := memoryDir(t)
	dir := filepath.Join(root, "state")
	x, err := Open(dir, Options{})
	require.NoError(t, err)
	b := publish(t, x)
	require.NoError(t, x.Close())
	path := x.manifests.path(b.ID)
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.WriteFile(path, []byte("damaged"), 0o600))
	require.NoError(t, os.Remove(filepath.Join(dir, "index.db"))) // so that it is read
	fs, err := crashfs.New(root)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, fs.Close()) })
	x, err = Open(dir, Options{FS: fs})
	require.NoError(t, err)
	t.Cleanup(func() { _ = x.Close() }) // of a machine that has lost its power
	require.Len(t, x.Problems(), 1)
	requireAfterCrash(t, fs, []outcome{{build: b, absent: true}})
}

// A directory of manifests that was deleted between two runs is made again, durably.
func TestManifestsThatWereDeletedAreMadeAgain(t *testing.T) {
	root := memoryDir(t)
	dir := filepath.Join(root, "state")
	x, err := Open(dir, Options{})
	require.NoError(t, err)
	old := publish(t, x)
	require.NoError(t, x.Close())
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "manifests")))
	fs, err := crashfs.New(root)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, fs.Close()) })
	x, err = Open(dir, Options{FS: fs})
	require.NoError(t, err)
	t.Cleanup(func() { _ = x.Close() }) // of a machine that has lost its power
	b := publish(t, x)
	requireAfterCrash(t, fs, []outcome{{build: old, absent: true}, {build: b, there: true}})
}
