package watch

import (
	"cmp"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// Options adjust a Watcher. The zero value is usable.
type Options struct {
	Quiet    time.Duration // how long a subject must be at rest before it is Settled; 0: 1 s
	Poll     time.Duration // how often stamps are compared where watching is not possible; 0: 2 s
	Backstop time.Duration // how often they are compared where it is; 0: 30 s
	Log      *slog.Logger  // nil: nothing is logged

	open func() (notifier, error) // nil: the kernel's; tests bring one that fails
}

// Kind says what an Event tells of its subject.
type Kind int

const (
	Changing Kind = iota + 1 // the first sign of a change
	Settled                  // at rest for the quiet period since the last sign
)

// Event is what happened to a subject. Several changes in one burst are one
// Changing and one Settled.
type Event struct {
	Subject string
	Kind    Kind
}

// Watcher watches any number of subjects.
type Watcher struct {
	quiet, poll, backstop time.Duration
	log                   *slog.Logger
	began                 time.Time // what polls are aligned to, so that one waking serves all

	folders *folders
	events  chan Event
	calls   chan func() // run by the loop
	news    chan news   // signs, from the notifier's reader
	looked  chan result

	done chan struct{} // closed by Close
	once sync.Once
	wg   sync.WaitGroup // the loop, the readers, the looks

	// Owned by the loop.
	subjects map[string]*subject
	outbox   []Event // not taken yet; of each subject a Changing and a Settled at most
}

// New starts a Watcher that has no subjects yet. It always works: where the
// system offers no watching, it polls.
func New(o Options) *Watcher {
	w := &Watcher{
		quiet:    cmp.Or(max(o.Quiet, 0), time.Second),
		poll:     cmp.Or(max(o.Poll, 0), 2*time.Second),
		backstop: cmp.Or(max(o.Backstop, 0), 30*time.Second),
		log:      o.Log,
		began:    time.Now(),
		events:   make(chan Event),
		calls:    make(chan func()),
		news:     make(chan news),
		looked:   make(chan result),
		done:     make(chan struct{}),
		subjects: make(map[string]*subject),
	}
	if w.log == nil {
		w.log = slog.New(slog.DiscardHandler)
	}
	if o.open == nil {
		o.open = openInotify
	}
	w.folders = &folders{open: o.open, notify: w.emit, wg: &w.wg, byWatch: make(map[int32]map[*subject]need)}
	w.wg.Go(w.loop)
	return w
}

// Set says which files and folders make up the subject, in place of what was
// said before; an empty list forgets it, with all that was to be told of it.
// Paths need not exist. A relative path begins at the working directory.
//
// Set returns when the watch is in place. It looks at the files for that, so it
// takes as long as their file system does. To set the same list again is cheap.
func (w *Watcher) Set(name string, paths []string) {
	list := slices.Clone(paths)
	for i, p := range list {
		list[i] = absolute(p)
	}
	slices.Sort(list)
	list = slices.Compact(list)
	if len(list) == 0 {
		w.call(func() { w.forget(name) })
		return
	}
	placed := make(chan struct{})
	if !w.call(func() { w.set(name, list, placed) }) {
		return
	}
	select {
	case <-placed:
	case <-w.done:
	}
}

// absolute does not clean: link/.. is what the kernel makes of it, not what the spelling suggests.
func absolute(path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	wd, err := filepath.Abs(".")
	if err != nil {
		return path // no working directory: such a path leads nowhere, and look says so
	}
	return wd + string(filepath.Separator) + path
}

// Events delivers events: for each subject Changing, Settled, Changing and so on. A slow receiver
// blocks nothing: at most one Changing and one Settled are pending for each subject, and an outdated
// Settled is not delivered. The channel is closed by Close.
func (w *Watcher) Events() <-chan Event { return w.events }

// Mode says how a subject is watched: "inotify", or "polled: " and why; "" for a
// subject that is not set.
func (w *Watcher) Mode(name string) (how string) {
	w.call(func() {
		switch s := w.subjects[name]; {
		case s == nil:
		case s.polled != "":
			how = "polled: " + s.polled
		default:
			how = "inotify"
		}
	})
	return how
}

// call runs f in the loop, and reports false when there is no loop any more.
func (w *Watcher) call(f func()) bool {
	ran := make(chan struct{})
	select {
	case w.calls <- func() { f(); close(ran) }:
		<-ran
		return true
	case <-w.done:
		return false
	}
}

// Close stops watching and returns when everything has stopped. A file system
// that answers no more, in the middle of a look, holds it up.
func (w *Watcher) Close() error {
	var err error
	w.once.Do(func() {
		close(w.done)
		err = w.folders.close()
		w.wg.Wait()
		close(w.events)
	})
	return err
}
