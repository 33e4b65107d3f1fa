package watch

import (
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

// notifier is what tells of changes in folders. It is fsnotify, but for tests of what happens when that fails.
type notifier struct {
	add, remove func(path string) error
	close       func() error
	events      <-chan fsnotify.Event
	errors      <-chan error
}

func openNotifier() (*notifier, error) {
	n, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	return &notifier{add: n.Add, remove: n.Remove, close: n.Close, events: n.Events, errors: n.Errors}, nil
}

// explain says which limit an error is about: the system's own words for it are about disks and files.
func explain(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("the limit fs.inotify.max_user_watches is reached: %w", err)
	case errors.Is(err, syscall.EMFILE):
		return fmt.Errorf("the limit fs.inotify.max_user_instances, or that of open files, is reached: %w", err)
	}
	return err
}

// news are signs on their way to the loop.
type news struct {
	subjects []*subject
	all      bool   // every subject may have changed
	path     string // "" if that is not known
	reason   error  // why all
}

func (w *Watcher) startReader(n *notifier) {
	w.wg.Go(func() { w.read(n) })
}

// read passes on what concerns a subject. Everything else that goes on in the
// watched folders ends here.
func (w *Watcher) read(n *notifier) {
	for {
		var told news
		select {
		case ev, ok := <-n.events:
			if !ok {
				return
			}
			told.path = filepath.Clean(ev.Name)
			if told.subjects = w.folders.match(told.path, ev.Op); len(told.subjects) == 0 {
				continue
			}
		case err, ok := <-n.errors:
			if !ok {
				return
			}
			told.all, told.reason = true, err
			if errors.Is(err, fsnotify.ErrEventOverflow) {
				w.folders.doubt()
			} else if !w.folders.lose(n, err) {
				continue // one failure is one piece of news, however often it is repeated
			}
		case <-w.done:
			return
		}
		w.tell(told)
	}
}

func (w *Watcher) tell(told news) {
	select {
	case w.news <- told:
	case <-w.done:
	}
}

// ensure sees to it that there is a notifier that works. arm is held.
func (t *folders) ensure() error {
	t.mu.Lock()
	broken, reason := t.broken, t.reason
	t.mu.Unlock()
	if t.system != nil && t.system == broken {
		// It is of no use any more, and its descriptor goes with the process at the latest.
		_ = t.drop()
		t.failed, t.retry = fmt.Errorf("watching was interrupted: %w", reason), time.Now().Add(t.pause)
	}
	if t.system != nil {
		return nil
	}
	if time.Now().Before(t.retry) {
		return t.failed
	}
	n, err := t.open()
	if err != nil {
		return explain(err)
	}
	t.system = n
	t.start(n)
	return nil
}

// drop closes the notifier, and with it all watches. arm is held.
func (t *folders) drop() error {
	n := t.system
	t.system = nil
	t.mu.Lock()
	for _, f := range t.byPath {
		f.path, f.stale = "", false
	}
	clear(t.byPath)
	t.mu.Unlock()
	return n.close()
}

// lose says that a notifier has failed. The next look closes it and, after a
// pause, opens another. It reports false when that was known.
func (t *folders) lose(n *notifier, err error) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.broken == n {
		return false
	}
	t.broken, t.reason = n, err
	return true
}

// close ends all watches. No reader is started afterwards.
func (t *folders) close() error {
	t.arm.Lock()
	defer t.arm.Unlock()
	t.closed = true
	if t.system == nil {
		return nil
	}
	return t.drop()
}
