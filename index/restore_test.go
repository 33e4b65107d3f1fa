package index

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A journal that is deleted under a running index is restored from memory, and survives a crash.
func TestADeletedJournalIsRestored(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	withheld, pinned := publish(t, x), publish(t, x)
	require.NoError(t, x.Journal.SetState(withheld.ID, State{Name: Withheld, Reason: "report"}))
	require.NoError(t, x.Journal.Pin(pinned.ID, Pin{UID: 7}))
	restored, err := x.Journal.RewriteIfDeleted(false)
	require.NoError(t, err)
	require.False(t, restored, "it is there")

	require.NoError(t, os.Remove(filepath.Join(dir, "journal")))
	restored, err = x.Journal.RewriteIfDeleted(false)
	require.NoError(t, err)
	require.True(t, restored)
	require.NoError(t, x.Journal.SetState(pinned.ID, State{Name: Damaged, Reason: "later"}))
	after := memoryDir(t) // as a crash leaves it
	require.NoError(t, os.CopyFS(after, os.DirFS(dir)))
	closeSound(t, x)
	for _, dir := range []string{dir, after} {
		x = open(t, dir)
		require.Equal(t, "report", x.Journal.StateOf(withheld.ID).Reason)
		require.Equal(t, "later", x.Journal.StateOf(pinned.ID).Reason)
		_, kept := x.Journal.Pinned(pinned.ID)
		require.True(t, kept)
		closeSound(t, x)
	}
}
