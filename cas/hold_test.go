package cas_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

func unneeded() (bool, error) { return false, nil }

func TestAHeldBlobIsNotRemoved(t *testing.T) {
	ctx, dir := context.Background(), memoryDir(t)
	s, err := cas.Open(filepath.Join(dir, "state"), cas.Options{})
	require.NoError(t, err)
	path := filepath.Join(dir, "state", "staged")
	require.NoError(t, os.WriteFile(path, fresh, 0o600))
	h := s.Hold()
	d, _, err := h.AdoptHashed(ctx, path, cas.Hashed{})
	require.NoError(t, err)
	require.Equal(t, []cas.Digest{d}, h.Kept())
	removed, err := s.RemoveUnless(d, unneeded)
	require.NoError(t, err)
	require.False(t, removed)

	second := s.Hold()
	there, err := second.Keep(ctx, d)
	require.NoError(t, err)
	require.True(t, there)
	h.Release()
	h.Release() // a second call does nothing
	removed, err = s.RemoveUnless(d, unneeded)
	require.NoError(t, err)
	require.False(t, removed, "the other one keeps it")
	second.Release()
	removed, err = s.RemoveUnless(d, func() (bool, error) { return true, nil })
	require.NoError(t, err)
	require.False(t, removed, "somebody refers to it")
	removed, err = s.RemoveUnless(d, unneeded)
	require.NoError(t, err)
	require.True(t, removed)
	removed, err = s.RemoveUnless(d, unneeded)
	require.NoError(t, err)
	require.False(t, removed, "it is gone")
	there, err = second.Keep(ctx, d)
	require.NoError(t, err)
	require.False(t, there)
}

// Several goroutines publish the same blob repeatedly while another removes it when it is
// unreferenced.
func TestPublishedBlobsSurviveConcurrentRemoval(t *testing.T) {
	ctx, dir := context.Background(), memoryDir(t)
	s, err := cas.Open(filepath.Join(dir, "state"), cas.Options{})
	require.NoError(t, err)
	d := digestOf(fresh)
	var refers atomic.Int64
	stop := make(chan struct{})
	var remover, publishers sync.WaitGroup
	removals := 0
	remover.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			removed,
				err := s.RemoveUnless(d, func() (bool, error) { return refers.Load() > 0, nil })
			if err != nil {
				t.Error(err)
				return
			}
			if removed {
				removals++
			}
		}
	})
	source := filepath.Join(dir, "source")
	require.NoError(t, os.WriteFile(source, fresh, 0o600))
	for range 3 {
		publishers.Go(func() {
			for range 100 {
				f, err := os.Open(source)
				if err != nil {
					t.Error(err)
					return
				}
				h := s.Hold()
				_, _, err = h.PutFile(ctx, f)
				f.Close()
				refers.Add(1) // as a manifest would
				h.Release()
				if err != nil || !s.Has(d) {
					t.Errorf("there: %v, error %v", s.Has(d), err)
				}
				refers.Add(-1)
			}
		})
	}
	publishers.Wait()
	close(stop)
	remover.Wait()
	require.Positive(t, removals)
}

// noLinks is a file system without room for one more name.
type noLinks struct{ cas.OS }

func (noLinks) Link(string, string) error { return syscall.ENOSPC }

// A staged file that could not be linked because the disk is full keeps its bytes for waiting
// requests.
func TestAStagedFileStaysWhenItCannotBeStored(t *testing.T) {
	root := memoryDir(t)
	s, err := cas.Open(filepath.Join(root, "state"), cas.Options{FS: noLinks{}})
	require.NoError(t, err)
	path := filepath.Join(root, "state", "staged")
	require.NoError(t, os.WriteFile(path, fresh, 0o600))
	_, _, err = s.Hold().AdoptHashed(context.Background(), path, cas.Hashed{})
	require.ErrorIs(t, err, syscall.ENOSPC)
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, bytes.Equal(fresh, got))
}
