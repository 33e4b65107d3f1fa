package cas

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// servedFile is a file that was hashed, and got the name then that somebody is served by.
func servedFile(t *testing.T, s *Store, b []byte) (path string, known Hashed) {
	t.Helper()
	staged, path := filepath.Join(s.dir, "staged"), filepath.Join(s.dir, "served")
	require.NoError(t, os.WriteFile(staged, b, 0o600))
	known, err := s.HashAhead(ctx, staged)
	require.NoError(t, err)
	require.NotZero(t, known)
	require.NoError(t, os.Rename(staged, path))
	return path, known
}

// What somebody is served from becomes a blob under a further name, without a copy, and its name goes as those of views do.
func TestWhatIsServedBecomesABlob(t *testing.T) {
	s := openStore(t, Options{})
	b := random(5000)
	path, known := servedFile(t, s, b)
	hold := s.Hold()
	defer hold.Release()
	d, n, err := hold.PutLinked(ctx, path, known)
	require.NoError(t, err)
	require.Equal(t, int64(len(b)), n)
	require.Equal(t, contents(t, s, d), b)
	require.Equal(t, []Digest{d}, hold.Kept())
	served, err := os.Stat(path)
	require.NoError(t, err)
	blob, err := os.Stat(s.path(d))
	require.NoError(t, err)
	require.True(t, os.SameFile(served, blob), "one file on the disk")
	dir, err := os.Open(s.dir)
	require.NoError(t, err)
	defer dir.Close()
	require.NoError(t, s.Unlink(d, dir, "served"))
	_, ok := s.Stamp(d)
	require.True(t, ok)
	require.NoError(t, s.Verify(ctx, d, nil))
}

// What was hashed is what is stored, or nothing is; what could be written yet is copied, and a blob that is there is left alone.
func TestWhatIsServedAndNotWhatWasHashed(t *testing.T) {
	b := random(5000)
	other := append([]byte{b[0] ^ 1}, b[1:]...)
	for name, of := range map[string]struct {
		before func(t *testing.T, s *Store, path string)
		wrong  bool
		linked bool
	}{
		"as it was": {func(*testing.T, *Store, string) {}, false, true},
		"other bytes": {func(t *testing.T, _ *Store, path string) {
			require.NoError(t, os.Chmod(path, 0o600))
			require.NoError(t, os.WriteFile(path, other, 0o600))
		}, true, false},
		"open for writing": {func(t *testing.T, _ *Store, path string) {
			require.NoError(t, os.Chmod(path, 0o600))
			w, err := os.OpenFile(path, os.O_WRONLY, 0)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, w.Close()) })
		}, false, false},
		"written, and open for it": {func(t *testing.T, _ *Store, path string) {
			require.NoError(t, os.Chmod(path, 0o600))
			w, err := os.OpenFile(path, os.O_WRONLY, 0)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, w.Close()) })
			_, err = w.WriteAt(other[:1], 0)
			require.NoError(t, err)
		}, true, false},
		"there already": {func(t *testing.T, s *Store, _ string) { mustPut(t, s, b) }, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, Options{})
			path, known := servedFile(t, s, b)
			of.before(t, s, path)
			served, err := os.Stat(path)
			require.NoError(t, err)
			hold := s.Hold()
			defer hold.Release()
			d, _, err := hold.PutLinked(ctx, path, known)
			now, statErr := os.Stat(path)
			require.NoError(t, statErr)
			require.True(t, os.SameFile(served, now), "whoever is served has it still")
			if of.wrong {
				require.ErrorIs(t, err, ErrChanged)
				return
			}
			require.NoError(t, err)
			require.Equal(t, b, contents(t, s, d))
			blob, err := os.Stat(s.path(d))
			require.NoError(t, err)
			require.Equal(t, of.linked, os.SameFile(served, blob))
		})
	}
	s := openStore(t, Options{})
	path, _ := servedFile(t, s, b)
	_, _, err := s.Hold().PutLinked(ctx, path, Hashed{})
	require.True(t, errors.Is(err, ErrChanged), "nobody knows what it was")
}
