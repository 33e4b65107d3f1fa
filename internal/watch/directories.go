package watch

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/fsnotify/fsnotify"
)

// names are the names in a directory whose changes concern a subject; "" means all.
type names map[string]bool

// directories has the watched directories. Files are not watched themselves, because a watch on a
// file does not notice that another file replaces it. Paths are resolved, so that each directory
// has one.
type directories struct {
	open func() (*fsnotify.Watcher, error)
	log  *slog.Logger

	// asking is held during calls that add or remove watches, and locked before mu. The reader of
	// events never takes it, because such a call may block until the events are read.
	asking sync.Mutex

	mu     sync.Mutex // guards the fields below
	system *fsnotify.Watcher
	users  map[string]map[*subject]names // by directory
	closed bool
	reader sync.WaitGroup
}

// Explain names the limit that caused an error, because the system's texts are about disks and
// files.
func Explain(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("the limit fs.inotify.max_user_watches is reached: %w", err)
	case errors.Is(err, syscall.EMFILE):
		return fmt.Errorf("the limit fs.inotify.max_user_instances, or that of open files, "+
			"is reached: %w", err)
	}
	return err
}

// watch has a name in a directory watched for the subject, from now on.
func (d *directories) watch(s *subject, path, name string) error {
	d.asking.Lock()
	defer d.asking.Unlock()
	d.mu.Lock()
	system, err := d.opened()
	if err == nil {
		if d.users[path] == nil {
			d.users[path] = make(map[*subject]names)
		}
		if d.users[path][s] == nil {
			d.users[path][s] = make(names)
		}
		d.users[path][s][name] = true
	}
	d.mu.Unlock()
	if err != nil {
		return Explain(err)
	}
	// Also if it is watched already, because another directory may have replaced it.
	err = system.Add(path)
	if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil // if it is missing, the watch of its parent reports changes
	}
	return fmt.Errorf("%s: %w", path, Explain(err))
}

// opened returns the watcher, which the first call opens. The caller holds mu.
func (d *directories) opened() (*fsnotify.Watcher, error) {
	if d.closed {
		return nil, fs.ErrClosed
	}
	if d.system == nil {
		system, err := d.open()
		if err != nil {
			return nil, err
		}
		d.system = system
		d.reader.Go(func() { d.read(system) })
	}
	return d.system, nil
}

// keep drops the subject's other directories, and removes watches without users.
func (d *directories) keep(s *subject, needed map[string]names) {
	d.asking.Lock()
	defer d.asking.Unlock()
	d.mu.Lock()
	var unused []string
	for path, users := range d.users {
		if needed[path] != nil {
			users[s] = needed[path]
			continue
		}
		if delete(users, s); len(users) == 0 {
			delete(d.users, path)
			unused = append(unused, path)
		}
	}
	system := d.system
	d.mu.Unlock()
	for _, path := range unused {
		_ = system.Remove(path) // fails if the kernel has removed it with the directory
	}
}

func (d *directories) close() (err error) {
	d.mu.Lock()
	system := d.system
	d.closed = true
	d.mu.Unlock()
	if system != nil {
		err = system.Close()
	}
	d.reader.Wait()
	return err
}

func (d *directories) read(system *fsnotify.Watcher) {
	for {
		select {
		case e, ok := <-system.Events:
			if !ok {
				return
			}
			d.sign(filepath.Clean(e.Name))
		case err, ok := <-system.Errors:
			if !ok {
				return
			}
			d.log.Warn("changes may have been missed, so everything is checked", "reason", err)
			d.sign("")
		}
	}
}

// sign notifies the subjects that an event concerns: for a directory its users, and without a path
// all subjects.
func (d *directories) sign(path string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for directory, users := range d.users {
		for s, n := range users {
			if path == "" || directory == path ||
				directory == filepath.Dir(path) && (n[""] || n[filepath.Base(path)]) {
				wake(s.signs)
			}
		}
	}
}
