package watch

import (
	"maps"
	"slices"
	"time"
)

// subject is the state of one. It belongs to the loop; others use it as a name only.
//
// A subject is at rest until a sign: an event of the kernel's, or a look that differs from the one
// before. Then it is changing. While signs come it is looked at now and then, so that folders which
// appear are watched at once, and once after the last. A quiet period after the last sign it is
// looked at again. If that look is equal to the one before, nothing happened that no event told,
// and the subject has settled; if not, that is another sign.
type subject struct {
	name      string
	paths     []string
	ready     []chan struct{} // closed when paths are watched
	rewatched bool            // paths are not those that were last looked at

	looking  bool // a look is under way
	removed  bool // forgotten while a look was under way
	last     *snapshot
	ended    time.Time // when the last look did
	duration time.Duration
	covered  uint64 // signs when the last look began
	polled   string // why it is polled; "" if it is not

	changeSigns uint64
	changing    bool
	pendingSign time.Time // the last sign
}

type result struct {
	subject  *subject
	snapshot *snapshot
	began    time.Time
	signs    uint64 // when it began
	renewed  bool   // it is the first with these paths
	paths    []string
}

// loop makes all decisions. It never blocks on subscribers or on file systems.
func (w *Watcher) loop() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Stop()
		if due, ok := w.start(time.Now()); ok {
			timer.Reset(time.Until(due))
		}
		var out chan<- Event
		var head Event
		if len(w.outbox) > 0 {
			out, head = w.events, w.outbox[0]
		}
		select {
		case <-w.done:
			return
		case f := <-w.calls:
			f()
		case n := <-w.news:
			w.handleNews(n)
		case r := <-w.looked:
			w.end(r)
		case out <- head:
			w.outbox = w.outbox[1:]
		case <-timer.C:
		}
	}
}

func (w *Watcher) set(name string, paths []string, placed chan struct{}) {
	s := w.subjects[name]
	if s == nil {
		s = &subject{name: name}
		w.subjects[name] = s
	}
	same := slices.Equal(s.paths, paths)
	if same && len(s.ready) == 0 {
		close(placed)
		return
	}
	s.rewatched = s.rewatched || !same
	s.paths = paths
	s.ready = append(s.ready, placed)
}

// makeReady releases the callers that wait until their paths are watched.
func (s *subject) makeReady() {
	for _, placed := range s.ready {
		close(placed)
	}
	s.ready = nil
}

func (w *Watcher) forget(name string) {
	s := w.subjects[name]
	if s == nil {
		return
	}
	delete(w.subjects, name)
	w.outbox = slices.DeleteFunc(w.outbox, func(e Event) bool { return e.Subject == name })
	s.makeReady()
	s.removed = true
	if !s.looking {
		w.release(s)
	}
}

func (w *Watcher) release(s *subject) { w.wg.Go(func() { w.folders.watchNeeds(s, nil) }) }

func (w *Watcher) start(now time.Time) (next time.Time, any bool) {
	for _, s := range w.subjects {
		if s.looking {
			continue // its end wakes the loop
		}
		due := w.due(s)
		if due.After(now) {
			if !any || due.Before(next) {
				next, any = due, true
			}
			continue
		}
		w.begin(s, now)
	}
	return next, any
}

func (w *Watcher) due(s *subject) time.Time {
	switch {
	case s.rewatched:
		return time.Time{}
	case s.changeSigns != s.covered:
		// Soon after the last sign, but a large folder is not looked at all the time.
		return s.ended.Add(min(max(w.quiet/4, 4*s.duration), w.quiet, time.Second))
	case s.changing:
		return s.pendingSign.Add(w.quiet)
	case s.polled != "":
		return w.nextPoll(s.ended, w.poll)
	default:
		return w.nextPoll(s.ended, w.backstop)
	}
}

// nextPoll is the first common moment after t: all subjects are polled in one waking.
func (w *Watcher) nextPoll(t time.Time, every time.Duration) time.Time {
	return w.began.Add((t.Sub(w.began)/every + 1) * every)
}

func (w *Watcher) begin(s *subject, now time.Time) {
	r := result{subject: s, began: now, signs: s.changeSigns, renewed: s.rewatched, paths: s.paths}
	s.looking, s.rewatched = true, false
	w.wg.Go(func() {
		r.snapshot = takeSnapshot(w.folders, s, r.paths)
		select {
		case w.looked <- r:
		case <-w.done:
		}
	})
}

func (w *Watcher) end(r result) {
	s := r.subject
	s.looking = false
	if s.removed {
		w.release(s)
		return
	}
	now := time.Now()
	earlier, told := s.last, s.covered != s.changeSigns // told: events explain what is different
	s.last, s.ended, s.duration, s.covered = r.snapshot, now, now.Sub(r.began), r.signs
	w.mode(s, r.snapshot.unwatched)
	if !s.rewatched {
		s.makeReady()
	}
	if earlier == nil {
		return
	}
	differ := r.snapshot.changedFrom(earlier, r.renewed)
	switch {
	case differ && !told:
		caught := s.changeSigns == s.covered
		w.noticed(s, now)
		if caught {
			s.covered = s.changeSigns // the look that found it has seen it
		}
	case differ:
		s.pendingSign = now // what came under watch just now was perhaps written just before
	case s.changing && !r.began.Before(s.pendingSign.Add(w.quiet)):
		s.changing = false
		w.outbox = append(w.outbox, Event{s.name, Settled})
	}
}

// mode logs when a subject is polled from now on, or watched again.
func (w *Watcher) mode(s *subject, why string) {
	switch {
	case why == s.polled:
	case why != "":
		w.log.Warn("cannot be watched, so it is "+
			"polled", "subject", s.name, "reason", why, "every", w.poll)
	default:
		w.log.Info("is watched again", "subject", s.name)
	}
	s.polled = why
}

func (w *Watcher) handleNews(n news) {
	if n.all != nil {
		w.log.Warn("changes may have been missed, so everything is checked", "reason", n.all)
		n.subjects = slices.Collect(maps.Values(w.subjects))
	}
	for _, s := range n.subjects {
		if !s.removed {
			w.noticed(s, time.Now())
		}
	}
}

func (w *Watcher) emit(told news) {
	select {
	case w.news <- told:
	case <-w.done:
	}
}

func (w *Watcher) noticed(s *subject, now time.Time) {
	s.changeSigns++
	s.pendingSign = now
	if s.changing {
		return
	}
	s.changing = true
	if i := slices.Index(w.outbox, Event{s.name, Settled}); i >= 0 {
		w.outbox = slices.Delete(w.outbox, i, i+1) // the earlier change goes on, for all that anybody knows
	} else {
		w.outbox = append(w.outbox, Event{s.name, Changing})
	}
}
