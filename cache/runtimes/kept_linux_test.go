package runtimes

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/witness"
)

// TestKeptFilesNoticeEveryChange has the request itself notice what happens to a library whose file is
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
			rc := &Content{}
			var err error
			rc.folders, err = byFolder(stamped)
			require.NoError(t, err)
			if _, ok := witness.Believable(rc.folders[0].open); !ok {
				t.Skip("SKIPPED: the times of this file system are not believed")
			}
			require.NotNil(t, rc.folders[0].kept[0])
			require.Nil(t, rc.folders[0].kept[1], "a link is looked up by its name")
			require.True(t, rc.unchanged())
			if err := change(lib, filepath.Join(filepath.Dir(lib), "beside")); err == unix.EPERM {
				t.Skip("SKIPPED: this process may not mount")
			} else {
				require.NoError(t, err)
			}
			harmless := name == "nothing" || name == "a file is mounted elsewhere"
			for range 2 {
				require.Equal(t, harmless, rc.unchanged())
			}
		})
	}
}
