package watch

import (
	"slices"
	"time"
)

// result is a look that has ended.
type result struct {
	subject *subject
	look    *look
	began   time.Time
	signs   uint64 // when it began
	renewed bool   // it is the first with these paths
	paths   []string
}

// loop is all that decides anything. It waits for nobody, and for no file system.
func (w *Watcher) loop() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Stop()
		if due, ok := w.start(time.Now()); ok {
			timer.Reset(time.Until(due))
		}
		var out chan<- Event
		head, ok := w.outbox.head()
		if ok {
			out = w.events
		}
		select {
		case <-w.done:
			return
		case f := <-w.calls:
			f()
		case n := <-w.news:
			w.hear(n)
		case r := <-w.looked:
			w.end(r)
		case out <- head:
			w.outbox.pop()
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
	if same && len(s.placed) == 0 {
		close(placed)
		return
	}
	s.renewed = s.renewed || !same
	s.paths = paths
	s.placed = append(s.placed, placed)
}

func (w *Watcher) forget(name string) {
	s := w.subjects[name]
	if s == nil {
		return
	}
	delete(w.subjects, name)
	w.outbox.drop(name)
	for _, placed := range s.placed {
		close(placed)
	}
	s.placed, s.gone = nil, true
	if !s.looking {
		w.release(s)
	}
}

// release ends the watches of a subject that was forgotten.
func (w *Watcher) release(s *subject) {
	w.wg.Go(func() { w.folders.keep(s, nil) })
}

// start begins every look that is due, and tells when the next is.
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

// due tells when the subject is to be looked at next.
func (w *Watcher) due(s *subject) time.Time {
	switch {
	case s.renewed:
		return time.Time{}
	case s.signs != s.covered:
		return s.ended.Add(w.pause(s))
	case s.changing:
		return later(s.sign.Add(w.quiet), s.ended)
	case s.polled != "":
		return w.beat(s.ended, w.poll)
	default:
		return w.beat(s.ended, w.backstop)
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// pause is kept between two looks while signs come: short enough for a look
// after the last sign, but a large folder is not looked at all the time.
func (w *Watcher) pause(s *subject) time.Duration {
	return min(max(w.quiet/4, 4*s.took), w.quiet, time.Second)
}

// beat is the first common moment after t: all subjects are polled in one waking.
func (w *Watcher) beat(t time.Time, every time.Duration) time.Time {
	return w.began.Add((t.Sub(w.began)/every + 1) * every)
}

func (w *Watcher) begin(s *subject, now time.Time) {
	r := result{subject: s, began: now, signs: s.signs, renewed: s.renewed, paths: s.paths}
	refresh := s.last != nil && !s.changing // its turn: nothing else made us look
	s.looking, s.renewed = true, false
	w.wg.Go(func() {
		r.look = w.examine(s, r.paths, refresh)
		select {
		case w.looked <- r:
		case <-w.done:
		}
	})
}

// maxRounds bounds how often one look begins again because what it saw moved.
const maxRounds = 8

// examine looks at the paths and has all on their way watched, in this order
// and again: what is not watched when it is looked at may change unseen.
func (w *Watcher) examine(s *subject, paths []string, refresh bool) *look {
	if refresh {
		w.folders.refresh(s)
	}
	var l *look
	grew := false
	for range maxRounds {
		l = take(paths)
		again, why := w.folders.hold(s, l.needs)
		if why != nil && l.deaf == "" {
			l.deaf = why.Error()
		}
		grew = grew || again
		if !again && !l.uneasy {
			break
		}
	}
	w.folders.keep(s, l.needs)
	l.grew = grew
	return l
}

// end takes a look's result.
func (w *Watcher) end(r result) {
	s := r.subject
	s.looking = false
	if s.gone {
		w.release(s)
		return
	}
	now := time.Now()
	earlier, told := s.last, s.covered != s.signs // told: events explain what is different
	s.last, s.ended, s.took, s.covered = r.look, now, now.Sub(r.began), r.signs
	w.mode(s, r.look.deaf)
	if !s.renewed {
		for _, placed := range s.placed {
			close(placed)
		}
		s.placed = nil
	}
	if earlier == nil {
		return
	}
	paths, differ := r.look.differences(earlier, r.renewed)
	switch {
	case differ && !told:
		caught := s.signs == s.covered
		w.noticed(s, now, paths...)
		if caught {
			s.covered = s.signs // the look that found it has seen it
		}
	case differ:
		s.remember(paths)
		if r.look.grew {
			s.sign = now // what came under watch just now was perhaps written just before
		}
	case s.changing && !r.began.Before(s.sign.Add(w.quiet)):
		w.settle(s)
	}
}

// mode logs when a subject is polled from now on, or watched again.
func (w *Watcher) mode(s *subject, why string) {
	if why == s.polled && s.polled != "" {
		return
	}
	if why != "" {
		w.log.Warn("cannot be watched, is polled", "subject", s.name, "reason", why, "every", w.poll)
	} else if s.polled != "" {
		w.log.Info("is watched again", "subject", s.name)
	}
	s.polled = why
}

// hear takes signs that the system gave.
func (w *Watcher) hear(n news) {
	now := time.Now()
	if n.all {
		w.log.Warn("changes may have been missed, looking at everything", "reason", n.reason)
		for _, s := range w.subjects {
			w.noticed(s, now)
		}
		return
	}
	for _, s := range n.subjects {
		if !s.gone {
			w.noticed(s, now, n.path)
		}
	}
}

// noticed records a sign of a change.
func (w *Watcher) noticed(s *subject, now time.Time, paths ...string) {
	s.signs++
	s.sign = now
	first := !s.changing
	if first {
		s.changing, s.since, s.changed = true, now, nil
		if e, ok := w.outbox.unsettle(s.name); ok {
			s.since, s.changed, first = e.Since, e.Paths, false // the earlier change goes on, for all that anybody knows
		}
	}
	s.remember(paths)
	if first {
		w.outbox.put(s.event(Changing))
	}
}

func (w *Watcher) settle(s *subject) {
	s.changing = false
	w.outbox.put(s.event(Settled))
	s.changed = nil
}
