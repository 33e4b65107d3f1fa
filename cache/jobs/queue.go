package jobs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/epcached/epcached/internal/memo"
)

// Rank is how much a job matters: the lower, the sooner it runs.
type Rank int

// The ranks.
const (
	RankWaited     Rank = iota // a request waits for it
	RankRequested              // a user wants it without waiting
	RankBackground             // no user asked: the daemon recompiles a build
)

// Queue decides which jobs run: the higher rank before the lower. Within a rank the users take
// turns: the next job is of the user with the fewest jobs running, and among these of the one for
// which a job last began or ended longest ago. Each user's jobs run in the order in which they
// came. A job of several users counts for the first of them. No job overtakes the next one, so that
// one that needs much memory gets it.
//
// Jobs that requests wait for take a slot each. Jobs without a waiting request use the slots that
// these leave, but never make a request wait for one; the daemon's own take none. Of several slots
// one user may have all but one. The last one is on loan if no other user needs it: it counts as
// free for others, so that one more job than slots may run for a while.
//
// The estimates of all running jobs together stay within the memory. A job that needs more runs
// alone. If jobs of lower ranks, or on loan to another user, block a request, the ones that began
// last are stopped and queued again.
type Queue struct {
	jobs   int
	memory int64 // bytes; 0: no bound
	now    func() time.Time

	mu           sync.Mutex
	waiting      []*Ticket // sorted; guarded by mu
	running      []*Ticket // in the order in which they began; guarded by mu
	lastActivity uint64    // that were given out for latest; guarded by mu
	// when a job of each user came first, began or ended; guarded by mu
	activityCount map[uint32]uint64
}

// Ticket is a job's place in a queue. Its exported fields are set before it enters one, and stay.
type Ticket struct {
	Number uint64        // of two of one user with the same rank the lower is the first
	Memory int64         // bytes that the job is thought to need
	Length time.Duration // that it is thought to take; 0: not known
	// stops what runs, and does not wait for that; it leaves the queue when it has ended
	Yield func()

	startedRunning chan struct{} // closed when it may run
	rank           Rank          // guarded by Queue.mu, as those below
	// that give it its rank; of a running one, the user that it counts for
	users   []uint32
	user    uint32    // the first of users; sort sets it, and round
	round   int       // how many jobs of that user run or come before
	since   time.Time // when it began to run
	running bool
	yielded bool // Yield was called
}

// ErrYielded says that a job was stopped for one that a request waits for.
var ErrYielded = errors.New("stopped because a request needs the processor")

// NewQueue makes a queue with so many slots for jobs that requests wait for, at least one, and so
// many bytes of memory for all that run together; 0 or less: no bound.
func NewQueue(jobs int, memory int64, now func() time.Time) *Queue {
	return &Queue{jobs: jobs, memory: memory, now: now}
}

// Enter puts a ticket of the users into the queue.
func (q *Queue) Enter(t *Ticket, rank Rank, users ...uint32) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t.startedRunning, t.rank, t.users = make(chan struct{}), rank, users
	q.waiting = append(q.waiting, t)
	q.startReady()
}

// Await blocks until the ticket may run. After an error it is not in the queue.
func (q *Queue) Await(ctx context.Context, t *Ticket) error {
	select {
	case <-t.startedRunning:
		return nil
	case <-ctx.Done():
		q.Leave(t)
		return ctx.Err()
	}
}

// AcquireSlot waits for a slot for work that is no job of Jobs, and that a request of the users
// waits for. leave gives the slot back.
func (q *Queue) AcquireSlot(ctx context.Context, users ...uint32) (leave func(), err error) {
	t := &Ticket{}
	q.Enter(t, RankWaited, users...)
	return func() { q.Leave(t) }, q.Await(ctx, t)
}

// Leave removes a ticket, running or waiting.
func (q *Queue) Leave(t *Ticket) {
	q.mu.Lock()
	defer q.mu.Unlock()
	is := func(one *Ticket) bool { return one == t }
	q.waiting = slices.DeleteFunc(q.waiting, is)
	q.running = slices.DeleteFunc(q.running, is)
	if t.running {
		q.noteActivity(t.users...)
	}
	q.startReady()
}

// SetRank changes a ticket's rank and users, and reports whether it runs. A running one can only
// rise, and counts for the same user.
func (q *Queue) SetRank(t *Ticket, to Rank, users ...uint32) (running bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case !t.running:
		t.rank, t.users = to, users
	case to >= t.rank:
		return true
	default:
		t.rank = to
		if len(t.users) == 0 {
			t.users = users[:min(1, len(users))]
		}
	}
	q.startReady()
	return t.running
}

// noteActivity records that a job of the users began or ended. The caller holds mu.
func (q *Queue) noteActivity(users ...uint32) {
	q.lastActivity++
	for _, u := range users {
		q.activityCount[u] = q.lastActivity
	}
}

// startReady starts the tickets that may run. The caller holds mu.
func (q *Queue) startReady() {
	q.sort()
	for len(q.waiting) > 0 && q.fitsMemory(q.waiting[0]) {
		t := q.waiting[0]
		q.waiting = slices.Delete(q.waiting, 0, 1)
		q.running = append(q.running, t)
		t.running, t.since = true, q.now()
		if len(t.users) > 0 {
			t.users = []uint32{t.user}
			q.noteActivity(t.user)
		}
		close(t.startedRunning)
	}
	if len(q.waiting) > 0 && q.waiting[0].rank == RankWaited {
		q.stopForMemory(q.waiting[0])
	}
}

// sort orders the waiting tickets, and forgets users without a ticket. The caller holds mu.
func (q *Queue) sort() {
	latest, ahead := make(map[uint32]uint64), make(map[uint32]int)
	for _, t := range slices.Concat(q.running, q.waiting) {
		for _, u := range t.users {
			at, known := q.activityCount[u]
			if !known && latest[u] == 0 {
				q.lastActivity++
				at = q.lastActivity
			}
			latest[u] = max(latest[u], at)
			if t.running {
				ahead[u]++
			}
		}
	}
	q.activityCount = latest
	slices.SortStableFunc(q.waiting, func(a, b *Ticket) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.Number, b.Number))
	})
	for _, t := range q.waiting {
		if len(t.users) == 0 {
			continue
		}
		t.user = slices.MinFunc(t.users, func(a, b uint32) int {
			return cmp.Or(cmp.Compare(ahead[a], ahead[b]), cmp.Compare(latest[a], latest[b]))
		})
		t.round = ahead[t.user]
		ahead[t.user]++
	}
	slices.SortStableFunc(q.waiting, func(a, b *Ticket) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.round, b.round),
			cmp.Compare(latest[a.user], latest[b.user]))
	})
}

// ticketsOnLoan returns the tickets of up to a rank that run beyond the shares of their users, and
// how many run of each user: all slots but one are a share. The caller holds mu.
func (q *Queue) ticketsOnLoan(rank Rank) (loans []*Ticket, held map[uint32]int) {
	held = make(map[uint32]int)
	for _, one := range q.running {
		if one.rank > rank || len(one.users) == 0 {
			continue
		}
		u := one.users[0]
		if held[u]++; held[u] > q.share() {
			loans = append(loans, one)
		}
	}
	return loans, held
}

func (q *Queue) share() int { return max(1, q.jobs-1) }

// stopForMemory stops jobs of lower ranks, and on loan to others, if that frees the memory which
// the ticket lacks. The caller holds mu.
func (q *Queue) stopForMemory(t *Ticket) {
	if !q.hasSlot(t) {
		return // it is not the memory that is missing
	}
	used, kept := t.Memory, 0
	loans, _ := q.ticketsOnLoan(RankWaited)
	loans = slices.DeleteFunc(loans, func(one *Ticket) bool {
		return one.yielded || one.users[0] == t.user
	})
	lower := loans
	for _, one := range q.running {
		switch {
		case one.yielded: // its memory will be free
			continue
		case one.rank > RankWaited:
			lower = append(lower, one)
		case !slices.Contains(loans, one):
			kept++
		}
		used += one.Memory
	}
	var stop []*Ticket
	for len(lower) > 0 && used > q.memory {
		last := lower[len(lower)-1]
		lower, stop, used = lower[:len(lower)-1], append(stop, last), used-last.Memory
	}
	if used > q.memory && kept > 0 {
		return // it has to wait for a job of another request anyway
	}
	for _, one := range stop {
		one.yielded = true
		one.Yield()
	}
}

// fitsMemory reports whether the ticket may run beside those that do. The caller holds mu.
func (q *Queue) fitsMemory(t *Ticket) bool {
	if len(q.running) == 0 {
		return true
	}
	used := t.Memory
	for _, one := range q.running {
		used += one.Memory
	}
	return (q.memory <= 0 || used <= q.memory) && q.hasSlot(t)
}

// hasSlot reports whether there is a slot for the ticket. The caller holds mu.
func (q *Queue) hasSlot(t *Ticket) bool {
	if t.rank == RankBackground {
		return true
	}
	taken := 0
	for _, one := range q.running {
		if one.rank <= t.rank {
			taken++
		}
	}
	if loans, held := q.ticketsOnLoan(t.rank); len(t.users) > 0 && held[t.user] < q.share() {
		taken -= len(loans)
	}
	return taken < q.jobs
}

// EstimateWait estimates how long it takes until the ticket runs, from the lengths of the jobs
// before it. It is too low if the length of some is unknown.
func (q *Queue) EstimateWait(t *Ticket) time.Duration {
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

// positions returns the queue positions of the waiting tickets.
func (q *Queue) positions() map[*Ticket]int {
	q.mu.Lock()
	defer q.mu.Unlock()
	places := make(map[*Ticket]int, len(q.waiting))
	for i, t := range q.waiting {
		places[t] = i
	}
	return places
}

// Costs remember what compiles took, to say how long the next one will take and how much memory it
// needs. There is one record for each list of execution providers and each power of two of the
// model's size, beside the index; it may be lost. Times are a moving average in which a new one
// counts for three tenths, so that it follows the machine but not a single outlier. Of memory the
// maximum counts, and decays by a tenth with each job that needs less.
//
// An unknown size is estimated from the nearest known one, at most four powers of two away.
type Costs struct {
	memos memo.Book
	log   *slog.Logger
}

// NewCosts returns the costs in the memos.
func NewCosts(memos memo.Book, log *slog.Logger) Costs { return Costs{memos, log} }

// Kind is a class of jobs with costs in common.
type Kind struct {
	EPs  []string // execution providers, in order
	Size int64    // bytes of the model
}

type cost struct {
	Seconds float64 // from when a job runs to when it has ended
	Memory  int64   // bytes, of the workers at their most
	Output  int64   // bytes of what was compiled, for each KiB of the model
	Count   int     // of jobs that these are from
}

// MinMemory is the least that the workers of an unknown job take, in bytes: the libraries alone do.
const MinMemory = 256 << 20

const (
	newTimeCounts    = 0.3
	memoryFades      = 0.1
	maxClassDistance = 4
	// copies of the model that the workers of a job hold of which nothing is known
	memoryPerModel = 4

	// Larger values are not measurements. Sums of values within these bounds do not overflow.
	longestJob = 365 * 24 * time.Hour
	largestJob = int64(1) << 50
)

func sizeClass(size int64) int { return bits.Len64(uint64(max(size, 1))) }

func costKey(k Kind, class int) string {
	return fmt.Sprintf("cost:%s:%d", strings.Join(k.EPs, ","), class)
}

func (cs *Costs) load(k Kind, class int) (cost, bool) {
	one, ok := memo.Recall[cost](cs.memos, costKey(k, class))
	ok = ok && one.Count > 0 && one.Seconds >= 0 && one.Seconds < longestJob.Seconds() &&
		one.Memory >= 0 && one.Memory < largestJob && one.Output >= 0 && one.Output < largestJob
	return one, ok
}

// nearest returns the cost of the nearest known size, in proportion.
func (cs *Costs) nearest(k Kind) (cost, bool) {
	class := sizeClass(k.Size)
	for away := range maxClassDistance + 1 {
		if one, ok := cs.load(k, class-away); ok { // smaller ones
			one.Seconds *= float64(int64(1) << away)
			one.Memory <<= away
			return one, true
		}
		// larger ones: with less memory than they need it may not do
		if one, ok := cs.load(k, class+away); ok {
			one.Seconds /= float64(int64(1) << away)
			return one, true
		}
	}
	return cost{}, false
}

// Estimate returns how much memory a job will need, and how long it will take; 0: unknown.
func (cs *Costs) Estimate(k Kind) (memory int64, length time.Duration) {
	memory = MinMemory + memoryPerModel*min(k.Size, largestJob) // a sparse file may have any size
	one, ok := cs.nearest(k)
	if !ok {
		return memory, 0
	}
	if one.Memory > 0 {
		memory = one.Memory
	}
	return memory, time.Duration(one.Seconds * float64(time.Second))
}

func (cs *Costs) Output(k Kind) int64 {
	one, ok := cs.nearest(k)
	if !ok || one.Output == 0 {
		return k.Size
	}
	return min(one.Output, largestJob/max(k.Size>>10, 1)) * max(k.Size>>10, 1)
}

// Learn records what a job took. memory is 0 if it was not measured. The time of a job at the
// lowest priority depends on how busy the machine was, so it counts only if there is no other.
func (cs *Costs) Learn(k Kind, took time.Duration, memory, output int64, idle bool) {
	class := sizeClass(k.Size)
	one, known := cs.load(k, class)
	switch {
	case !known:
		one.Seconds = took.Seconds()
	case !idle:
		one.Seconds += newTimeCounts * (took.Seconds() - one.Seconds)
	}
	one.Memory = max(memory, one.Memory-int64(memoryFades*float64(one.Memory)))
	if output > 0 {
		one.Output = max(1, output/max(k.Size>>10, 1))
	}
	one.Count++
	if err := memo.Save(cs.memos, costKey(k, class), one); err != nil {
		cs.log.Warn("cannot record the cost of a "+
			"compile", "error", err) // the next one says the same
	}
}
