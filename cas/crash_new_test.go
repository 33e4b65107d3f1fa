package cas_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cas/crashfs"
)

// The first blobs of a new store survive a power cut with the directories above them, also where an
// earlier start was stopped while it made these.
func TestTheFirstBlobSurvivesAPowerCut(t *testing.T) {
	for _, stopped := range []int{0, 2, 3, 4, 5, 6, 7} {
		t.Run(fmt.Sprintf("a start stopped at step %d", stopped), func(t *testing.T) {
			root := memoryDir(t)
			state := filepath.Join(root, "state")
			fs, err := crashfs.New(root)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, fs.Close()) })
			if stopped > 0 {
				fs.StopAt(stopped)
				_, err = cas.Open(state, cas.Options{FS: fs})
				require.ErrorIs(t, err, crashfs.ErrStopped)
				fs.StopAt(0)
			}
			s, err := cas.Open(state, cas.Options{FS: fs})
			require.NoError(t, err)
			_, _, err = s.Put(context.Background(), bytes.NewReader(fresh))
			require.NoError(t, err)
			requireAfterCrash(t, fs, [][]byte{fresh}, nil)
		})
	}
}

// Putting a blob makes its shard again, durably, if it was deleted.
func TestABlobInADirectoryThatWasDeleted(t *testing.T) {
	fs, s, root := start(t)
	d := digestOf(fresh).String()
	_, _, err := s.Put(context.Background(), bytes.NewReader(fresh))
	require.NoError(t, err)
	require.NoError(t, os.RemoveAll(filepath.Join(root, "state", "objects", d[:2])))
	_, _, err = s.Put(context.Background(), bytes.NewReader(fresh))
	require.NoError(t, err)
	requireAfterCrash(t, fs, [][]byte{old, fresh}, nil)
}

// Bytes that another process repaired are durable before they are served.
func TestVerifiedBlobsAreDurable(t *testing.T) {
	root := memoryDir(t)
	state := filepath.Join(root, "state")
	s, err := cas.Open(state, cas.Options{})
	require.NoError(t, err)
	d, _, err := s.Put(context.Background(), bytes.NewReader(old))
	require.NoError(t, err)
	path := filepath.Join(state, "objects", d.String()[:2], d.String())
	require.NoError(t, os.Chmod(path, 0o600))
	require.NoError(t, os.WriteFile(path, []byte("damaged"), 0o600))
	fs, err := crashfs.New(root)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, fs.Close()) })
	s, err = cas.Open(state, cas.Options{FS: fs})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, old, 0o600)) // not synced
	f, err := s.Open(context.Background(), d)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	requireAfterCrash(t, fs, [][]byte{old}, nil)
}
