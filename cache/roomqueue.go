package cache

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epcached/epcached/forms"
)

// roomQueue are the results that were answered before there was room to keep them: first come, first kept. It is part of places, and
// guarded by its mu. Who comes later and may be queued as well does not get in before them.
type roomQueue struct {
	queued map[*queued]bool
	files  int // descriptors that they have open

	first chan struct{} // the token of who looks for room; the others wait for it in the order in which they came
	lasts time.Duration // queuedFor
}

// queued is one of them.
type queued struct {
	c     *Cache
	disk  int64 // that it takes
	files int   // descriptors
	since time.Time
	why   error // there was no room at once
}

// Bounds of what waits to be kept: in number, in descriptors, and in bytes, so many times the budget. One user's puts are claims as well, of which each
// has so many (ClaimOptions.Open).
const (
	maxQueued        = 256
	maxQueuedFiles   = 512
	maxQueuedBudgets = 2

	// queuedFor is how long a result waits for room, and queuedWaited how long when it is its turn, where nothing more may go and a request
	// waits for it, which could as well compile.
	queuedFor    = 30 * time.Second
	queuedWaited = 2 * time.Second

	// seldomLook is the longest time between two looks whether there is room, where nobody says so: leases end without a word.
	seldomLook = 250 * time.Millisecond
	leastPart  = 8 // of the time to the next look: so much passes in any case
)

// errNeverFits is ErrNoRoom of what would not fit if all else went.
var errNeverFits = fmt.Errorf("%w for it ever", forms.ErrNoRoom)

// fitsLater tells whether an error says that there is no room now, and may be later.
func fitsLater(err error) bool {
	return errors.Is(err, forms.ErrNoRoom) && !errors.Is(err, errNeverFits)
}

// queue has a result wait for room, unless too much does already. why is that there was none at once.
func (c *Cache) queue(disk int64, files int, why error) (q *queued, ok bool) {
	b, err := c.bounds()
	if err != nil || c.ctx.Err() != nil {
		return nil, false
	}
	s := c.places
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queued) >= maxQueued || s.files+files > maxQueuedFiles || b.budget > 0 && s.queuedBytes()+disk > maxQueuedBudgets*b.budget {
		return nil, false
	}
	q = &queued{c: c, disk: disk, files: files, since: time.Now(), why: why}
	s.queued[q] = true
	s.files += files
	return q, true
}

// leave takes it out of the queue: it has room, or is given up. It may be called more than once.
func (q *queued) leave() {
	s := q.c.places
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.queued[q] {
		delete(s.queued, q)
		s.files -= q.files
	}
}

// queuedBytes is what they take together. mu is held.
func (s *places) queuedBytes() (sum int64) {
	for q := range s.queued {
		sum += q.disk
	}
	return sum
}

// anyQueued tells how many wait, and for how many bytes on disk.
func (s *places) anyQueued() (n int, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.queued), s.queuedBytes()
}

// await waits for its turn, and then for room, which reserve sets aside, until over is closed. waitedFor tells whether a request waits for the result.
func (q *queued) await(ctx context.Context, over <-chan struct{}, waitedFor func() bool, reserve func() (*reservation, error)) (*reservation, error) {
	s := q.c.places
	limit := time.NewTimer(time.Until(q.since.Add(s.lasts)))
	defer limit.Stop()
	late := func() error {
		return fail(NoSpace, nil, "there was no room within %s: %v", s.lasts, q.why)
	}
	select {
	case s.first <- struct{}{}:
		defer func() { <-s.first }()
	case <-limit.C:
		return nil, late()
	case <-over:
		return nil, errOver
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	began := time.Now() // what it waited for its turn says nothing of how much there may be for it
	for pause := roomLook; ; pause = min(2*pause, seldomLook) {
		freed, stuck := s.freedNow()
		room, err := reserve()
		if err == nil || !fitsLater(err) {
			return room, err
		}
		q.why = err
		if stuck && time.Since(began) > queuedWaited && waitedFor() {
			return nil, fail(NoSpace, nil, "nothing more may go: %v", err)
		}
		// Each try has the collector look, and each look of the collector closes freed, whether it has found something or not: so there is
		// some time between two in any case, and more of it the longer there is nothing.
		least := time.After(pause / leastPart)
		most := time.After(pause)
		if stuck {
			least, freed = nil, nil
		}
		for waits := true; waits; {
			var told <-chan struct{}
			if least == nil {
				told = freed
			}
			select {
			case <-least:
				least = nil
			case <-told:
				waits = false
			case <-most:
				waits = false
			case <-limit.C:
				return nil, late()
			case <-over:
				return nil, errOver
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
}

// errOver says that what was queued is not wanted any more.
var errOver = errors.New("it is not wanted any more")

// freedNow gives what closes when there may be more room, and tells whether nothing more may go now.
func (s *places) freedNow() (freed <-chan struct{}, stuck bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.freed, !s.stuck.IsZero()
}
