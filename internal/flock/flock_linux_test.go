package flock

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Who lists the builds looks whether each is held, by having its view alone for a moment: nobody is refused for that.
func TestALookAtALeaseRefusesNobody(t *testing.T) {
	dir := t.TempDir()
	looks, err := os.Open(dir)
	require.NoError(t, err)
	defer looks.Close()
	alone, err := TryLock(looks)
	require.NoError(t, err)
	require.True(t, alone)
	done := make(chan error, 1)
	go func() {
		time.Sleep(5 * time.Millisecond)
		done <- looks.Close()
	}()
	f, err := os.Open(dir)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, Share(f))
	require.NoError(t, <-done)
}
