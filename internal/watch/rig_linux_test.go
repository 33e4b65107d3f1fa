package watch

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	quiet   = 50 * time.Millisecond
	patient = 30 * time.Second // how long a test waits for what must come
)

// rig is a Watcher over an empty directory.
type rig struct {
	t   *testing.T
	w   *Watcher
	dir string // without links

	openErr error // what opening a notifier answers

	// the last of what a test does leaves all as a look between may have found it: then stamps
	// cannot show it
	passing bool
}

// newRig never polls but where watching fails, so that a test sees only what the kernel reports.
func newRig(t *testing.T, adjust ...func(*Options)) *rig {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	r := &rig{t: t, dir: dir}
	o := Options{Quiet: quiet, Poll: 20 * time.Millisecond, Backstop: time.Hour, open: r.open}
	for _, f := range adjust {
		f(&o)
	}
	r.w = New(o)
	t.Cleanup(func() { require.NoError(t, r.w.Close()) })
	return r
}

func (r *rig) open() (*fsnotify.Watcher, error) {
	if r.openErr != nil {
		return nil, r.openErr
	}
	return fsnotify.NewWatcher()
}

func (r *rig) path(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(r.dir, name)
}

func (r *rig) set(subject string, names ...string) {
	paths := make([]string, len(names))
	for i, n := range names {
		paths[i] = r.path(n)
	}
	r.w.Set(subject, paths)
}

// next is the next event, of whatever subject.
func (r *rig) next() Event {
	r.t.Helper()
	select {
	case e, ok := <-r.w.Events():
		require.True(r.t, ok, "the Watcher was closed")
		return e
	case <-time.After(patient):
		require.Fail(r.t, "no event")
		return Event{}
	}
}

func (r *rig) expect(subject string, k Kind) {
	r.t.Helper()
	require.Equal(r.t, Event{subject, k}, r.next())
}

// notices expects one Changing and one Settled for what f does, the latter when all has been quiet
// since.
func (r *rig) notices(subject string, f func()) {
	r.t.Helper()
	f()
	written := r.lastWrite()
	r.expect(subject, Changing)
	r.expect(subject, Settled)
	if !r.passing {
		require.GreaterOrEqual(r.t, time.Now().UnixNano()-written, int64(quiet),
			"quiet is not counted from the last write")
	}
}

// lastWrite is the newest time of anything in the directory, in nanoseconds since 1970.
func (r *rig) lastWrite() (newest int64) {
	require.NoError(r.t, filepath.WalkDir(r.dir, func(path string, _ fs.DirEntry, err error) error {
		info, err2 := os.Lstat(path)
		if err2 == nil {
			newest = max(newest, info.Sys().(*syscall.Stat_t).Ctim.Nano())
		}
		return err
	}))
	return newest
}

// calm sees that the subjects have nothing to say: whatever the kernel reported before the change
// of another subject is heard before that, and other takes a few quiet periods.
func (r *rig) calm() {
	r.t.Helper()
	r.set("other", "other-of-the-rig")
	for range 2 {
		r.notices("other", func() { r.write("other-of-the-rig", "again") })
	}
	r.w.Set("other", nil)
}

func (r *rig) write(name, text string) {
	require.NoError(r.t, os.MkdirAll(filepath.Dir(r.path(name)), 0o755))
	// no truncation: in place, byte by byte
	f, err := os.OpenFile(r.path(name), os.O_WRONLY|os.O_CREATE, 0o644)
	require.NoError(r.t, err)
	_, err = f.WriteString(text)
	require.NoError(r.t, err)
	require.NoError(r.t, f.Close())
}

func (r *rig) mkdir(name string) { require.NoError(r.t, os.MkdirAll(r.path(name), 0o755)) }

func (r *rig) link(target, name string) {
	require.NoError(r.t, os.MkdirAll(filepath.Dir(r.path(name)), 0o755))
	require.NoError(r.t, os.Symlink(target, r.path(name)))
}

// relink switches a link as ln -sfn and package managers do.
func (r *rig) relink(target, name string) {
	r.link(target, name+".new")
	r.rename(name+".new", name)
}

func (r *rig) rename(from, to string) { require.NoError(r.t, os.Rename(r.path(from), r.path(to))) }

func (r *rig) remove(name string) { require.NoError(r.t, os.RemoveAll(r.path(name))) }

func (r *rig) how(subject string) string { return r.w.Mode(subject) }

func (r *rig) until(subject, how string) {
	r.t.Helper()
	require.Eventually(r.t, func() bool { return strings.Contains(r.how(subject), how) }, patient,
		5*time.Millisecond, "%q is not %q", r.how(subject), how)
}

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
