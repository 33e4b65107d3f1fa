package watch

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Options adjust a Watcher. The zero value is usable.
type Options struct {
	Quiet    time.Duration // how long a subject must be at rest before it is Settled; 0: 1 s
	Poll     time.Duration // how often stamps are compared where watching is not possible; 0: 2 s
	Backstop time.Duration // how often they are compared where it is; 0: 30 s
	Log      *slog.Logger  // nil: nothing is logged

	open func() (*fsnotify.Watcher, error) // nil: the package's; tests bring one that fails
}

// Kind says what an Event reports about its subject.
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
	directories           directories
	events                chan Event

	closing context.Context
	close   context.CancelFunc
	work    sync.WaitGroup // one for each subject

	mu       sync.Mutex // guards subjects; taken before a subject's
	subjects map[string]*subject
}

// subject is followed by a goroutine of its own, so that a file system that does not answer holds
// up no other.
//
// A subject is at rest until a sign: an event, or a look that differs from the one before. Then it
// is changing. While signs come it is looked at now and then, so that directories which appear are
// watched at once. A quiet period after the last sign it is looked at again. If that look equals
// the one before, the subject has settled; if not, that is another sign.
type subject struct {
	name  string
	ctx   context.Context
	end   context.CancelFunc
	signs chan struct{} // has a token when an event came
	isSet chan struct{} // has a token when the paths are other ones

	mu       sync.Mutex // guards the rest; held while the files are looked at
	paths    []string
	last     *snapshot
	ended    time.Time // when the last look did
	duration time.Duration
	signed   bool      // an event came since the last look began
	changed  time.Time // when the last sign came; zero: it is at rest
	reported bool      // as Changing
}

// New starts a Watcher that has no subjects yet. It always works: where the system offers no
// watching, it polls.
func New(o Options) *Watcher {
	w := &Watcher{
		quiet:    cmp.Or(max(o.Quiet, 0), time.Second),
		poll:     cmp.Or(max(o.Poll, 0), 2*time.Second),
		backstop: cmp.Or(max(o.Backstop, 0), 30*time.Second),
		log:      o.Log,
		began:    time.Now(),
		events:   make(chan Event),
		subjects: make(map[string]*subject),
	}
	w.log = cmp.Or(w.log, slog.New(slog.DiscardHandler))
	w.directories = directories{log: w.log, open: o.open,
		users: make(map[string]map[*subject]names)}
	if o.open == nil {
		w.directories.open = fsnotify.NewWatcher
	}
	w.closing, w.close = context.WithCancel(context.Background())
	return w
}

// Set says which files and directories make up the subject, in place of what was said before; an
// empty list forgets it. Paths need not exist. A relative path begins at the working directory.
//
// Set returns when the watch is in place. It looks at the files for that, so it takes as long as
// their file system does. To set the same list again is cheap.
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
	if s.ctx.Err() != nil { // it was forgotten meanwhile
		w.directories.keep(s, nil)
	}
}

// absolute does not clean: link/.. is what the kernel makes of it, not what the spelling suggests.
func absolute(path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	wd, err := filepath.Abs(".")
	if err != nil {
		return path // no working directory: such a path leads nowhere, and its stamp says so
	}
	return wd + string(filepath.Separator) + path
}

// subject returns the subject of that name, which it makes; without wanted it forgets the subject.
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
// holds up further events only, and an outdated Settled is not delivered. The channel is closed by
// Close.
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
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last == nil {
		return "" // Set has not returned yet
	}
	if s.last.unwatched != "" {
		return "polled: " + s.last.unwatched
	}
	return "inotify"
}

// Close stops watching and returns when everything has stopped. A file system
// that answers no more, in the middle of a look, holds it up.
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
	default: // there is a token already
	}
}

// follow looks at a subject when it is due, and sends its events.
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

// outdated sends an event, unless there is a sign before a Settled is taken: the change goes on.
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
	if kind == Settled && s.changed.Equal(changed) { // else Set has found another change
		s.changed = time.Time{}
	}
	return false
}

// step looks at a subject if that is due, and returns the kind of event to send, 0 for none.
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
		// Soon after the last sign, but a large directory is not looked at all the time.
		return s.ended.Add(min(max(w.quiet/4, 4*s.duration), w.quiet, time.Second))
	case !s.changed.IsZero():
		return s.changed.Add(w.quiet)
	case s.last.unwatched != "":
		return w.nextPoll(s.ended, w.poll)
	}
	return w.nextPoll(s.ended, w.backstop)
}

// nextPoll is the first common moment after t: all subjects are polled in one waking.
func (w *Watcher) nextPoll(t time.Time, every time.Duration) time.Time {
	return w.began.Add((t.Sub(w.began)/every + 1) * every)
}

// look compares the files with the last look, with common set only the paths that both know. The
// caller holds the subject's mu.
func (w *Watcher) look(s *subject, common bool) {
	began, before := time.Now(), s.last
	s.signed = false
	s.last = w.directories.snapshot(s, s.paths)
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
