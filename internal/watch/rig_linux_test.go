package watch

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	quiet   = 50 * time.Millisecond
	patient = 30 * time.Second // how long a test waits for what must come
)

// rig is a Watcher over an empty folder, and a notifier that fails on demand.
type rig struct {
	t   *testing.T
	w   *Watcher
	dir string // without links
	sys *faulty

	// the last of what a test does leaves all as a look between may have found it: then polling
	// cannot see it
	passing bool
}

// newRig never polls but where watching fails, so that what a test sees was told by the kernel.
func newRig(t *testing.T, adjust ...func(*Options)) *rig {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	r := &rig{t: t, dir: dir, sys: &faulty{}}
	o := Options{Quiet: quiet, Poll: 20 * time.Millisecond, Backstop: time.Hour, open: r.sys.open}
	for _, f := range adjust {
		f(&o)
	}
	r.w = New(o)
	t.Cleanup(func() { require.NoError(t, r.w.Close()) })
	return r
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

// lastWrite is the newest time of anything in the folder, in nanoseconds since 1970.
func (r *rig) lastWrite() (newest int64) {
	require.NoError(r.t, filepath.WalkDir(r.dir, func(path string, _ fs.DirEntry, err error) error {
		newest = max(newest, lstat(path).ctime)
		return err
	}))
	return newest
}

// calm sees that the subjects have nothing to say: whatever the kernel told before the change of
// another subject is heard before that, and other takes a few quiet periods.
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

// how runs in the loop, so it is after all that was decided before.
func (r *rig) how(subject string) string { return r.w.Mode(subject) }

func (r *rig) until(subject, how string) {
	r.t.Helper()
	require.Eventually(r.t, func() bool { return strings.Contains(r.how(subject), how) }, patient,
		5*time.Millisecond, "%q is not %q", r.how(subject), how)
}

// faulty opens notifiers that stand between the kernel and the Watcher.
type faulty struct {
	mu      sync.Mutex
	openErr error
	addErr  func(path string) error
	deaf    bool // what the kernel tells is lost
	lost    int
	opened  int
	closed  int
	last    *between

	gate sync.RWMutex // locked for writing: nothing is read from the kernel
}

type between struct {
	notifier
	f       *faulty
	watches map[string]int32 // guarded by f.mu
	fail    chan error       // what reading answers next
}

func (f *faulty) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *faulty) open() (notifier, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.openErr != nil {
		return nil, f.openErr
	}
	kernel, err := openInotify()
	if err != nil {
		return nil, err
	}
	f.opened++
	f.last = &between{kernel, f, make(map[string]int32), make(chan error, 1)}
	return f.last, nil
}

func (b *between) add(path string) (int32, error) {
	b.f.mu.Lock()
	refuse := b.f.addErr
	b.f.mu.Unlock()
	if refuse != nil {
		if err := refuse(path); err != nil {
			return 0, err
		}
	}
	watch, err := b.notifier.add(path)
	if err == nil {
		b.f.set(func() { b.watches[path] = watch })
	}
	return watch, err
}

func (b *between) remove(watch int32) {
	b.f.set(func() {
		maps.DeleteFunc(b.watches,
			func(_ string, one int32) bool { return one == watch })
	})
	b.notifier.remove(watch)
}

func (b *between) Close() error {
	b.f.set(func() { b.f.closed++ })
	return b.notifier.Close()
}

func (b *between) Read(buffer []byte) (int, error) {
	for {
		b.f.gate.RLock() // closed: wait here, and let the kernel's queue fill
		//lint:ignore SA2001 it guards nothing
		b.f.gate.RUnlock()
		n, err := b.notifier.Read(buffer)
		select {
		case err := <-b.fail:
			return 0, err
		default:
		}
		deaf := false
		b.f.set(func() {
			if deaf = b.f.deaf && err == nil; deaf {
				b.f.lost++
			}
		})
		if !deaf {
			return n, err
		}
	}
}

// overflow is what the kernel tells when its queue was full.
func (r *rig) overflow() { r.w.emit(news{all: errors.New("overflow")}) }

// breaks has the next reading fail, after an event.
func (r *rig) breaks(name string) {
	r.sys.last.fail <- errors.New("read: bad file descriptor")
	r.write(name, "x")
}
