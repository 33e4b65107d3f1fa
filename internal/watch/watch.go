package watch

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Options adjust a Watcher. The zero value is usable.
type Options struct {
	Quiet    time.Duration // how long a subject must be unchanged before it is Settled; 0: 1 s
	Poll     time.Duration // interval of comparing stamps without watching; 0: 2 s
	Backstop time.Duration // interval of comparing stamps with watching; 0: 30 s
	Log      *slog.Logger  // nil: nothing is logged

	open func() (*fsnotify.Watcher, error) // nil: the system's; tests replace it
}

// Kind is the kind of an Event.
type Kind int

const (
	Changing Kind = iota + 1 // the first sign of a change
	Settled                  // unchanged for the quiet period since the last sign
)

// Event is a change of a subject. A burst of changes causes one Changing and one Settled.
type Event struct {
	Subject string
	Kind    Kind
}

// Watcher watches any number of subjects.
type Watcher struct {
	quiet, poll, backstop time.Duration
	log                   *slog.Logger
	// polls are aligned to it, so that all subjects are polled at once
	began       time.Time
	directories directories
	events      chan Event

	closing context.Context
	close   context.CancelFunc
	work    sync.WaitGroup // one for each subject

	mu       sync.Mutex // guards subjects; taken before a subject's
	subjects map[string]*subject
}

// subject has a goroutine of its own, so that a file system that does not answer delays no other
// subject.
//
// A subject is unchanged until a sign: an event, or a snapshot that differs from the previous one.
// Then it is changing. While signs continue, snapshots are taken occasionally, so that new
// directories are watched soon. A quiet period after the last sign another snapshot is taken. If it
// equals the previous one, the subject has settled; otherwise that is another sign.
type subject struct {
	name  string
	ctx   context.Context
	end   context.CancelFunc
	signs chan struct{} // has a token after an event
	isSet chan struct{} // has a token after a change of the paths
	mode  atomic.Value  // string, as Mode returns it; empty until the first Set returns

	mu       sync.Mutex // guards the fields below; held during a snapshot
	paths    []string
	last     *snapshot
	ended    time.Time // end of the last snapshot
	duration time.Duration
	signed   bool      // an event arrived since the last snapshot began
	changed  time.Time // time of the last sign; zero: unchanged
	reported bool      // Changing was sent
}

// New starts a Watcher without subjects. It cannot fail: if the system does not support watching,
// it polls.
func New(o Options) *Watcher {
	w := &Watcher{
		quiet:    cmp.Or(max(o.Quiet, 0), time.Second),
		poll:     cmp.Or(max(o.Poll, 0), 2*time.Second),
		backstop: cmp.Or(max(o.Backstop, 0), 30*time.Second),
		log:      cmp.Or(o.Log, slog.New(slog.DiscardHandler)),
		began:    time.Now(),
		events:   make(chan Event),
		subjects: make(map[string]*subject),
	}
	w.directories = directories{log: w.log, open: o.open,
		users: make(map[string]map[*subject]names)}
	if o.open == nil {
		w.directories.open = fsnotify.NewWatcher
	}
	w.closing, w.close = context.WithCancel(context.Background())
	return w
}

// Set sets the files and directories of the subject, and replaces earlier ones; with an empty list
// it removes the subject. Paths need not exist. A relative path begins at the working directory.
//
// Set returns when the watch is in place. It reads the files' stamps, so a slow file system delays
// it. Setting the same list again is cheap.
func (w *Watcher) Set(name string, paths []string) {
	list := slices.Clone(paths)
	for i, p := range list {
		list[i] = absolute(p)
	}
	slices.Sort(list)
	list = slices.Compact(list)
	s := w.subject(name, len(list) > 0)
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.paths, list) {
		s.paths = list
		w.look(s, true)
		wake(s.isSet)
	}
	if s.ctx.Err() != nil { // it was removed in the meantime
		w.directories.keep(s, nil)
	}
}

// absolute does not clean the path, because the kernel resolves link/.. after following the link.
func absolute(path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	wd, err := filepath.Abs(".")
	if err != nil {
		return path // no working directory: the stamp of such a path is an error
	}
	return wd + string(filepath.Separator) + path
}

// subject returns the subject of that name, and makes it if necessary. Without wanted it removes
// it.
func (w *Watcher) subject(name string, wanted bool) *subject {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.subjects[name]
	switch {
	case w.closing.Err() != nil:
		return nil
	case !wanted:
		if delete(w.subjects, name); s != nil {
			s.end()
		}
		return nil
	case s == nil:
		s = &subject{name: name, signs: make(chan struct{}, 1), isSet: make(chan struct{}, 1)}
		s.ctx, s.end = context.WithCancel(w.closing)
		w.subjects[name] = s
		w.work.Go(func() { w.follow(s) })
	}
	return s
}

// Events delivers events: for each subject Changing, Settled, Changing and so on. A slow receiver
// only delays later events, and an outdated Settled is not delivered. Close closes the channel.
func (w *Watcher) Events() <-chan Event { return w.events }

// Mode returns how a subject is watched: "inotify", or "polled: " and why; "" for a
// subject that is not set.
func (w *Watcher) Mode(name string) string {
	w.mu.Lock()
	s := w.subjects[name]
	w.mu.Unlock()
	if s == nil {
		return ""
	}
	mode, _ := s.mode.Load().(string)
	return mode
}

// Close stops watching, and returns when all goroutines have ended. A file system that does not
// answer delays it.
func (w *Watcher) Close() error {
	w.mu.Lock()
	again := w.closing.Err() != nil
	w.close()
	w.mu.Unlock()
	w.work.Wait()
	if again {
		return nil
	}
	defer close(w.events)
	return w.directories.close()
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // has a token already
	}
}

// follow takes snapshots of a subject when they are due, and sends its events.
func (w *Watcher) follow(s *subject) {
	defer w.directories.keep(s, nil)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		sign := false
		select {
		case <-s.ctx.Done():
			return
		case <-s.signs:
			sign = true
		case <-s.isSet:
		case <-timer.C:
		}
		kind := w.step(s, sign)
		for kind != 0 && w.outdated(s, kind) {
			kind = w.step(s, true)
		}
		s.mu.Lock()
		timer.Reset(time.Until(w.due(s)))
		s.mu.Unlock()
	}
}

// outdated sends an event. It reports true, without sending, if a sign precedes the receipt of a
// Settled.
func (w *Watcher) outdated(s *subject, kind Kind) bool {
	signs := s.signs
	if kind == Changing {
		signs = nil
	}
	s.mu.Lock()
	changed := s.changed
	s.mu.Unlock()
	select {
	case w.events <- Event{s.name, kind}:
	case <-s.ctx.Done():
		return false
	case <-signs:
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reported = kind == Changing
	if kind == Settled && s.changed.Equal(changed) { // otherwise Set has found another change
		s.changed = time.Time{}
	}
	return false
}

// step takes a snapshot if one is due, and returns the kind of event to send, 0 for none.
func (w *Watcher) step(s *subject, sign bool) Kind {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sign {
		s.signed, s.changed = true, time.Now()
	}
	began := time.Now()
	if !w.due(s).After(began) {
		w.look(s, false)
	}
	switch {
	case s.changed.IsZero():
	case !s.reported:
		return Changing
	case !s.signed && began.Sub(s.changed) >= w.quiet:
		return Settled
	}
	return 0
}

func (w *Watcher) due(s *subject) time.Time {
	switch {
	case s.last == nil:
		return time.Now().Add(w.backstop) // Set wakes it
	case s.signed:
		// Soon after the last sign, but later for a large directory, which takes long.
		return s.ended.Add(min(max(w.quiet/4, 4*s.duration), w.quiet, time.Second))
	case !s.changed.IsZero():
		return s.changed.Add(w.quiet)
	case s.last.unwatched != "":
		return w.nextPoll(s.ended, w.poll)
	}
	return w.nextPoll(s.ended, w.backstop)
}

// nextPoll returns the first time after t at which all subjects are polled together.
func (w *Watcher) nextPoll(t time.Time, every time.Duration) time.Time {
	return w.began.Add((t.Sub(w.began)/every + 1) * every)
}

// look takes a snapshot and compares it with the previous one, with common only for paths in both.
// The caller holds the subject's mu.
func (w *Watcher) look(s *subject, common bool) {
	began, before := time.Now(), s.last
	s.signed = false
	s.last = w.directories.snapshot(s, s.paths)
	s.mode.Store("inotify")
	if s.last.unwatched != "" {
		s.mode.Store("polled: " + s.last.unwatched)
	}
	s.ended = time.Now()
	s.duration = s.ended.Sub(began)
	before = cmp.Or(before, &snapshot{stamps: s.last.stamps})
	if common && s.last.differs(before) || !common && !maps.Equal(s.last.stamps, before.stamps) {
		s.changed = s.ended
	}
	switch {
	case s.last.unwatched == before.unwatched:
	case s.last.unwatched != "":
		w.log.Warn("cannot be watched, so it is "+
			"polled", "subject", s.name, "reason", s.last.unwatched, "every", w.poll)
	default:
		w.log.Info("is watched again", "subject", s.name)
	}
}
