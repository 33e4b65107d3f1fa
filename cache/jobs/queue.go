package jobs

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// Rank is how much a job matters: the lower, the sooner it runs.
type Rank int

// The ranks.
const (
	WaitedFor Rank = iota // a request waits for it
	AskedFor              // a user wants it, and goes on without it
	OwnWish               // nobody asked: the daemon compiles it anew
)

// Queue decides which jobs run: the higher rank before the lower, within one the first come first. None overtakes
// another, or a job that needs much memory would never get it.
//
// Jobs that requests wait for take a slot each; those that users go on without take what these leave, but no request
// waits for such a slot; what the daemon itself wants takes none, for where it comes from bounds it. All that run
// together stay within the memory, as far as it can be told beforehand. A job that needs more than there is at all
// runs alone. Where those of lower ranks are in the way of a request, the ones that began last are stopped and queue again.
type Queue struct {
	jobs   int
	memory int64 // bytes; 0: no bound
	now    func() time.Time

	mu      sync.Mutex
	waiting []*Turn // sorted; guarded by mu
	running []*Turn // guarded by mu
}

// Turn is a job's place in a jobs. Its exported fields are set before it enters one, and stay.
type Turn struct {
	Number uint64        // of two with the same rank the lower is the first
	Memory int64         // bytes that the job is thought to need
	Length time.Duration // that it is thought to take; 0: not known
	Yield  func()        // stops what runs, and does not wait for that; it leaves the queue when it has ended

	begun   chan struct{} // closed when it may run
	rank    Rank          // guarded by Queue.mu, as those below
	since   time.Time     // when it began to run
	running bool
	yielded bool // Yield was called
}

// ErrYielded says that a job was stopped for the sake of one that somebody waits for.
var ErrYielded = errors.New("stopped for a request")

// NewQueue makes a queue with so many slots for jobs that requests wait for, at least one, and so many bytes of memory for all that run together; 0
// or less: no bound.
func NewQueue(jobs int, memory int64, now func() time.Time) *Queue {
	return &Queue{jobs: jobs, memory: memory, now: now}
}

// Enter puts a turn into the jobs.
func (q *Queue) Enter(t *Turn, rank Rank) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t.begun, t.rank = make(chan struct{}), rank
	q.waiting = append(q.waiting, t)
	q.admit()
}

// Await waits until the turn may run. On an error it is out of the jobs.
func (q *Queue) Await(ctx context.Context, t *Turn) error {
	select {
	case <-t.begun:
		return nil
	case <-ctx.Done():
		q.Leave(t)
		return ctx.Err()
	}
}

// Leave takes a turn out, whether it runs or waits.
func (q *Queue) Leave(t *Turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	is := func(one *Turn) bool { return one == t }
	q.waiting = slices.DeleteFunc(q.waiting, is)
	q.running = slices.DeleteFunc(q.running, is)
	q.admit()
}

// Move gives a turn another rank. One that runs can rise only. It tells whether the turn runs.
func (q *Queue) Move(t *Turn, to Rank) (running bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if to != t.rank && (!t.running || to < t.rank) {
		t.rank = to
		q.admit()
	}
	return t.running
}

// admit lets those run who may. The caller holds mu.
func (q *Queue) admit() {
	slices.SortFunc(q.waiting, func(a, b *Turn) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.Number, b.Number)) })
	for len(q.waiting) > 0 && q.fits(q.waiting[0]) {
		t := q.waiting[0]
		q.waiting = slices.Delete(q.waiting, 0, 1)
		q.running = append(q.running, t)
		t.running, t.since = true, q.now()
		close(t.begun)
	}
	if len(q.waiting) > 0 && q.waiting[0].rank == WaitedFor {
		q.makeRoom(q.waiting[0])
	}
}

// makeRoom stops those of lower ranks that have the memory which the turn lacks, if that would do. The caller holds mu.
func (q *Queue) makeRoom(t *Turn) {
	used, kept, slots := t.Memory, 0, 0
	var lower []*Turn
	for _, one := range q.running {
		switch {
		case one.rank == WaitedFor:
			used += one.Memory
			slots++
			kept++
		case one.yielded: // its memory is as good as free
		default:
			used += one.Memory
			lower = append(lower, one)
		}
	}
	if slots >= q.jobs {
		return // it is not the memory that is missing
	}
	var stop []*Turn
	for len(lower) > 0 && used > q.memory {
		last := lower[len(lower)-1]
		lower, stop, used = lower[:len(lower)-1], append(stop, last), used-last.Memory
	}
	if used > q.memory && kept > 0 {
		return // it has to wait for one that somebody waits for anyway
	}
	for _, one := range stop {
		one.yielded = true
		one.Yield()
	}
}

// fits tells whether the turn may run beside those that do. The caller holds mu.
func (q *Queue) fits(t *Turn) bool {
	if len(q.running) == 0 {
		return true
	}
	used := t.Memory
	var taken [OwnWish + 1]int // slots, by rank
	for _, one := range q.running {
		used += one.Memory
		taken[one.rank]++
	}
	if q.memory > 0 && used > q.memory {
		return false
	}
	switch t.rank {
	case WaitedFor:
		return taken[WaitedFor] < q.jobs
	case AskedFor:
		return taken[WaitedFor]+taken[AskedFor] < q.jobs
	}
	return true
}

// Wait is how long it may take until the turn runs, from what is known of those before it: too little where nothing is
// known of some.
func (q *Queue) Wait(t *Turn) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.running {
		return 0
	}
	now := q.now()
	var before time.Duration
	for _, one := range q.running {
		if one.rank <= t.rank {
			before += max(0, one.Length-now.Sub(one.since))
		}
	}
	for _, one := range q.waiting {
		if one == t {
			break
		}
		before += one.Length
	}
	return before / time.Duration(q.jobs)
}

// Waiting is how many turns may not run yet.
func (q *Queue) Waiting() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}
