package index

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
)

// bbolt writes the database directly, and not through the file system seam of other crash tests.
// Therefore this test cuts the power of a real file system. A database that was synced before it
// got its name is there afterwards. Otherwise the manifests would be read again, and the last use
// of every build would be lost.
func TestANewDatabaseIsThereAfterAPowerCut(t *testing.T) {
	image, at := filepath.Join(t.TempDir(), "image"), filepath.Join(t.TempDir(), "mounted")
	require.NoError(t, os.WriteFile(image, nil, 0o600))
	require.NoError(t, os.Truncate(image, 64<<20))
	require.NoError(t, os.Mkdir(at, 0o700))
	run := func(command ...string) {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Skipf("SKIPPED: no small file system to take the power from: %s: %v: %s", command[0],
				err, out)
		}
	}
	run("mkfs.ext4", "-q", "-F", image)
	run("mount", "-o", "loop", image, at)
	mounted := true
	t.Cleanup(func() {
		if mounted {
			require.NoError(t, exec.Command("umount", at).Run())
		}
	})
	dir := filepath.Join(at, "state")
	x, err := Open(dir, Options{})
	require.NoError(t, err)
	b := publish(t, x)
	require.NoError(t, x.Close())
	require.NoError(t, os.Remove(filepath.Join(dir, "index.db")))
	f, err := os.Open(at)
	require.NoError(t, err)
	require.NoError(t, unix.Syncfs(int(f.Fd())))

	x, err = Open(dir, Options{}) // makes a new one
	require.NoError(t, err)
	// EXT4_IOC_SHUTDOWN, without what is only in the journal's memory
	const shutdown, nothingMore = 0x8004587d, 2
	err = unix.IoctlSetPointerInt(int(f.Fd()), shutdown, nothingMore)
	require.NoError(t, f.Close())
	_ = x.Close() // of a machine that has lost its power
	if err != nil {
		t.Skipf("SKIPPED: this file system cannot be shut down: %v", err)
	}
	run("umount", at)
	mounted = false
	// A process with mounts of its own may still have the file system, which stays shut down then.
	run("cp", "--sparse=always", image, image+".after")
	run("mount", "-o", "loop", image+".after", at)
	mounted = true
	x, err = Open(dir, Options{})
	require.NoError(t, err)
	require.Empty(t, x.Rebuilt())
	got, err := x.Get(b.ID)
	require.NoError(t, err)
	require.Equal(t, b, got)
	closeSound(t, x)
}

type renameFails struct{ cas.FS }

var errRename = errors.New("a test keeps the file from getting its name")

func (renameFails) Rename(from, to string) error { return errRename }

// A database that a crash left incomplete is no damaged one, because it has not got its name yet.
func TestAnIncompleteDatabaseHasNoName(t *testing.T) {
	dir := t.TempDir()
	_, err := Open(dir, Options{FS: renameFails{cas.OS{}}})
	require.ErrorIs(t, err, errRename)
	require.NoFileExists(t, filepath.Join(dir, "index.db"))

	require.NoError(t,
		os.WriteFile(filepath.Join(dir, "index.db.new"), []byte("incomplete"), 0o600))
	x, err := Open(dir, Options{})
	require.NoError(t, err)
	require.NoError(t, x.Close())
	require.NoFileExists(t, filepath.Join(dir, "index.db.new"))
	quarantined, err := os.ReadDir(filepath.Join(dir, "quarantine"))
	require.NoError(t, err)
	require.Empty(t, quarantined)
}
