package cache

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/unixsock/wire"
)

// Every file below the state directory is counted in exactly one line; the sum is that of du.
func TestTheLinesOfSpaceAreTheWholeDirectory(t *testing.T) {
	b := newBench(t)
	held := b.acquire(b.held(1))
	b.use(2)
	require.NoError(t, os.MkdirAll(filepath.Join(b.state, "of somebody else", "deep"), 0o700))
	require.NoError(t,
		os.WriteFile(filepath.Join(b.state, "of somebody else", "deep", "file"),
			make([]byte, 3<<12), 0o600))
	for _, incoming := range []string{"recipes/incoming", "unpacked/objects/incoming",
		"objects/incoming", "manifests/incoming", "staging"} {
		require.NoError(t, os.MkdirAll(filepath.Join(b.state, incoming), 0o700))
		// as of what is just being written
		require.NoError(t,
			os.WriteFile(filepath.Join(b.state, incoming, "x"), make([]byte, 1<<12), 0o600))
	}
	entries := 0
	measure := func() (files map[string]uint64, listed, walked int64) {
		entries = 0
		found, err := b.cache.Check(context.Background(), request.Peer{UID: b.cache.uid},
			&wire.Check{Space: true}, nil)
		require.NoError(t, err)
		files = make(map[string]uint64)
		for _, l := range found.Space {
			files[l.Name] = l.Files
			listed += l.DiskBytes
			entries -= int(l.Files)
		}
		seen := make(map[store.FileID]bool)
		require.NoError(t,
			filepath.WalkDir(b.state, func(path string, _ fs.DirEntry, _ error) error {
				if id, _, disk, ok := store.FileOnDisk(path); ok && !seen[id] {
					seen[id] = true
					walked += disk
					entries++
				}
				return nil
			}))
		return files, listed, walked
	}
	require.Eventually(t, func() bool { // the database may grow between the two
		_, listed, walked := measure()
		return listed == walked && entries == 0 // in memory directories take nothing
	}, patience, time.Millisecond)
	files, _, _ := measure()
	require.EqualValues(t, 5, files["staging"])
	require.EqualValues(t, 1, files["index"])
	require.EqualValues(t, 1, files["journal"])
	require.EqualValues(t, 1, files["reserve"])
	require.EqualValues(t, 4, files["others"],
		"README, CACHEDIR.TAG, lock, and what is somebody else's")
	require.NoError(t, held.View.Close())
}
