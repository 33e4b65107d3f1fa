package store_test

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/cas/crashfs"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
)

// newHistory opens a store to which a test does what it likes, as the explorer does.
func newHistory(t *testing.T, fsys func(cas.FS) cas.FS) *history {
	h := &history{random: rand.New(rand.NewPCG(1, 1)), now: time.Unix(1_700_000_000, 0),
		plant: fsys, off: true, ops: []string{""},
		facts: make(map[index.BuildID]*fact), coming: make(map[string][]cas.Digest),
		doing: make(map[index.BuildID]bool), paths: make(map[string]index.BuildID)}
	var err error
	h.root, err = memoryDir()
	require.NoError(t, err)
	h.fs, err = crashfs.New(h.root)
	require.NoError(t, err)
	require.NoError(t, h.open())
	t.Cleanup(func() {
		require.NoError(t, h.store.Close())
		require.NoError(t, h.fs.Close())
		require.NoError(t, os.RemoveAll(h.root))
	})
	return h
}

// scrub lets so many rounds of ten minutes pass, of passes that take an hour.
func (h *history) scrub(rounds int) store.Pass {
	h.store.SetSettings(store.Settings{Verify: time.Hour})
	for range rounds {
		h.now = h.now.Add(10 * time.Minute)
		h.store.Packer().Scrub(context.Background())
	}
	return h.store.ScrubState().Result()
}

func flip(t *testing.T, path string) {
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	b[len(b)/2] ^= 1
	require.NoError(t, os.Chmod(path, 0o600))
	require.NoError(t, os.WriteFile(path, b, 0o400))
}

// A pass of the scrub reads every blob, whole or packed, in the time that it has, and treats what
// is damaged as a request would.
func TestScrubFindsDamageOnce(t *testing.T) {
	h := newHistory(t, nil)
	for range 4 {
		require.NoError(t, h.publish(h.random))
	}
	h.now = h.now.Add(time.Minute) // it takes from the earlier one
	require.NoError(t, h.publishLike(h.random, false))
	all := h.there()
	packed := all[4].build
	what, _, err := h.store.Packer().PackOnRequest(context.Background(), false)(&packed)
	require.NoError(t, err)
	require.Equal(t, store.PackedNow, what)
	var blobs uint64
	for _, f := range all {
		blobs += uint64(len(f.build.Files))
	}
	whole := all[0].build.Files[1].Digest
	state := h.store.Directory()
	flip(t, filepath.Join(state, "objects", whole.String()[:2], whole.String()))
	recipes, err := filepath.Glob(filepath.Join(state, "recipes", "??", "*"))
	require.NoError(t, err)
	found := 0
	for _, path := range recipes {
		flip(t, path)
		found++
	}
	require.Positive(t, found, "%v", recipes)

	p := h.scrub(3)
	require.True(t, p.Ended.IsZero(), "a pass takes its time: %v", p)
	require.Less(t, p.Files, blobs)
	p = h.scrub(5)
	require.False(t, p.Ended.IsZero(), "%v", p)
	require.Equal(t, blobs, p.Files, "%v", p)
	require.EqualValues(t, 1+found, p.Damaged, "%v", p)
	require.Equal(t, index.Damaged, h.store.Index().Journal.StateOf(packed.ID).Name)
	require.Equal(t, index.Damaged, h.store.Index().Journal.StateOf(all[0].build.ID).Name)
	aside, err := os.ReadDir(filepath.Join(state, "quarantine"))
	require.NoError(t, err)
	require.Len(t, aside, 2*(1+found), "each with a note")
	p = h.scrub(8)
	require.Zero(t, p.Damaged, "it is known by now: %v", p)
	require.Equal(t, blobs, p.Files)
}

// A pass goes on after a restart, and a clock that is set back, or forward by years, keeps none
// from going on.
func TestScrubGoesOnAfterRestartsAndClockJumps(t *testing.T) {
	h := newHistory(t, nil)
	for range 4 {
		require.NoError(t, h.publish(h.random))
	}
	half := h.scrub(3)
	require.Positive(t, half.Files)
	require.NoError(t, h.reopen(nil))
	require.Equal(t, half, h.store.ScrubState().This)
	h.now = time.Unix(3600, 0)
	next := h.scrub(1)
	require.Greater(t, next.Files, half.Files)
	h.now = h.now.AddDate(80, 0, 0)
	p := h.scrub(5)
	require.False(t, p.Ended.IsZero())
	require.EqualValues(t, 8, p.Files, "none was read twice")
	ended := p.Ended
	h.now = time.Unix(3600, 0)
	require.True(t, h.scrub(8).Ended.Before(ended),
		"the next pass does not wait for the clock to catch up")
}
