package watch

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestPolledWhenWatchesRunOut(t *testing.T) {
	r := newRig(t)
	r.write("lib/ep.so", "one")
	r.write("near.so", "one")
	r.sys.addErr = func(path string) error {
		if path == r.path("lib") {
			return syscall.ENOSPC
		}
		return nil
	}
	r.set("ep", "lib/ep.so")
	r.set("near", "near.so")
	require.Equal(t, "polled: "+r.path("lib")+
		": the limit fs.inotify.max_user_watches is reached: no space left on device", r.how("ep"))
	require.Equal(t, "inotify", r.how("near"), "only who needs the folder is polled")
	r.notices("ep", func() { r.write("lib/ep.so", "two") })

	r.sys.set(func() { r.sys.addErr = nil })
	r.until("ep", "inotify")
	r.notices("ep", func() { r.write("lib/ep.so", "three") })
	require.Equal(t, "inotify", r.how("ep"))
}

func TestPolledWhenInstancesRunOut(t *testing.T) {
	r := newRig(t)
	r.sys.openErr = syscall.EMFILE
	r.write("ep.so", "one")
	r.set("ep", "ep.so")
	require.Contains(t, r.how("ep"), "max_user_instances")
	r.notices("ep", func() { r.write("ep.so", "two") })

	r.sys.set(func() { r.sys.openErr = nil })
	r.until("ep", "inotify")
	r.notices("ep", func() { r.write("ep.so", "three") })
}

func TestOverflowIsAChangeOfAll(t *testing.T) {
	r := newRig(t)
	r.write("a.so", "one")
	r.write("b.so", "one")
	r.set("a", "a.so")
	r.set("b", "b.so")
	r.sys.set(func() { r.sys.deaf = true })
	r.write("a.so", "two")
	r.calmlyDeaf()
	r.overflow()
	r.both("a", "b")

	r.sys.set(func() { r.sys.deaf = false })
	r.notices("b", func() { r.write("b.so", "three") })
}

// calmlyDeaf waits until what the kernel has told so far is lost.
func (r *rig) calmlyDeaf() {
	require.Eventually(r.t, func() bool {
		r.sys.mu.Lock()
		defer r.sys.mu.Unlock()
		return r.sys.lost > 0
	}, patient, time.Millisecond)
}

// The lost event may have been the end of a watch.
func TestOverflowWatchesEverythingAgain(t *testing.T) {
	r := newRig(t)
	r.write("lib/ep.so", "one")
	r.set("ep", "lib/ep.so")
	r.sys.set(func() { r.sys.deaf = true })
	r.unwatch("lib")
	r.calmlyDeaf()
	r.sys.set(func() { r.sys.deaf = false })
	r.notices("ep", func() { r.overflow() })
	r.notices("ep", func() { r.write("lib/ep.so", "two") })
	r.sound()
}

// both expects one Changing and one Settled of each subject, in any order between them.
func (r *rig) both(subjects ...string) {
	r.t.Helper()
	changing, settled := make(map[string]Event), make(map[string]Event)
	for len(settled) < len(subjects) {
		e := r.next()
		require.Contains(r.t, subjects, e.Subject)
		if e.Kind == Changing {
			require.NotContains(r.t, changing, e.Subject)
			changing[e.Subject] = e
			continue
		}
		require.Contains(r.t, changing, e.Subject)
		require.NotContains(r.t, settled, e.Subject)
		settled[e.Subject] = e
	}
}

// The kernel's own queue takes 16384 events by default.
func TestTheKernelsQueueOverflows(t *testing.T) {
	limit := 1 << 14
	text, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
	require.NoError(t, err)
	_, err = fmt.Sscan(string(text), &limit)
	require.NoError(t, err)

	r := newRig(t)
	r.write("a.so", "one")
	r.write("b.so", "one")
	r.write("elsewhere/c.so", "one")
	r.set("c", "elsewhere/c.so")
	r.sys.gate.Lock()
	for i := range limit + 10000 { // equal events in a row are one
		require.NoError(t, unix.Chmod(r.path([]string{"a.so", "b.so"}[i%2]), 0o600|uint32(i%7)))
	}
	r.sys.gate.Unlock()
	r.both("c")
}

func TestNotifierThatFailsIsReplaced(t *testing.T) {
	r := newRig(t)
	r.write("ep.so", "one")
	r.set("ep", "ep.so")
	r.notices("ep", func() { r.breaks("ep.so") })
	r.until("ep", "inotify")
	require.Equal(t, 2, r.sys.opened)
	require.Equal(t, 1, r.sys.closed)
	r.notices("ep", func() { r.write("ep.so", "two") })
}

func TestNotifierThatFailsForGoodIsNotMissed(t *testing.T) {
	r := newRig(t)
	r.write("ep.so", "one")
	r.set("ep", "ep.so")
	r.sys.set(func() { r.sys.openErr = syscall.EMFILE })
	r.notices("ep", func() { r.breaks("ep.so") })
	r.until("ep", "polled: ")
	r.notices("ep", func() { r.write("ep.so", "two") })
}

func TestFolderThatMayNotBeReadIsPolled(t *testing.T) {
	r := newRig(t)
	r.write("lib/ep.so", "one")
	r.sys.addErr = func(path string) error {
		if strings.HasSuffix(path, "/lib") {
			// what the kernel says to others than root about a folder of mode 0711
			return syscall.EACCES
		}
		return nil
	}
	r.set("ep", "lib/ep.so")
	require.Equal(t, "polled: "+r.path("lib")+": permission denied", r.how("ep"))
	r.notices("ep", func() { r.write("lib/ep.so", "two") })
}

// A process may name itself by a file in /proc, which has no meaningful times and size.
func TestProcIsPolledByContent(t *testing.T) {
	r := newRig(t)
	comm := fmt.Sprintf("/proc/%d/comm", os.Getpid())
	before, err := os.ReadFile(comm)
	require.NoError(t, err)
	defer func() { require.NoError(t, os.WriteFile(comm, before, 0o644)) }()
	require.NoError(t, os.WriteFile(comm, []byte("aaaa"), 0o644))

	r.set("driver", comm)
	require.Equal(t, "polled: /proc: proc does not report changes", r.how("driver"))
	r.notices("driver", func() { require.NoError(t, os.WriteFile(comm, []byte("bbbb"), 0o644)) })
	r.calm()
}

func TestSysIsPolled(t *testing.T) {
	r := newRig(t)
	r.set("driver", "/sys/module/no_such_module/version")
	require.Equal(t, "polled: /sys: sysfs does not report changes", r.how("driver"))
	r.calm()
}

// A subject that never rests never settles, and does not delay others.
func TestChangingFilesNeverSettle(t *testing.T) {
	r := newRig(t)
	r.set("clock", "/proc/uptime")
	r.expect("clock", Changing)
	r.calm()
	r.calm()
}

// The kernel does not report stores through a mapping. They move the file's times on file systems
// that are reliable.
func TestStoresThroughAMappingAreFoundByTheBackstop(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Backstop = 20 * time.Millisecond })
	if r.fs() == "tmpfs" {
		t.Skip("SKIPPED: the temporary folder is a tmpfs, which moves no times for a mapping; " +
			"set TMPDIR to a file system on disk")
	}
	r.write("ep.so", strings.Repeat("x", 8192))
	f, err := os.OpenFile(r.path("ep.so"), os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	mem, err := unix.Mmap(int(f.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	require.NoError(t, f.Sync())

	r.set("ep", "ep.so")
	require.Equal(t, "inotify", r.how("ep"))
	r.notices("ep", func() { mem[0] = 'y' })
}

func (r *rig) fs() string {
	var st unix.Statfs_t
	require.NoError(r.t, unix.Statfs(r.dir, &st))
	if st.Type == unix.TMPFS_MAGIC {
		return "tmpfs"
	}
	return "other"
}

func TestWritesThroughAnotherHardLinkAreFoundByTheBackstop(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Backstop = 20 * time.Millisecond })
	r.write("lib/ep.so", "one")
	r.mkdir("elsewhere")
	require.NoError(t, os.Link(r.path("lib/ep.so"), r.path("elsewhere/ep.so")))
	r.set("ep", "lib/ep.so")
	r.notices("ep", func() { r.write("elsewhere/ep.so", "two") })
}

// The kernel takes a watch away with the file system.
func TestAWatchThatEndedIsRenewed(t *testing.T) {
	r := newRig(t)
	r.write("lib/ep.so", "one")
	r.set("ep", "lib/ep.so")
	r.notices("ep", func() { r.unwatch("lib") })
	r.notices("ep", func() { r.write("lib/ep.so", "two") })
	r.sound()
}

func TestAWatchThatEndedUnheardIsRenewed(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Backstop = 20 * time.Millisecond })
	r.write("lib/ep.so", "one")
	r.set("ep", "lib/ep.so")
	r.sys.set(func() { r.sys.deaf = true })
	before := r.unwatch("lib")
	r.calmlyDeaf()
	require.Eventually(t, func() bool {
		r.sys.mu.Lock()
		defer r.sys.mu.Unlock()
		return r.sys.last.watches[r.path("lib")] != before
	}, patient, 5*time.Millisecond, "nobody asked for the watch again")
}

// unwatch ends a watch behind the Watcher's back.
func (r *rig) unwatch(name string) (watch int32) {
	r.sys.set(func() { watch = r.sys.last.watches[r.path(name)] })
	r.sys.last.notifier.remove(watch)
	return watch
}
