package watch

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/stretchr/testify/require"
)

func TestPolledWhenInstancesRunOut(t *testing.T) {
	r := newRig(t)
	r.openErr = syscall.EMFILE
	r.write("ep.so", "one")
	r.set("ep", "ep.so")
	require.Contains(t, r.how("ep"), "polled: the limit fs.inotify.max_user_instances")
	r.notices("ep", func() { r.write("ep.so", "two") })

	r.w.directories.mu.Lock()
	r.openErr = nil
	r.w.directories.mu.Unlock()
	r.until("ep", "inotify")
	r.notices("ep", func() { r.write("ep.so", "three") })
}

func TestExplainNamesTheLimit(t *testing.T) {
	require.EqualError(t, Explain(syscall.ENOSPC),
		"the limit fs.inotify.max_user_watches is reached: no space left on device")
	require.Equal(t, os.ErrClosed, Explain(os.ErrClosed))
}

// Events are lost while the queue of the kernel is full, so that all subjects are looked at.
func TestOverflowIsASignForAll(t *testing.T) {
	r := newRig(t)
	r.write("a.so", "one")
	r.write("b.so", "one")
	r.set("a", "a.so")
	r.set("b", "b.so")
	r.w.directories.system.Errors <- fsnotify.ErrEventOverflow
	seen := map[Event]bool{}
	for range 4 {
		seen[r.next()] = true
	}
	require.Len(t, seen, 4, "each is changing and settles")
}

func TestProcIsPolledByContent(t *testing.T) {
	r := newRig(t)
	r.w.Set("driver", []string{"/proc/version", "/sys/kernel/none-of-that-name"})
	require.Contains(t, r.how("driver"), "polled: /proc: proc does not report changes")
	r.calm()
	require.NotEmpty(t, contentOf("/proc/version"))
	require.NotEqual(t, contentOf("/proc/version"), contentOf("/proc/self/comm"))
}

func TestDirectoryThatMayNotBeReadIsPolled(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("SKIPPED: root may read every directory")
	}
	r := newRig(t)
	r.write("lib/ep.so", "one")
	require.NoError(t, os.Chmod(r.path("lib"), 0o300))
	t.Cleanup(func() { require.NoError(t, os.Chmod(r.path("lib"), 0o700)) })
	r.set("ep", "lib/ep.so")
	require.Contains(t, r.how("ep"), "permission denied")
	r.notices("ep", func() { r.write("lib/ep.so", "two") })
}

func TestChangingFilesNeverSettle(t *testing.T) {
	r := newRig(t)
	r.write("ep.so", "one")
	r.set("ep", "ep.so")
	r.write("ep.so", "two")
	r.expect("ep", Changing)
	for i := range 40 {
		r.write("ep.so", fmt.Sprint(i))
		time.Sleep(quiet / 10)
	}
	written := time.Now()
	r.expect("ep", Settled)
	require.GreaterOrEqual(t, time.Since(written), quiet/2)
}

func TestStoresThroughAMappingAreFoundByTheBackstop(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Backstop = 20 * time.Millisecond })
	r.write("ep.so", "one")
	r.set("ep", "ep.so")
	f, err := os.OpenFile(r.path("ep.so"), os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	b, err := syscall.Mmap(int(f.Fd()), 0, 3, syscall.PROT_WRITE, syscall.MAP_SHARED)
	require.NoError(t, err)
	time.Sleep(50 * time.Millisecond)
	b[0]++
	require.NoError(t, syscall.Munmap(b))
	require.NoError(t, f.Sync())
	r.expect("ep", Changing)
	r.expect("ep", Settled)
}

func TestWritesThroughAnotherHardLinkAreFoundByTheBackstop(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Backstop = 20 * time.Millisecond })
	r.write("lib/ep.so", "one")
	r.mkdir("other")
	require.NoError(t, os.Link(r.path("lib/ep.so"), filepath.Join(r.dir, "other", "ep.so")))
	r.set("ep", "lib/ep.so")
	r.notices("ep", func() { r.write("other/ep.so", "two") })
}

// The kernel ends the watch of a directory that is removed.
func TestAWatchThatEndedIsRenewed(t *testing.T) {
	r := newRig(t)
	r.write("a/b/ep.so", "one")
	r.set("ep", "a/b/ep.so")
	for range 5 {
		r.notices("ep", func() {
			r.remove("a")
			r.write("a/b/ep.so", "again")
		})
		r.notices("ep", func() { r.write("a/b/ep.so", "in place") })
	}
}
