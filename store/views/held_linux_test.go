package views

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

// However many files are open, the daemon's own are looked up once for a plan.
func TestOwnFilesAreLookedUpOnce(t *testing.T) {
	open := func(path string) *os.File {
		f, err := os.Open(path)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte("x"), 0o600))
	own := &OwnFiles{}
	f := open(path)
	require.Equal(t, ByDaemon, openedBy(path, own))
	require.NoError(t, f.Close())
	require.Equal(t, ByNobody, openedBy(path, own), "whatever was looked up before")
	other := filepath.Join(t.TempDir(), "other")
	require.NoError(t, os.WriteFile(other, []byte("x"), 0o600))
	open(other)
	require.Equal(t, ByOther, openedBy(other, own), "opened after the look")
	require.Equal(t, ByDaemon, openedBy(other, &OwnFiles{}))
	require.Equal(t, ByOther, openedBy(other, nil))
}

// A file with names only in a view that is being made, whose build is being removed, is held as
// well; also when the view is complete, though the removal has missed it.
func TestBlobInAnUnfinishedViewIsHeld(t *testing.T) {
	s := open(t)
	ctx := context.Background()
	leave, err := s.making.Take(t.Context())
	require.NoError(t, err)
	v, err := s.create(ctx, &s.build)
	require.NoError(t, err)
	require.Zero(t, s.UnlinkedOpenBytes(), "the blobs have names of their own")
	for _, f := range s.build.Files {
		require.NoError(t, s.blobs.Remove(f.Digest))
	}
	held := s.UnlinkedOpenBytes()
	require.Positive(t, held)
	s.discard(v)
	s.unfinished = nil
	leave()
	require.Zero(t, s.UnlinkedOpenBytes())

	s = open(t)
	evicted := &index.Change{ID: s.build.ID, Why: "evicted"}
	s.index.Commit([]*index.Change{evicted})
	require.NoError(t, evicted.Err)
	v = s.get()
	require.Nil(t, s.CurrentView(s.build.ID), "nobody new is given it")
	f, err := v.Lease()
	require.NoError(t, err, "who asked is given it")
	for _, f := range s.build.Files {
		require.NoError(t, s.blobs.Remove(f.Digest))
	}
	require.Equal(t, held, s.UnlinkedOpenBytes())
	require.NoError(t, f.Close())
	s.later = HandOver
	s.Sweep()
	require.NoDirExists(t, v.Path())
	require.Zero(t, s.UnlinkedOpenBytes())
}

// A file that has its only names in several views of removed builds is held, all the time while one
// of these goes after the other.
func TestBlobInSeveralViewsIsHeldUntilTheLast(t *testing.T) {
	s := open(t)
	first := s.get()
	lease, err := first.Lease()
	require.NoError(t, err)
	defer lease.Close()
	const most = 200
	for range most {
		s.DropCurrent(s.build.ID, 0)
		s.get()
	}
	last := s.CurrentView(s.build.ID)
	s.DropCurrent(s.build.ID, 0)
	for _, f := range s.build.Files {
		require.NoError(t, s.blobs.Remove(f.Digest))
	}
	held := s.UnlinkedOpenBytes()
	require.Positive(t, held)
	s.later = HandOver
	swept := make(chan struct{})
	go func() {
		defer close(swept)
		s.Sweep()
	}()
	for looks, over := 1, false; !over; looks++ {
		select {
		case <-swept:
			over = true
		default:
		}
		require.Equal(t, held, s.UnlinkedOpenBytes(), "look %d", looks)
	}
	require.NoDirExists(t, last.Path())
	require.DirExists(t, first.Path())
}
