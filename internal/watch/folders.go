package watch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// notifier is what tells of changes in folders: the kernel, or in tests one that fails.
type notifier interface {
	// add watches a folder. The kernel has one watch of a folder, whatever path leads to it.
	add(path string) (watch int32, err error)
	remove(watch int32)
	Read([]byte) (int, error)
	Close() error
}

type inotify struct{ *os.File }

func openInotify() (notifier, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	return inotify{os.NewFile(uintptr(fd), "inotify")}, nil
}

// watchedEvents is what the kernel tells of a folder and its entries.
const watchedEvents = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MODIFY | unix.IN_ATTRIB |
	unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF

func (n inotify) add(path string) (watch int32, err error) {
	controlErr := n.control(func(fd int) {
		var wd int
		wd, err = unix.InotifyAddWatch(fd, path, watchedEvents|unix.IN_ONLYDIR|unix.IN_DONT_FOLLOW)
		watch = int32(wd)
	})
	return watch, errors.Join(controlErr, err)
}

func (n inotify) remove(watch int32) {
	// It fails when the kernel has ended the watch by itself, with the folder: nothing is left to do.
	_ = n.control(func(fd int) { _, _ = unix.InotifyRmWatch(fd, uint32(watch)) })
}

func (n inotify) control(f func(fd int)) error {
	raw, err := n.SyscallConn() // and not Fd, which would make reading block a thread
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) { f(int(fd)) })
}

// Explain says which limit an error is about: the system's own words are about disks and files.
func Explain(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("the limit fs.inotify.max_user_watches is reached: %w", err)
	case errors.Is(err, syscall.EMFILE):
		return fmt.Errorf("the limit fs.inotify.max_user_instances, or that of open files, is reached: %w", err)
	}
	return err
}

// folders are all that the kernel is asked to tell about: each folder once, for
// all subjects that need something of it.
//
// Folders are watched, never files: a watch on a file does not see the next file of that name.
type folders struct {
	open   func() (notifier, error)
	notify func(news)
	wg     *sync.WaitGroup // of the readers

	// rearm is held while the kernel is asked for something, and taken before mu.
	// The readers and the loop never take it, because its holder may block on a file system.
	rearm  sync.Mutex
	closed bool // guarded by arm

	mu      sync.Mutex
	system  notifier                    // nil: none; guarded by mu
	byWatch map[int32]map[*subject]need // guarded by mu
}

// need are the names in a folder that a subject must hear of; "" stands for all of them.
type need map[string]bool

// news are signs on their way to the loop.
type news struct {
	subjects []*subject
	all      error // why every subject may have changed
}

var errClosed = errors.New("the watcher is closed")

// watchFolder has the kernel tell the subject of a name in a folder, and adds the name to needs.
func (t *folders) watchFolder(s *subject, needs map[int32]need, path, name string) error {
	t.rearm.Lock()
	defer t.rearm.Unlock()
	n, err := t.notifier()
	if err != nil {
		return Explain(err)
	}
	watch, err := n.add(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, Explain(err))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.system != n {
		return errors.New("watching was interrupted")
	}
	users := valuesOf(t.byWatch, watch)
	// The folders of the last look stay watched until this one ends.
	valuesOf(users, s)[name], valuesOf(needs, watch)[name] = true, true
	return nil
}

// valuesOf returns the map under a key, which it makes where there is none.
func valuesOf[K, L comparable, V any, M ~map[L]V](of map[K]M, key K) M {
	if of[key] == nil {
		of[key] = make(M)
	}
	return of[key]
}

// notifier gives the one in use, or opens one. arm is held.
func (t *folders) notifier() (notifier, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, errClosed
	}
	if t.system == nil {
		n, err := t.open()
		if err != nil {
			return nil, err
		}
		t.system = n
		t.wg.Go(func() { t.read(n) })
	}
	return t.system, nil
}

// watchNeeds forgets all that the subject needed but these, and ends watches without users.
func (t *folders) watchNeeds(s *subject, needs map[int32]need) {
	t.rearm.Lock()
	defer t.rearm.Unlock()
	t.mu.Lock()
	n := t.system
	var unused []int32
	for watch, users := range t.byWatch {
		if needs[watch] != nil && users[s] != nil {
			users[s] = needs[watch]
			continue
		}
		if delete(users, s); len(users) == 0 {
			delete(t.byWatch, watch)
			unused = append(unused, watch)
		}
	}
	none := len(t.byWatch) == 0
	t.mu.Unlock()
	switch {
	case n == nil:
	case none: // another is opened when there is something to watch
		_ = t.dropNotifier(n)
	default:
		for _, watch := range unused {
			n.remove(watch)
		}
	}
}

// dropNotifier closes a notifier, and with it all its watches.
func (t *folders) dropNotifier(n notifier) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n == nil || t.system != n {
		return nil
	}
	t.system = nil
	clear(t.byWatch)
	return n.Close()
}

// close ends all watches. No reader is started afterwards.
func (t *folders) close() error {
	t.rearm.Lock()
	defer t.rearm.Unlock()
	t.closed = true
	t.mu.Lock()
	n := t.system
	t.mu.Unlock()
	return t.dropNotifier(n)
}

// read passes on what concerns a subject.
func (t *folders) read(n notifier) {
	buffer := make([]byte, 64<<10)
	for {
		size, err := n.Read(buffer)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil {
			_ = t.dropNotifier(n) // the next look opens another
			t.notify(news{all: err})
			return
		}
		for b := buffer[:size]; len(b) >= unix.SizeofInotifyEvent; {
			watch := int32(binary.NativeEndian.Uint32(b))
			mask := binary.NativeEndian.Uint32(b[4:])
			end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(b[12:]))
			name := bytes.TrimRight(b[unix.SizeofInotifyEvent:end], "\x00")
			b = b[end:]
			if mask&unix.IN_Q_OVERFLOW != 0 {
				t.notify(news{all: errors.New("the kernel's queue has overflowed")})
			} else if subjects := t.match(watch, mask, string(name)); len(subjects) > 0 {
				t.notify(news{subjects: subjects})
			}
		}
	}
}

// match tells which subjects an event concerns: all of them if it is about the folder itself.
func (t *folders) match(watch int32, mask uint32, name string) (hit []*subject) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for s, n := range t.byWatch[watch] {
		if name == "" || n[name] || n[""] {
			hit = append(hit, s)
		}
	}
	if mask&unix.IN_IGNORED != 0 {
		delete(t.byWatch, watch) // it is at its end: the look that follows asks for another
	}
	return hit
}
