package cas_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cas/crashfs"
)

var (
	old   = bytes.Repeat([]byte("there before "), 300)
	fresh = bytes.Repeat([]byte("newly stored "), 500)
)

func digestOf(b []byte) cas.Digest { return blake3.Sum256(b) }

// memoryDir makes a directory in memory, if that can be: thousands of stores are
// made here, and what a power cut takes away is simulated anyway.
func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "cas")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

// operation is one call of the store; has says which blobs have to be there
// after it was acknowledged, and may which may be there after it was not.
type operation struct {
	name string
	run  func(s *cas.Store, root string) error
	has  [][]byte
	may  [][]byte // besides: before it was acknowledged these may be there or not
	keep [][]byte // what no outcome may lose
}

func operations() []operation {
	ctx := context.Background()
	put := func(s *cas.Store, b []byte) error {
		d, n, err := s.Put(ctx, bytes.NewReader(b))
		if err == nil && (d != digestOf(b) || n != int64(len(b))) {
			return fmt.Errorf("stored as %s, %d bytes", d, n)
		}
		return err
	}
	staged := func(root string, mode os.FileMode) (string, error) {
		path := filepath.Join(root, "staged")
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return "", err
		}
		return path, os.WriteFile(path, fresh, mode)
	}
	return []operation{
		{"put", func(s *cas.Store, _ string) error { return put(s, fresh) }, [][]byte{old, fresh},
			[][]byte{fresh}, [][]byte{old}},
		{"put what is there", func(s *cas.Store, _ string) error { return put(s, old) },
			[][]byte{old}, nil, [][]byte{old}},
		{"put file", func(s *cas.Store, root string) error {
			path, err := staged(root, 0o600)
			if err != nil {
				return err
			}
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			_, _, err = s.PutFile(ctx, f)
			return err
		}, [][]byte{old, fresh}, [][]byte{fresh}, [][]byte{old}},
		{"adopt", func(s *cas.Store, root string) error {
			path, err := staged(root, 0o600)
			if err != nil {
				return err
			}
			_, _, err = s.AdoptHashed(ctx, path, cas.Hashed{})
			return err
		}, [][]byte{old, fresh}, [][]byte{fresh}, [][]byte{old}},
		{"adopt what was hashed", func(s *cas.Store, root string) error {
			path, err := staged(root, 0o600)
			if err != nil {
				return err
			}
			known, err := s.HashAhead(ctx, path)
			if err != nil {
				return err
			}
			_, _, err = s.AdoptHashed(ctx, path, known)
			return err
		}, [][]byte{old, fresh}, [][]byte{fresh}, [][]byte{old}},
		{"adopt what was copied", func(s *cas.Store, root string) error {
			path := filepath.Join(root, "copied")
			// of the try before
			if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			known, err := s.CopyAhead(ctx, bytes.NewReader(fresh), path, int64(len(fresh)))
			if err != nil {
				return err
			}
			_, _, err = s.AdoptHashed(ctx, path, known)
			return err
		}, [][]byte{old, fresh}, [][]byte{fresh}, [][]byte{old}},
		{"remove", func(s *cas.Store, _ string) error { return s.Remove(digestOf(old)) }, nil,
			[][]byte{old}, nil},
		{"remove unless needed", func(s *cas.Store, _ string) error {
			_, err := s.RemoveUnless(digestOf(old), unneeded)
			return err
		}, nil, [][]byte{old}, nil},
		{"quarantine",
			func(s *cas.Store, _ string) error { return s.Quarantine(digestOf(old), "a test") },
			nil, [][]byte{old}, nil},
	}
}

// requireStore opens what a crash has left and compares it with what has to be
// there and what may be there. Everything that is there has to be sound.
func requireStore(t *testing.T, dir string, has, may [][]byte) {
	t.Helper()
	ctx := context.Background()
	s, err := cas.Open(dir, cas.Options{})
	require.NoError(t, err)
	for _, b := range has {
		f, err := s.Open(ctx, digestOf(b))
		require.NoError(t, err)
		got, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
		require.NoError(t, err)
		require.NoError(t, f.Close())
		require.True(t, bytes.Equal(b, got), "the blob has other bytes")
	}
	allowed := make(map[cas.Digest]bool)
	for _, b := range append(has, may...) {
		allowed[digestOf(b)] = true
	}
	require.NoError(t, s.Walk(ctx, func(d cas.Digest, _, _ int64) error {
		require.True(t, allowed[d], "blob %s comes from nowhere", d)
		return s.Check(ctx, d)
	}))
	foreign, err := s.Foreign(ctx)
	require.NoError(t, err)
	require.Empty(t, foreign)
	left, err := os.ReadDir(filepath.Join(dir, "objects", "incoming"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// start makes a store with one blob, below a file system that can stop.
func start(t *testing.T) (fs *crashfs.FS, s *cas.Store, root string) {
	t.Helper()
	root = memoryDir(t)
	s, err := cas.Open(filepath.Join(root, "state"), cas.Options{})
	require.NoError(t, err)
	_, _, err = s.Put(context.Background(), bytes.NewReader(old))
	require.NoError(t, err)
	fs, err = crashfs.New(root)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, fs.Close()) })
	s, err = cas.Open(filepath.Join(root, "state"), cas.Options{FS: fs})
	require.NoError(t, err)
	return fs, s, root
}

func requireAfterCrash(t *testing.T, fs *crashfs.FS, has, may [][]byte) {
	t.Helper()
	losses := []crashfs.Loss{crashfs.Nothing, crashfs.Everything, crashfs.Some, crashfs.Some}
	for i, loss := range losses {
		after := memoryDir(t)
		require.NoError(t, fs.Crash(after, loss, uint64(fs.Steps()+i)))
		requireStore(t, filepath.Join(after, "state"), has, may)
		require.NoError(t, os.RemoveAll(after))
	}
}

func TestStopAtEveryStep(t *testing.T) {
	for _, op := range operations() {
		t.Run(op.name, func(t *testing.T) {
			for step := 1; ; step += crashfs.Stride {
				fs, s, root := start(t)
				before := fs.Steps()
				fs.StopAt(before + step)
				err := op.run(s, root)
				if err == nil {
					requireAfterCrash(t, fs, op.has, nil)
				} else {
					requireAfterCrash(t, fs, op.keep, append(op.may, op.keep...))
				}
				if fs.Steps() < before+step { // it was over before the stop
					require.NoError(t, err)
					require.Greater(t, step, 2, "the operation has no steps")
					return
				}
			}
		})
	}
}

func TestFailAtEveryStep(t *testing.T) {
	for _, op := range operations() {
		t.Run(op.name, func(t *testing.T) {
			for step := 1; ; step += crashfs.Stride {
				fs, s, root := start(t)
				before := fs.Steps()
				fs.FailAt(before+step, []error{syscall.EIO, syscall.ENOSPC}[step%2])
				err := op.run(s, root)
				if err != nil {
					requireAfterCrash(t, fs, op.keep, append(op.may, op.keep...))
					// A retry succeeds. The failed operation may have
					// removed the blob already.
					if err = op.run(s, root); err != nil {
						require.ErrorIs(t, err, cas.ErrNotFound)
					}
				}
				requireAfterCrash(t, fs, op.has, [][]byte{fresh}[:min(1, len(op.may)*len(op.keep))])
				if fs.Steps() < before+step {
					return
				}
			}
		})
	}
}

func TestStopWhileOpening(t *testing.T) {
	for step := 1; ; step += 20 * crashfs.Stride { // there are hundreds, and they are alike
		fs, _, root := start(t)
		require.NoError(t, os.RemoveAll(filepath.Join(root, "state", "quarantine")))
		before := fs.Steps()
		fs.StopAt(before + step)
		_, err := cas.Open(filepath.Join(root, "state"), cas.Options{FS: fs})
		requireAfterCrash(t, fs, [][]byte{old}, nil)
		if err == nil {
			return
		}
	}
}
