package witness

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// However long a model is hashed, its files' age is that of when the reading began.
func TestWitnessIsAsOldAsItsBeginning(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model")
	require.NoError(t, os.WriteFile(path, []byte("model"), 0o600))
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	info, err := f.Stat()
	require.NoError(t, err)
	cases := map[string]struct {
		began time.Duration // after the file was written
		old   bool
	}{
		"at once":           {0, false},
		"a second later":    {time.Second, false},
		"three seconds":     {3 * time.Second, true},
		"before, by clock":  {-time.Hour, false},
		"a long time later": {time.Hour, true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			w, err := Watch([]*os.File{f}, info.ModTime().Add(c.began), nil, true)
			require.NoError(t, err)
			require.Equal(t, c.old, w.Old())
			require.NoError(t, w.Unchanged())
		})
	}
}

// The leases are ours: a client that takes one on the file it shares with us, and gives it up, changes nothing about them.
func TestGuardIsNotTheClients(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model")
	require.NoError(t, os.WriteFile(path, []byte("model"), 0o600))
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	if !CanBeGuarded(f) {
		t.Skip("SKIPPED: the temporary folder is on a file system whose files cannot be guarded")
	}
	var gs Guards
	h := gs.Take([]*os.File{f})
	require.True(t, h.Stands())
	for _, kind := range []int{unix.F_RDLCK, unix.F_UNLCK} {
		_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, kind)
		require.NoError(t, err)
	}
	require.True(t, h.Stands())
	other := h.Share()
	h.Release()
	require.True(t, other.Stands(), "one of two users is left")
	w, err := os.OpenFile(f.Name(), os.O_WRONLY, 0)
	require.NoError(t, err)
	require.False(t, other.Stands())
	<-other.Lost()
	require.Nil(t, gs.Take([]*os.File{f}), "while somebody has it open for writing")
	require.NoError(t, w.Close())
	require.False(t, other.Stands(), "what was lost does not come back")
	other.Release()
	require.True(t, gs.Idle())
}

// The signal by which the kernel tells of a writer may also come when nobody waits for it any more.
func TestLateSignalHurtsNobody(t *testing.T) {
	require.NoError(t, unix.Kill(os.Getpid(), unix.SIGIO))
	time.Sleep(10 * time.Millisecond)
}
