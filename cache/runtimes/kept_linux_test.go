package runtimes

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
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
// kept open. The stamps were compared a moment ago, so that only the kernel reports what
// moves no time of the directory.
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
		"linked under another name": func(lib, _ string) error {
			return os.Link(lib, filepath.Join(filepath.Dir(filepath.Dir(lib)), "other"))
		},
		"a file is moved beside it": func(lib, _ string) error {
			dir := filepath.Dir(lib)
			return os.Rename(filepath.Join(filepath.Dir(dir), "another"),
				filepath.Join(dir, "another"))
		},
		"truncated":        func(lib, _ string) error { return os.Truncate(lib, 3) },
		"its mode changes": func(lib, _ string) error { return os.Chmod(lib, 0o600) },
		"a link leads to other bytes": func(lib, _ string) error {
			return write(filepath.Join(filepath.Dir(lib), "libsdk.so.1"), "other bytes")
		},
		"removed":         func(lib, _ string) error { return os.Remove(lib) },
		"a file is added": func(lib, _ string) error { return write(lib+".2", "added") },
		"its directory is replaced": func(lib, _ string) error {
			dir := filepath.Dir(lib)
			if err := os.Rename(dir, dir+".old"); err != nil {
				return err
			}
			return os.CopyFS(dir, os.DirFS(dir+".old"))
		},
		"a directory above is replaced": func(lib, _ string) error {
			dir := filepath.Dir(filepath.Dir(lib))
			return errors.Join(os.Rename(dir, dir+".old"), os.CopyFS(dir, os.DirFS(dir+".old")))
		},
		"a directory above becomes a link to another": func(lib, _ string) error {
			dir := filepath.Dir(filepath.Dir(lib))
			return errors.Join(os.CopyFS(dir+".new", os.DirFS(dir)), os.Rename(dir, dir+".old"),
				os.Symlink(dir+".new", dir))
		},
		"another directory is mounted over its own": func(lib, _ string) error {
			dir := filepath.Dir(lib)
			err := unix.Mount(t.TempDir(), dir, "", unix.MS_BIND, "")
			if err == nil {
				t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
			}
			return err
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
		dir := filepath.Join(root, name, "lib")
		return filepath.Join(dir, "libep.so"), filepath.Join(dir, "libsdk.so")
	}
	for name := range cases {
		lib, link := files(name)
		require.NoError(t, os.MkdirAll(filepath.Dir(lib), 0o755))
		require.NoError(t, write(lib, "library"))
		require.NoError(t, write(filepath.Join(filepath.Dir(lib), "beside"), "another"))
		require.NoError(t, write(filepath.Join(root, name, "another"), "another"))
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
			fs, err := openDirs(stamped, true)
			require.NoError(t, err)
			defer fs.close()
			if _, ok := filestamp.FileSystem(fs.list[0].open); !ok {
				t.Skip("SKIPPED: the times of this file system are not believed")
			}
			require.NoError(t, fs.watchErr)
			require.True(t, fs.list[0].watched)
			require.True(t, fs.list[0].files[0].watched)
			require.False(t, fs.list[0].files[1].watched, "a link is looked up by its name")
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

// The kernel does not report stores through a mapping. They are noticed when the stamps are
// compared again, as they are without its reports at each hit.
func TestStampsAreComparedAgain(t *testing.T) {
	lib := filepath.Join(t.TempDir(), "libep.so")
	require.NoError(t, os.WriteFile(lib, []byte("library"), 0o644))
	f, b, err := mapped(lib)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errors.Join(f.Close(), unix.Munmap(b))) })
	time.Sleep(2100 * time.Millisecond) // until it was left alone
	for _, watch := range []bool{true, false} {
		stamp, err := cas.StampPath(lib)
		require.NoError(t, err)
		fs, err := openDirs([]stampedFile{{path: lib, stamp: stamp}}, watch)
		require.NoError(t, err)
		defer fs.close()
		if _, ok := filestamp.FileSystem(fs.list[0].open); !ok {
			t.Skip("SKIPPED: the times of this file system are not believed")
		}
		require.True(t, fs.unchanged(0))
		b[0]++
		require.Equal(t, watch, fs.unchanged(time.Hour),
			"the kernel reports stores through mappings")
		fs.compared.Add(-int64(recently))
		require.False(t, fs.unchanged(recently))
		require.False(t, fs.unchanged(time.Hour), "it was noticed")
		require.NoError(t, unix.Msync(b, unix.MS_SYNC)) // the next store moves the times again
	}
}

// Paths with links are looked up at each hit, because links' targets are not watched. So is the
// path of a directory that was moved and is reached through a link since.
func TestPathsThatLeadElsewhere(t *testing.T) {
	root := t.TempDir()
	dir, link := filepath.Join(root, "deep", "lib"), filepath.Join(root, "link")
	above, lib := filepath.Dir(dir), filepath.Join(dir, "libep.so")
	require.NoError(t, errors.Join(os.MkdirAll(dir, 0o755), os.Symlink(dir, link)))
	require.NoError(t, os.WriteFile(lib, []byte("library"), 0o644))
	time.Sleep(2100 * time.Millisecond) // until it was left alone
	stamp, err := cas.StampPath(lib)
	require.NoError(t, err)
	open := func(path string) *dirs {
		fs, err := openDirs([]stampedFile{{path: path, stamp: stamp}}, true)
		require.NoError(t, err)
		t.Cleanup(fs.close)
		require.True(t, fs.unchanged(0))
		require.True(t, fs.unchanged(time.Hour))
		return fs
	}
	direct, linked := open(lib), open(filepath.Join(link, "libep.so"))
	require.NoError(t, os.Rename(above, above+".old"))
	require.False(t, linked.unchanged(time.Hour))
	require.NoError(t, os.Symlink(above+".old", above))
	require.True(t, direct.unchanged(time.Hour))
	require.NoError(t, os.Remove(above))
	require.False(t, direct.unchanged(time.Hour))
}

// noInotify has the library's path in the process of a user that has no inotify instances left.
const noInotify = "EPCACHED_TEST_NO_INOTIFY"

// A user's other programs may use all inotify instances. Each request compares all stamps then.
func TestNoInotifyInstanceIsLeft(t *testing.T) {
	if os.Getenv(noInotify) == "" {
		runWithoutInotify(t)
		return
	}
	lib := os.Getenv(noInotify)
	for {
		if _, err := unix.InotifyInit1(unix.IN_CLOEXEC); err != nil {
			require.ErrorIs(t, err, unix.EMFILE)
			break
		}
	}
	stamp, err := cas.StampPath(lib)
	require.NoError(t, err)
	fs, err := openDirs([]stampedFile{{path: lib, stamp: stamp}}, true)
	require.NoError(t, err)
	require.ErrorIs(t, fs.watchErr, unix.EMFILE)
	require.True(t, fs.unchanged(0))
	require.NoError(t, os.Chmod(lib, 0o600))
	require.False(t, fs.unchanged(time.Hour))
}

// runWithoutInotify runs the test in a process of another user.
func runWithoutInotify(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can run programs of another user")
	}
	const user = 64321
	dir, err := os.MkdirTemp("", "") // which that user can reach
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	lib, program := filepath.Join(dir, "libep.so"), filepath.Join(dir, "program")
	require.NoError(t, os.WriteFile(lib, []byte("library"), 0o644))
	require.NoError(t, os.Chown(lib, user, user))
	self, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(program, self, 0o755))
	cmd := exec.Command(program, "-test.run", "^TestNoInotifyInstanceIsLeft$")
	cmd.Dir, cmd.Env = "/", append(os.Environ(), noInotify+"="+lib)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// Comparisons that are under way when a runtime is forgotten keep its descriptors open.
func TestDescriptorsAreClosedByTheLastComparison(t *testing.T) {
	lib := filepath.Join(t.TempDir(), "libep.so")
	require.NoError(t, os.WriteFile(lib, []byte("library"), 0o644))
	stamp, err := cas.StampPath(lib)
	require.NoError(t, err)
	fs, err := openDirs([]stampedFile{{path: lib, stamp: stamp}}, true)
	require.NoError(t, err)
	descriptors := []int{fs.list[0].open, fs.mounts, fs.inotify}
	open := func() (n int) {
		for _, fd := range descriptors {
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
				n++
			}
		}
		return n
	}
	all := open()
	require.Equal(t, 3, all)
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
func TestReportsToCallsAtTheSameTime(t *testing.T) {
	fs, err := openDirs(nil, true)
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
