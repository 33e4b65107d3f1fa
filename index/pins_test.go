package index

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPinsAreKeptOverARestart(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	kept, let, gone := publish(t, x), publish(t, x), publish(t, x)
	at := time.Unix(1000, 5).UTC()
	for _, b := range []Build{kept, let, gone} {
		require.NoError(t, x.Journal.Pin(b.ID, Pin{At: at, UID: 7}))
	}
	require.NoError(t, x.Journal.Unpin(let.ID))
	require.NoError(t, x.Journal.Unpin(let.ID), "taking back twice")
	require.NoError(t, x.Retract(ctx, gone.ID, "a test"))
	require.ErrorIs(t, x.Journal.Pin(gone.ID, Pin{}), ErrNotFound)
	closeSound(t, x)

	x = open(t, dir)
	p, ok := x.Journal.Pinned(kept.ID)
	require.True(t, ok)
	require.Equal(t, Pin{At: at, UID: 7}, p)
	for _, b := range []Build{let, gone} {
		_, ok := x.Journal.Pinned(b.ID)
		require.False(t, ok)
	}
	closeSound(t, x)
}

// The journal is rewritten from memory.
func TestPinsAndTombstonesOutliveANewJournal(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	b := publish(t, x)
	require.NoError(t, x.Journal.Pin(b.ID, Pin{UID: 7}))
	tombstone := Tombstone{ForBudget: true, ForFloor: true,
		BuildID: BuildID{1}, RequestKey: RequestKey{2},
		BuildKey: BuildKey{3}, ModelName: "m.onnx", Scope: "uid:7",
		At: time.Unix(2000, 0).UTC(), Reason: "evicted", Bytes: 4, CompileSeconds: 5.5,
		LastUsed: time.Unix(1000, 0).UTC()}
	require.NoError(t, x.Journal.AddTombstones([]Tombstone{tombstone}))
	text := strings.Repeat("x", maxText)
	for range maxJournal / maxText * 3 / 2 {
		require.NoError(t, x.Journal.AddEvent(ctx, Event{Kind: "failed", Text: text}))
	}
	closeSound(t, x)
	x = open(t, dir)
	_, ok := x.Journal.Pinned(b.ID)
	require.True(t, ok)
	require.Equal(t, []Tombstone{tombstone}, x.Journal.Tombstones(nil))
	closeSound(t, x)
}

func TestTombstonesAreBounded(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	page := make([]Tombstone, 512)
	for n := 0; n < 3*maxTombstones; n += len(page) {
		for i := range page {
			page[i] = Tombstone{BuildID: BuildID{1, byte(n >> 16), byte(n >> 8), byte(i >> 8),
				byte(i)}, ModelName: fmt.Sprint(n + i), Reason: strings.Repeat("x", 200)}
		}
		require.NoError(t, x.Journal.AddTombstones(page))
	}
	left := x.Journal.Tombstones(nil)
	require.GreaterOrEqual(t, len(left), maxTombstones)
	require.LessOrEqual(t, len(left), 2*maxTombstones)
	require.Equal(t, fmt.Sprint(3*maxTombstones-1), left[len(left)-1].ModelName,
		"the oldest went, not the newest")
	info, err := os.Stat(filepath.Join(dir, "journal"))
	require.NoError(t, err)
	require.LessOrEqual(t, info.Size(), int64(2*maxJournal))
	closeSound(t, x)
}

// A crash kept the build from going.
func TestTheTombstoneOfABuildThatIsThereMeansNothing(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	b := publish(t, x)
	require.NoError(t, x.Journal.AddTombstones([]Tombstone{{BuildID: b.ID}, {BuildID: BuildID{1}}}))
	closeSound(t, x)
	x = open(t, dir)
	left := x.Journal.Tombstones(nil)
	require.Len(t, left, 1)
	require.Equal(t, BuildID{1}, left[0].BuildID)
	x.Journal.dropTombstone(BuildID{1})
	require.Empty(t, x.Journal.Tombstones(nil))
	closeSound(t, x)
}

// The highest sequence number of a root key's documents outlives a restart, a new journal and a new
// database, so that no earlier document counts again.
func TestTrustSequencesAreKeptOverARestart(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	require.Zero(t, x.Journal.TrustSequence("root"))
	require.NoError(t, x.Journal.SetTrustSequence("root", 3))
	require.NoError(t, x.Journal.SetTrustSequence("root", 5))
	closeSound(t, x)
	x = open(t, dir)
	require.EqualValues(t, 5, x.Journal.TrustSequence("root"))
	require.NoError(t, os.Remove(filepath.Join(dir, "journal")))
	restored, err := x.Journal.RewriteIfDeleted(false)
	require.NoError(t, err)
	require.True(t, restored)
	closeSound(t, x)
	require.NoError(t, os.Remove(filepath.Join(dir, "index.db")))
	x = open(t, dir)
	require.EqualValues(t, 5, x.Journal.TrustSequence("root"))
	closeSound(t, x)
}
