package cache

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// rank is how much a job matters: the lower, the sooner it runs.
type rank int

const (
	waitedFor rank = iota // a request waits for it
	askedFor              // a user wants it, and goes on without it
	ownWish               // nobody asked: the daemon compiles it anew
)

// queue decides which jobs run: the higher rank before the lower, within one the first come first. None overtakes
// another, or a job that needs much memory would never get it.
//
// Jobs that requests wait for take a slot each; those that users go on without take what these leave, but no request
// waits for such a slot; what the daemon itself wants takes none, for where it comes from bounds it. All that run
// together stay within the memory, as far as it can be told beforehand. A job that needs more than there is at all
// runs alone. Where those of lower ranks are in the way of a request, the ones that began last are stopped and queue again.
type queue struct {
	jobs   int
	memory int64 // bytes; 0: no bound
	now    func() time.Time

	mu      sync.Mutex
	waiting []*turn // sorted; guarded by mu
	running []*turn // guarded by mu
}

// turn is a job's place in the queue. Its fields are guarded by queue.mu, but for begun.
type turn struct {
	rank    rank
	number  uint64        // of two with the same rank the lower is the first
	memory  int64         // bytes that it is thought to need
	length  time.Duration // that it is thought to take; 0: not known
	begun   chan struct{} // closed when it may run
	since   time.Time     // when that was
	running bool
	yield   func() // stops what runs; it leaves the queue when it has ended
	yielded bool   // it was called
}

// errYielded says that a job was stopped for the sake of one that somebody waits for.
var errYielded = errors.New("stopped for a request")

// enter puts a turn into the queue.
func (q *queue) enter(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t.begun = make(chan struct{})
	q.waiting = append(q.waiting, t)
	q.admit()
}

// await waits until the turn may run. On an error it is out of the queue.
func (q *queue) await(ctx context.Context, t *turn) error {
	select {
	case <-t.begun:
		return nil
	case <-ctx.Done():
		q.leave(t)
		return ctx.Err()
	}
}

// leave takes a turn out, whether it runs or waits.
func (q *queue) leave(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	is := func(one *turn) bool { return one == t }
	q.waiting = slices.DeleteFunc(q.waiting, is)
	q.running = slices.DeleteFunc(q.running, is)
	q.admit()
}

// move gives a turn another rank. One that runs can rise only. It tells whether the turn runs.
func (q *queue) move(t *turn, to rank) (running bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if to != t.rank && (!t.running || to < t.rank) {
		t.rank = to
		q.admit()
	}
	return t.running
}

// admit lets those run who may. The caller holds mu.
func (q *queue) admit() {
	slices.SortFunc(q.waiting, func(a, b *turn) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.number, b.number)) })
	for len(q.waiting) > 0 && q.fits(q.waiting[0]) {
		t := q.waiting[0]
		q.waiting = slices.Delete(q.waiting, 0, 1)
		q.running = append(q.running, t)
		t.running, t.since = true, q.now()
		close(t.begun)
	}
	if len(q.waiting) > 0 && q.waiting[0].rank == waitedFor {
		q.makeRoom(q.waiting[0])
	}
}

// makeRoom stops those of lower ranks that have the memory which the turn lacks, if that would do. The caller holds mu.
func (q *queue) makeRoom(t *turn) {
	used, kept, slots := t.memory, 0, 0
	var lower []*turn
	for _, one := range q.running {
		switch {
		case one.rank == waitedFor:
			used += one.memory
			slots++
			kept++
		case one.yielded: // its memory is as good as free
		default:
			used += one.memory
			lower = append(lower, one)
		}
	}
	if slots >= q.jobs {
		return // it is not the memory that is missing
	}
	var stop []*turn
	for len(lower) > 0 && used > q.memory {
		last := lower[len(lower)-1]
		lower, stop, used = lower[:len(lower)-1], append(stop, last), used-last.memory
	}
	if used > q.memory && kept > 0 {
		return // it has to wait for one that somebody waits for anyway
	}
	for _, one := range stop {
		one.yielded = true
		one.yield()
	}
}

// fits tells whether the turn may run beside those that do. The caller holds mu.
func (q *queue) fits(t *turn) bool {
	if len(q.running) == 0 {
		return true
	}
	used := t.memory
	var taken [ownWish + 1]int // slots, by rank
	for _, one := range q.running {
		used += one.memory
		taken[one.rank]++
	}
	if q.memory > 0 && used > q.memory {
		return false
	}
	switch t.rank {
	case waitedFor:
		return taken[waitedFor] < q.jobs
	case askedFor:
		return taken[waitedFor]+taken[askedFor] < q.jobs
	}
	return true
}

// wait is how long it may take until the turn runs, from what is known of those before it: too little where nothing is
// known of some.
func (q *queue) wait(t *turn) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.running {
		return 0
	}
	now := q.now()
	var before time.Duration
	for _, one := range q.running {
		if one.rank <= t.rank {
			before += max(0, one.length-now.Sub(one.since))
		}
	}
	for _, one := range q.waiting {
		if one == t {
			break
		}
		before += one.length
	}
	return before / time.Duration(q.jobs)
}

// position says where the turn stands in the order in which jobs run: those that run come first.
func (q *queue) position(t *turn) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if i := slices.Index(q.waiting, t); i >= 0 {
		return i + 1
	}
	return 0
}
