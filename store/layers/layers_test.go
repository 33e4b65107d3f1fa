package layers

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

func source(t *testing.T, fails error, ids ...byte) Source {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "list"), nil, 0o600))
	return Source{Path: dir, List: "list", Read: func() (out []index.Build, _ []string, _ error) {
		for _, id := range ids {
			out = append(out, index.Build{ID: index.BuildID{id}, RequestKey: index.RequestKey{1},
				Layer: dir})
		}
		return out, nil, fails
	}}
}

// A page of a list has the builds of the store and of layers in order of ids, from the one on that
// the page before ended with.
func TestBuildsOfLayersAreListedAmongTheOthers(t *testing.T) {
	s := New([]Source{source(t, nil, 7, 3), source(t, nil, 3, 5)}, slog.New(slog.DiscardHandler))
	own := func(fn func(index.Build) error) error {
		for _, id := range []byte{4, 5, 6} {
			if err := fn(index.Build{ID: index.BuildID{id}}); err != nil {
				return err
			}
		}
		return nil
	}
	for after, want := range map[byte][]byte{0: {3, 4, 5, 5, 6, 7}, 3: {4, 5, 5, 6, 7},
		6: {4, 5, 6, 7}} {
		var got []byte
		require.NoError(t, s.Among(index.BuildID{after}, own, func(b index.Build) error {
			got = append(got, b.ID[0])
			return nil
		}))
		require.Equal(t, want, got, "after %d", after)
	}
	enough := errors.New("enough")
	require.Equal(t, enough, s.Among(index.BuildID{}, own, func(index.Build) error {
		return enough
	}))
	require.Len(t, s.Of(index.RequestKey{1}), 3, "the second layer has one that the first has")
	first, _ := s.Get(index.BuildID{3})
	require.Equal(t, (*s.all.Load())[0].Path, first.Layer)
}

// The marks of a build are kept while its layer is missing, because the layer may come back.
func TestMarksAreKeptWhileALayerIsMissing(t *testing.T) {
	whole := New([]Source{source(t, nil, 1)}, slog.New(slog.DiscardHandler))
	require.True(t, whole.Keep(index.BuildID{1}))
	require.False(t, whole.Keep(index.BuildID{2}))
	lacking := New([]Source{source(t, nil, 1), source(t, os.ErrNotExist)},
		slog.New(slog.DiscardHandler))
	require.True(t, lacking.Keep(index.BuildID{2}))
	require.ErrorIs(t, lacking.States()[1].Err, os.ErrNotExist)
}

// Other layers take the place of those before, and are followed from then on.
func TestOtherLayersAreUsed(t *testing.T) {
	s := New([]Source{source(t, nil, 1)}, slog.New(slog.DiscardHandler))
	next := source(t, nil, 2, 3)
	s.Use([]Source{next})
	_, there := s.Get(index.BuildID{1})
	require.False(t, there)
	require.Len(t, s.Of(index.RequestKey{1}), 2)
	require.Len(t, s.States(), 1)
	require.NoError(t, os.Remove(filepath.Join(next.Path, "list")))
	reads := 0
	next.Read = func() ([]index.Build, []string, error) { reads++; return nil, nil, nil }
	s.Use([]Source{next})
	require.NoError(t, os.WriteFile(filepath.Join(next.Path, "list"), nil, 0o600))
	s.Follow()
	s.Follow()
	require.Equal(t, 2, reads)
	s.Use(nil)
	s.Follow()
	require.Empty(t, s.States())
}
