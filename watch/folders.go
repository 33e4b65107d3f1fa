package watch

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

// folders are all that the system is asked to tell about: each folder once,
// for all subjects that need something of it.
//
// Folders are watched, never files: a watch on a file dies with it, and nobody
// hears of the next one of its name.
type folders struct {
	open  func() (*notifier, error)
	start func(*notifier) // its reader
	tell  func(news)
	pause time.Duration // before a notifier that failed is replaced

	// arm is held while the system is asked for something, and taken before mu.
	// The readers and the loop never take it: who has it may wait for a file
	// system, or for them.
	arm    sync.Mutex
	system *notifier // nil: none; guarded by arm
	closed bool      // guarded by arm
	retry  time.Time // no notifier is opened before; guarded by arm
	failed error     // why there is none; guarded by arm

	mu     sync.Mutex // guards what follows, and the folders
	broken *notifier  // one that has failed
	reason error      // why it has
	byID   map[folderID]*folder
	byPath map[string]*folder // those that are armed, by the path that events of theirs begin with
}

// folder is one that subjects need.
type folder struct {
	id    folderID
	path  string // it was armed by; "" if it is not
	stale bool   // the watch may be gone, or another folder may be at the path
	users map[*subject]*need
}

func newFolders(open func() (*notifier, error), pause time.Duration, start func(*notifier), tell func(news)) *folders {
	return &folders{
		open: open, start: start, tell: tell, pause: pause,
		byID: make(map[folderID]*folder), byPath: make(map[string]*folder),
	}
}

// match tells which subjects an event concerns. What happens to a watched
// folder itself puts its watch in doubt, and concerns all who need the folder.
func (t *folders) match(path string, op fsnotify.Op) []*subject {
	t.mu.Lock()
	defer t.mu.Unlock()
	var hit []*subject
	base := filepath.Base(path)
	if f := t.byPath[filepath.Dir(path)]; f != nil {
		for s, n := range f.users {
			if n.whole || n.names[base] {
				hit = append(hit, s)
			}
		}
	}
	if f := t.byPath[path]; f != nil {
		if op.Has(fsnotify.Create) || op.Has(fsnotify.Remove) || op.Has(fsnotify.Rename) {
			f.stale = true
		}
		for s := range f.users {
			hit = append(hit, s) // perhaps twice, which does no harm
		}
	}
	return hit
}

// doubt puts all watches in doubt: what was not told may have been their end.
func (t *folders) doubt() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range t.byID {
		f.stale = true
	}
}

// hold adds to what the subject hears, and has it watched. again tells that
// something came under watch just now: what was seen before may be out of date.
// why is the reason if part of it is not watched.
func (t *folders) hold(s *subject, needs map[folderID]*need) (again bool, why error) {
	t.arm.Lock()
	defer t.arm.Unlock()
	if t.closed {
		return false, fsnotify.ErrClosed
	}
	t.add(s, needs)
	if err := t.ensure(); err != nil {
		return false, err
	}
	for id, n := range needs {
		armed, err := t.watch(t.byID[id], n.path)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
			again = true // gone since we looked
		case err != nil && why == nil:
			why = fmt.Errorf("%s: %w", n.path, explain(err))
		case armed:
			again = true
		}
	}
	return again, why
}

// add is what makes match find the subject. It comes before the watch, so that
// the first event finds it.
func (t *folders) add(s *subject, needs map[folderID]*need) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, n := range needs {
		f := t.byID[id]
		if f == nil {
			f = &folder{id: id, users: make(map[*subject]*need)}
			t.byID[id] = f
		}
		f.users[s] = n.and(f.users[s])
	}
}

// and is what either needs. Neither is changed: match may be reading them.
func (n *need) and(other *need) *need {
	sum := &need{path: n.path, whole: n.whole, names: make(map[string]bool, len(n.names))}
	for name := range n.names {
		sum.names[name] = true
	}
	if other != nil {
		sum.whole = sum.whole || other.whole
		for name := range other.names {
			sum.names[name] = true
		}
	}
	return sum
}

// watch asks the system to tell of the folder that lies at path, unless it
// does already. arm is held.
func (t *folders) watch(f *folder, path string) (armed bool, err error) {
	t.mu.Lock()
	stands := f.path != "" && !f.stale
	f.stale = false // what becomes of it from here on is told, or another look finds it
	other := t.byPath[path]
	t.mu.Unlock()
	if stands {
		return false, nil
	}
	t.unwatch(f)
	if other != nil && other != f {
		t.displace(other)
	}
	t.mu.Lock()
	f.path = path
	t.byPath[path] = f
	t.mu.Unlock()
	if err := t.system.add(path); err != nil {
		t.mu.Lock()
		f.path = ""
		delete(t.byPath, path)
		t.mu.Unlock()
		return false, err
	}
	return true, nil
}

// displace ends the watch of a folder that lay where now another does: fsnotify
// knows it by this path only. Who needs it looks where it went.
func (t *folders) displace(f *folder) {
	path := f.path
	t.unwatch(f)
	var told news
	t.mu.Lock()
	for s := range f.users {
		told.subjects = append(told.subjects, s)
	}
	t.mu.Unlock()
	told.path = path
	t.tell(told)
}

// unwatch ends the watch of a folder. arm is held.
func (t *folders) unwatch(f *folder) {
	t.mu.Lock()
	path := f.path
	if path != "" {
		delete(t.byPath, path)
	}
	f.path = ""
	t.mu.Unlock()
	if path != "" && t.system != nil {
		// It fails when the kernel has ended the watch by itself, with the folder, and then there is nothing to do.
		_ = t.system.remove(path)
	}
}

// refresh asks again for what the subject has watched. The kernel ends some
// watches without a word, when a file system is unmounted for one; for those
// that stand nothing changes.
func (t *folders) refresh(s *subject) {
	t.arm.Lock()
	defer t.arm.Unlock()
	if t.system == nil || t.closed {
		return
	}
	for _, f := range t.of(s) {
		there := lstat(f.path)
		if f.path != "" && !there.failed && there.id(f.path) == f.id && t.system.add(f.path) == nil {
			continue
		}
		t.mu.Lock()
		f.stale = true
		t.mu.Unlock()
	}
}

func (t *folders) of(s *subject) []*folder {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []*folder
	for _, f := range t.byID {
		if f.users[s] != nil {
			out = append(out, f)
		}
	}
	return out
}

// keep forgets all that the subject needed but these, and ends the watches that
// nobody needs any more.
func (t *folders) keep(s *subject, needs map[folderID]*need) {
	t.arm.Lock()
	defer t.arm.Unlock()
	t.mu.Lock()
	var unused []*folder
	for id, f := range t.byID {
		if n := needs[id]; n != nil && f.users[s] != nil {
			f.users[s] = n
			continue
		}
		delete(f.users, s)
		if len(f.users) == 0 {
			delete(t.byID, id)
			unused = append(unused, f)
		}
	}
	t.mu.Unlock()
	for _, f := range unused {
		t.unwatch(f)
	}
	if len(t.byID) == 0 && t.system != nil {
		// Nothing is watched by it; another is opened when there is something to watch.
		_ = t.drop()
	}
}
