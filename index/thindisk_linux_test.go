package index

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A thin disk that has no space left below the file system takes writes and fails to sync
// them. Publish then fails. When the disk has space again all acknowledged builds are there.
func TestAThinDiskLosesNoBuild(t *testing.T) {
	below, at := filepath.Join(t.TempDir(), "below"), filepath.Join(t.TempDir(), "mounted")
	require.NoError(t, os.Mkdir(below, 0o700))
	require.NoError(t, os.Mkdir(at, 0o700))
	run := func(command ...string) {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Skipf("SKIPPED: no thin disk: %s: %v: %s", command[0], err, out)
		}
	}
	unmount := func(path string) {
		t.Cleanup(func() { require.NoError(t, exec.Command("umount", "--lazy", path).Run()) })
	}
	run("mount", "-t", "tmpfs", "-o", "size=24m", "none", below)
	unmount(below)
	image := filepath.Join(below, "image")
	require.NoError(t, os.WriteFile(image, nil, 0o600))
	require.NoError(t, os.Truncate(image, 64<<20))
	run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", image)
	run("mount", "-o", "loop,errors=continue", image, at)
	unmount(at)
	dir := filepath.Join(at, "state")
	x, err := Open(dir, Options{})
	require.NoError(t, err)
	kept := []Build{publish(t, x), publish(t, x)}
	run("sync", "-f", at)

	filler := filepath.Join(below, "filler")
	_ = exec.Command("dd", "if=/dev/zero", "of="+filler, "bs=64k").Run() // until it is full
	for range 2000 {
		b := sampleBuild()
		if err = x.Publish(context.Background(), b); err != nil {
			break
		}
		kept = append(kept, b)
	}
	require.Error(t, err)
	t.Logf("%d builds: %v", len(kept), err)
	require.NoError(t, os.Remove(filler))
	_ = x.Close() // it may have given the database up
	x, err = Open(dir, Options{})
	require.NoError(t, err)
	for i := range kept {
		got, err := x.Get(kept[i].ID)
		require.NoError(t, err)
		require.Equal(t, kept[i], got)
	}
	publish(t, x)
	closeSound(t, x)
}
