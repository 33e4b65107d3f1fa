package runtimes

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/filestamp"
)

// TestKeptFilesNoticeEveryChange has the request itself notice what happens to a library that is
// kept open.
func TestKeptFilesNoticeEveryChange(t *testing.T) {
	write := func(path, text string) error { return os.WriteFile(path, []byte(text), 0o644) }
	cases := map[string]func(lib, beside string) error{
		"replaced by rename": func(lib, beside string) error { return os.Rename(beside, lib) },
		"written in place":   func(lib, _ string) error { return write(lib, "other bytes") },
		"a link leads to other bytes": func(lib, _ string) error {
			return write(filepath.Join(filepath.Dir(lib), "libsdk.so.1"), "other bytes")
		},
		"removed":         func(lib, _ string) error { return os.Remove(lib) },
		"a file is added": func(lib, _ string) error { return write(lib+".2", "added") },
		"its folder is replaced": func(lib, _ string) error {
			dir := filepath.Dir(lib)
			if err := os.Rename(dir, dir+".old"); err != nil {
				return err
			}
			return os.CopyFS(dir, os.DirFS(dir+".old"))
		},
		"another file is mounted over it": func(lib, beside string) error {
			err := unix.Mount(beside, lib, "", unix.MS_BIND, "")
			if err == nil {
				t.Cleanup(func() { require.NoError(t, unix.Unmount(lib, unix.MNT_DETACH)) })
			}
			return err
		},
		"a file is mounted elsewhere": func(_, beside string) error {
			over := filepath.Join(t.TempDir(), "over")
			if err := write(over, "over"); err != nil {
				return err
			}
			err := unix.Mount(beside, over, "", unix.MS_BIND, "")
			if err == nil {
				t.Cleanup(func() { require.NoError(t, unix.Unmount(over, unix.MNT_DETACH)) })
			}
			return err
		},
		"nothing": func(string, string) error { return nil },
	}
	root := t.TempDir()
	files := func(name string) (lib, link string) {
		return filepath.Join(root, name, "libep.so"), filepath.Join(root, name, "libsdk.so")
	}
	for name := range cases {
		lib, link := files(name)
		require.NoError(t, os.Mkdir(filepath.Dir(lib), 0o755))
		require.NoError(t, write(lib, "library"))
		require.NoError(t, write(filepath.Join(filepath.Dir(lib), "beside"), "another"))
		require.NoError(t, write(link+".1", "SDK"))
		require.NoError(t, os.Symlink("libsdk.so.1", link))
	}
	time.Sleep(2100 * time.Millisecond) // until they were left alone
	for name, change := range cases {
		t.Run(name, func(t *testing.T) {
			lib, link := files(name)
			var stamped []stampedFile
			for _, path := range []string{lib, link} {
				s, err := cas.StampPath(path)
				require.NoError(t, err)
				stamped = append(stamped, stampedFile{path: path, stamp: s})
			}
			fs, err := openFolders(stamped)
			require.NoError(t, err)
			defer fs.close()
			if _, ok := filestamp.FileSystem(fs.list[0].open); !ok {
				t.Skip("SKIPPED: the times of this file system are not believed")
			}
			require.Positive(t, fs.list[0].openFDs[0])
			require.Negative(t, fs.list[0].openFDs[1], "a link is looked up by its name")
			require.True(t, fs.unchanged())
			if err := change(lib, filepath.Join(filepath.Dir(lib), "beside")); err == unix.EPERM {
				t.Skip("SKIPPED: this process may not mount")
			} else {
				require.NoError(t, err)
			}
			harmless := name == "nothing" || name == "a file is mounted elsewhere"
			for range 2 {
				require.Equal(t, harmless, fs.unchanged())
			}
			fs.close() // a request that began before goes on by path
			require.Equal(t, harmless, fs.unchanged())
		})
	}
}

// Comparisons that are under way when a runtime is forgotten keep its descriptors open.
func TestDescriptorsAreClosedByTheLastComparison(t *testing.T) {
	lib := filepath.Join(t.TempDir(), "libep.so")
	require.NoError(t, os.WriteFile(lib, []byte("library"), 0o644))
	stamp, err := cas.StampPath(lib)
	require.NoError(t, err)
	fs, err := openFolders([]stampedFile{{path: lib, stamp: stamp}})
	require.NoError(t, err)
	descriptors := append(fs.list[0].openFDs, fs.list[0].open, fs.mounts)
	open := func() (n int) {
		for _, fd := range descriptors {
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
				n++
			}
		}
		return n
	}
	all := open()
	require.GreaterOrEqual(t, all, 2)
	require.True(t, fs.retain())
	fs.close()
	fs.close()
	require.Equal(t, all, open())
	fs.release()
	require.Zero(t, open())
	require.False(t, fs.retain())
}

// A report of the kernel is taken by one call; one beside it must not take the mounts for
// unchanged.
func TestMountChangesOfCallsAtTheSameTime(t *testing.T) {
	fs, err := openFolders(nil)
	require.NoError(t, err)
	defer fs.close()
	first := fs.mountChanges()
	require.Equal(t, first, fs.mountChanges())
	fs.asking.Add(1) // by a call that has taken a report, and has not counted it yet
	second := fs.mountChanges()
	require.NotEqual(t, first, second)
	require.NotEqual(t, second, fs.mountChanges())
	fs.asking.Add(-1)
	require.Equal(t, fs.mountChanges(), fs.mountChanges())
}
