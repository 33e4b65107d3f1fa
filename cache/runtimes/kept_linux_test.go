package runtimes

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/filestamp"
)

// mapped opens the library, and returns it mapped for writing.
func mapped(lib string) (*os.File, []byte, error) {
	f, err := os.OpenFile(lib, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	b, err := unix.Mmap(int(f.Fd()), 0, len("library"), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	return f, b, err
}

// TestKeptFilesNoticeEveryChange has the request itself notice what happens to a library that is
// kept open. The stamps were compared a moment ago, so that only the kernel's reports tell of what
// moves no time of the folder.
func TestKeptFilesNoticeEveryChange(t *testing.T) {
	write := func(path, text string) error { return os.WriteFile(path, []byte(text), 0o644) }
	cases := map[string]func(lib, beside string) error{
		"replaced by rename": func(lib, beside string) error { return os.Rename(beside, lib) },
		"written in place":   func(lib, _ string) error { return write(lib, "other bytes") },
		"written, and not closed": func(lib, _ string) error {
			f, err := os.OpenFile(lib, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			t.Cleanup(func() { require.NoError(t, f.Close()) })
			_, err = f.WriteString("L")
			return err
		},
		"written through a mapping": func(lib, _ string) error {
			f, b, err := mapped(lib)
			if err != nil {
				return err
			}
			b[0] = 'L'
			return errors.Join(f.Close(), unix.Munmap(b))
		},
		"written under another name": func(lib, beside string) error {
			other := filepath.Join(filepath.Dir(filepath.Dir(lib)), "other")
			return errors.Join(os.Link(lib, other), write(other, "other bytes"))
		},
		"truncated":        func(lib, _ string) error { return os.Truncate(lib, 3) },
		"its mode changes": func(lib, _ string) error { return os.Chmod(lib, 0o600) },
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
			require.GreaterOrEqual(t, fs.inotify, 0)
			require.True(t, fs.unchanged(0))
			require.True(t, fs.unchanged(time.Hour))
			if err := change(lib, filepath.Join(filepath.Dir(lib), "beside")); err == unix.EPERM {
				t.Skip("SKIPPED: this process may not mount")
			} else {
				require.NoError(t, err)
			}
			harmless := name == "nothing" || name == "a file is mounted elsewhere"
			for range 2 {
				require.Equal(t, harmless, fs.unchanged(time.Hour))
			}
			fs.close() // a request that began before goes on by path
			require.Equal(t, harmless, fs.unchanged(time.Hour))
		})
	}
}

// The kernel does not report stores through a mapping. They are noticed when the stamps are compared
// again, as they are without its reports at each hit.
func TestStampsAreComparedAgain(t *testing.T) {
	lib := filepath.Join(t.TempDir(), "libep.so")
	require.NoError(t, os.WriteFile(lib, []byte("library"), 0o644))
	open := func() *folders {
		time.Sleep(2100 * time.Millisecond) // until it was left alone
		stamp, err := cas.StampPath(lib)
		require.NoError(t, err)
		fs, err := openFolders([]stampedFile{{path: lib, stamp: stamp}})
		require.NoError(t, err)
		t.Cleanup(fs.close)
		if _, ok := filestamp.FileSystem(fs.list[0].open); !ok {
			t.Skip("SKIPPED: the times of this file system are not believed")
		}
		require.True(t, fs.unchanged(0))
		return fs
	}
	f, b, err := mapped(lib)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errors.Join(f.Close(), unix.Munmap(b))) })
	fs := open()
	b[0] = 'L'
	require.True(t, fs.unchanged(time.Hour), "the kernel reports stores through mappings")
	fs.compared.Add(-int64(recently))
	require.False(t, fs.unchanged(recently))
	require.False(t, fs.unchanged(time.Hour), "it was noticed")
	fs.close()
	require.NoError(t, unix.Msync(b, unix.MS_SYNC)) // the next store moves the times again

	for range cap(inotifyInstances) - len(inotifyInstances) { // other runtimes take all instances
		inotifyInstances <- struct{}{}
		defer func() { <-inotifyInstances }()
	}
	fs = open()
	require.ErrorIs(t, fs.inotifyErr, errNoInstance)
	b[0] = 'l'
	require.False(t, fs.unchanged(time.Hour))
}

// Comparisons that are under way when a runtime is forgotten keep its descriptors open.
func TestDescriptorsAreClosedByTheLastComparison(t *testing.T) {
	lib := filepath.Join(t.TempDir(), "libep.so")
	require.NoError(t, os.WriteFile(lib, []byte("library"), 0o644))
	stamp, err := cas.StampPath(lib)
	require.NoError(t, err)
	fs, err := openFolders([]stampedFile{{path: lib, stamp: stamp}})
	require.NoError(t, err)
	descriptors := append(fs.list[0].openFDs, fs.list[0].open, fs.mounts, fs.inotify)
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
	require.Empty(t, inotifyInstances)
	require.False(t, fs.retain())
}

// A report of the kernel is taken by one call; one beside it must not take the mounts for
// unchanged.
func TestReportsToCallsAtTheSameTime(t *testing.T) {
	fs, err := openFolders(nil)
	require.NoError(t, err)
	defer fs.close()
	first := fs.reports()
	require.Equal(t, first, fs.reports())
	fs.asking.Add(1) // by a call that has taken a report, and has not counted it yet
	second := fs.reports()
	require.NotEqual(t, first, second)
	require.NotEqual(t, second, fs.reports())
	fs.asking.Add(-1)
	require.Equal(t, fs.reports(), fs.reports())
}
