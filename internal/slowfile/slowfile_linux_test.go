package slowfile

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Files of local file systems are recognised as such. cmd/epcached tests files of FUSE.
func TestLocalFilesAreNotSlow(t *testing.T) {
	check := func(dir string) {
		t.Helper()
		f, err := os.CreateTemp(dir, "slow")
		require.NoError(t, err)
		defer f.Close()
		defer os.Remove(f.Name())
		st, slow, err := Stat(int(f.Fd()))
		require.NoError(t, err)
		require.False(t, slow, "%q", dir)
		require.EqualValues(t, unix.S_IFREG, st.Mode&unix.S_IFMT)
	}
	check(t.TempDir())
	check("/dev/shm")
	memory, err := unix.MemfdCreate("slow", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(memory)
	_, slow, err := Stat(memory)
	require.NoError(t, err)
	require.False(t, slow)

	base := t.TempDir()
	for _, dir := range []string{"lower", "upper", "work", "merged"} {
		require.NoError(t, os.Mkdir(filepath.Join(base, dir), 0o755))
	}
	merged := filepath.Join(base, "merged")
	options := "lowerdir=" + base + "/lower,upperdir=" + base + "/upper,workdir=" + base + "/work"
	if err := unix.Mount("overlay", merged, "overlay", 0, options); err != nil {
		t.Skipf("SKIPPED: overlays: %v", err)
	}
	defer func() { require.NoError(t, unix.Unmount(merged, 0)) }()
	check(merged)
}
