package views

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
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
	require.Equal(t, BySomebody, openedBy(other, own), "opened after the look")
	require.Equal(t, ByDaemon, openedBy(other, &OwnFiles{}))
	require.Equal(t, BySomebody, openedBy(other, nil))
}
