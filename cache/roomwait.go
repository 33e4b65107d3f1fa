package cache

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/refusal"
)

// Who finds no room waits until the collector has looked for some: in a round that begins after the request came, knows how much is
// waited for, and loses no time with what could be made smaller. When that round is over there is room, or nothing more may go, and then the
// request is told what stays and why. patience bounds how long the collector may work meanwhile: in processor time of its own, for on a
// machine with more to do than processors a clock on the wall tells of others. latestPatience bounds it by that clock:
// nobody waits for the collector for longer than 20 ms, the look that follows included.
const (
	roomPatience   = 12 * time.Millisecond
	latestPatience = 16 * time.Millisecond
	roomLook       = 2 * time.Millisecond // between two looks at how much it has worked
)

// rounds are those of the collector, and who waits for one. It is part of places, and guarded by its mu.
type rounds struct {
	waiting map[*roomWait]bool
	begun   uint64 // rounds that have begun
	futile  uint64 // the latest after which there was no room and nothing more might go
	left    string // what that one had to leave, with numbers

	spent time.Duration // what the collector had worked when freed was closed last
}

// roomWait is one wait for room.
type roomWait struct {
	s       *places
	bytes   int64
	written int64  // of these are on the disk already
	after   uint64 // the rounds that had begun before
	wait    cas.Wait

	impatient time.Duration // what had been worked when its patience was found to be at an end; 0: it is not; guarded by s.mu
}

// await begins to wait for so many bytes on disk.
func (s *places) await(bytes, written int64) *roomWait {
	wait := s.waits.Begin()
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &roomWait{s: s, bytes: bytes, written: written, after: s.begun, wait: wait}
	s.waiting[w] = true
	return w
}

// needs says for how many bytes it waits from now on.
func (w *roomWait) needs(bytes, written int64) {
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	w.bytes, w.written = bytes, written
}

// lacks gives the bytes on disk that have to go for a reservation which was refused, and how many of them need not for the floor: none where
// only its user has too much, for the collector sees to that by itself, and nobody else's builds have to go for it.
func (r *reservation) lacks(disk int64, why error) (bytes, written int64) {
	if errors.Is(why, errUserFull) {
		return 0, 0
	}
	return disk - r.disk, min(r.written, disk) - r.counted
}

// end ends it. freed: what it waited for has come about, or was found not to; else it has left.
func (w *roomWait) end(freed bool) {
	w.s.mu.Lock()
	delete(w.s.waiting, w)
	until := w.impatient
	if freed && until == 0 {
		until = w.s.spent
	}
	w.s.mu.Unlock()
	w.wait.End(w.wait.Wall(), w.wait.Worked(until))
}

// over tells whether there is no use in waiting any longer, and why.
func (w *roomWait) over() (is bool, why string) {
	w.s.endPatience(w.s.waits.Spent())
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	switch {
	case w.s.futile > w.after:
		return true, w.s.left
	case w.impatient != 0:
		return true, "the collector has worked on it for " + w.s.patience.String() + " and is not done"
	case w.wait.Wall() >= w.s.latest:
		return true, "there was none within " + w.s.latest.String()
	}
	return false, ""
}

// wait waits for room, and gives the error of the last try, which says why there is none. why is that of the first.
func (r *reservation) wait(ctx context.Context, disk, bytes int64, freed <-chan struct{}, why error) error {
	s := r.c.places
	w := s.await(r.lacks(disk, why))
	told := false
	defer func() { w.end(told) }()
	look := time.NewTicker(roomLook)
	defer look.Stop()
	for {
		select {
		case <-freed:
			told = true
		case <-look.C:
			told = false
		case <-ctx.Done():
			return ctx.Err()
		}
		over, why := w.over() // before the try: what becomes free after it is taken
		if !told && !over {
			s.want()
			continue
		}
		var final bool
		var err error
		if freed, final, err = r.try(ctx, disk, bytes); err == nil || final {
			return err
		}
		w.needs(r.lacks(disk, err))
		if e := (*refusal.Error)(nil); over && errors.As(err, &e) && !errors.Is(err, errUserFull) { // which says by itself what stays
			e.Text = strings.TrimSuffix(e.Text+"; "+why, "; ")
		}
		if over {
			return err
		}
	}
}

// begin begins a round of the collector. hurry: somebody waits for it.
func (s *places) begin() (round uint64, hurry bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun++
	return s.begun, len(s.waiting) > 0
}

// waitedFor gives the bytes on disk that are waited for, and how many of them are there already.
func (s *places) waitedFor() (bytes, written int64, any bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.waiting {
		bytes, written = bytes+w.bytes, written+w.written
	}
	return bytes, written, len(s.waiting) > 0
}

// hurry tells whether a request waits for room.
func (s *places) hurry() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waiting) > 0
}

// end ends a round. stuck: the store is above its bounds, and nothing more may go; left says what.
func (s *places) end(round uint64, stuck bool, at time.Time, left string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stuck = time.Time{}
	if stuck {
		s.stuck, s.futile, s.left = at.Add(stuckFor), round, left
	}
}

// tellFreed has those look again who wait for room.
func (s *places) tellFreed() {
	spent := s.waits.Spent()
	s.endPatience(spent)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spent = spent
	close(s.freed)
	s.freed = make(chan struct{})
}

// endPatience notes whose patience is at an end. The collector does so itself after each step: who waits may not get to it for a while.
func (s *places) endPatience(spent time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.waiting {
		if w.impatient == 0 && w.wait.Worked(spent) >= s.patience {
			w.impatient = spent
		}
	}
}
