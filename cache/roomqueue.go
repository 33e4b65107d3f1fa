package cache

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epcached/epcached/forms"
	"github.com/epcached/epcached/refusal"
)

// roomQueue are the results that were answered before there was room to keep them: first come, first kept. It is part of places, and
// guarded by its mu. Who comes later and may be queued as well does not get in before them.
type roomQueue struct {
	queued map[*queued]bool
	opened map[*queued]bool // those of which the descriptors count: these, and what has found room and waits for its turn to be read

	first chan struct{} // the token of who looks for room; the others wait for it in the order in which they came
	lasts time.Duration // queuedFor
}

// queued is one of them.
type queued struct {
	c       *Cache
	owner   uint32
	disk    int64 // that it takes
	written int64 // of these are on the disk already
	files   int   // descriptors
	since   time.Time
	why     error // there was no room at once
}

// Bounds of what waits to be kept: in number, in descriptors, and in bytes, so many times the budget. One user has at most a part of each, or
// one put: files may have holes, and others are to find a place in the queue. One user's puts are claims as well, of which each has so many
// (ClaimOptions.Open).
const (
	maxQueued        = 256
	maxQueuedFiles   = 512
	maxQueuedBudgets = 2
	queuedUserPart   = 4

	// queuedFor is how long a result waits for room, and queuedWaited how long where nothing more may go and a request waits for it, which
	// could as well compile.
	queuedFor    = 30 * time.Second
	queuedWaited = 2 * time.Second

	// seldomLook is the longest time between two looks whether there is room, where nobody says so: leases end without a word.
	seldomLook = 250 * time.Millisecond
	leastPart  = 8 // of the time to the next look: so much passes in any case
)

// errNeverFits is ErrNoRoom of what would not fit if all else went.
var errNeverFits = fmt.Errorf("%w for it ever", forms.ErrNoRoom)

// errUserFull is ErrNoRoom of what only its own user's quota has no room for: others do not wait for that, nor do their builds go for it.
var errUserFull = fmt.Errorf("%w for more of its user's", forms.ErrNoRoom)

// errBehind is ErrNoRoom of what would overtake the queue.
var errBehind = fmt.Errorf("%w before what is queued has some", forms.ErrNoRoom)

// fitsLater tells whether an error says that there is no room now, and may be later.
func fitsLater(err error) bool {
	return errors.Is(err, forms.ErrNoRoom) && !errors.Is(err, errNeverFits) && !errors.Is(err, errUserFull)
}

// queue has a result wait for room, unless too much does already. why is that there was none at once.
func (c *Cache) queue(owner uint32, disk, written int64, files int, why error) (q *queued, ok bool) {
	b, err := c.bounds()
	if err != nil || c.ctx.Err() != nil {
		return nil, false
	}
	s := c.places
	s.mu.Lock()
	defer s.mu.Unlock()
	q = &queued{c: c, owner: owner, disk: disk, written: written, files: files, since: time.Now(), why: why}
	all, own := queuedSum{1, files, disk}, queuedSum{1, files, disk}
	for other := range s.opened {
		all.add(other)
		if other.owner == owner {
			own.add(other)
		}
	}
	if !all.within(1, b.budget) || own.number > 1 && !own.within(queuedUserPart, b.budget) {
		return nil, false
	}
	s.queued[q], s.opened[q] = true, true
	return q, true
}

// queuedSum is what several of them are together.
type queuedSum struct {
	number, files int
	disk          int64
}

func (sum *queuedSum) add(q *queued) {
	sum.number++
	sum.files += q.files
	sum.disk += q.disk
}

// within tells whether it is within a part of the bounds.
func (sum *queuedSum) within(part int, budget int64) bool {
	return sum.number <= maxQueued/part && sum.files <= maxQueuedFiles/part && (budget == 0 || sum.disk <= maxQueuedBudgets*budget/int64(part))
}

// hasRoom takes it out of the queue, and its descriptors count until it leaves. It may be called more than once.
func (q *queued) hasRoom() {
	s := q.c.places
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.queued, q)
}

// leave is the end of it in the queue: it is being read, or is given up. It may be called more than once.
func (q *queued) leave() {
	s := q.c.places
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.queued, q)
	delete(s.opened, q)
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

// longestQueued is since when the first of those waits that wait now; zero: none does.
func (s *places) longestQueued() (since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for q := range s.queued {
		if since.IsZero() || q.since.Before(since) {
			since = q.since
		}
	}
	return since
}

// await waits for its turn, and then for room, which reserve sets aside, until over is closed. waitedFor tells whether a request waits for the result.
func (q *queued) await(ctx context.Context, over <-chan struct{}, waitedFor func() bool, reserve func() (*reservation, error)) (*reservation, error) {
	s := q.c.places
	limit := time.NewTimer(time.Until(q.since.Add(s.lasts)))
	defer limit.Stop()
	late := func() error {
		return refusal.New(refusal.NoSpace, nil, "there was no room within %s: %v", s.lasts, q.why)
	}
	look := time.NewTicker(seldomLook)
	defer look.Stop()
	var stuckSince time.Time
	for turn := false; !turn; {
		select {
		case s.first <- struct{}{}:
			defer func() { <-s.first }()
			turn = true
		case <-look.C:
			switch _, stuck := s.freedNow(); {
			case !stuck:
				stuckSince = time.Time{}
			case stuckSince.IsZero():
				stuckSince = time.Now()
			case time.Since(stuckSince) > queuedWaited && waitedFor():
				return nil, refusal.New(refusal.NoSpace, nil, "nothing more may go: %v", q.why)
			}
		case <-limit.C:
			return nil, late()
		case <-over:
			return nil, errOver
		case <-ctx.Done():
			return nil, ctx.Err()
		}
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
			return nil, refusal.New(refusal.NoSpace, nil, "nothing more may go: %v", err)
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
