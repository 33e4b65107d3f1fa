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

// Rank is the priority of a job. A lower one runs sooner.
type Rank int

const (
	RankWaited     Rank = iota // a request waits for it
	RankRequested              // a user requested it without waiting
	RankBackground             // the daemon itself recompiles a build
)

// Queue decides which jobs run: the higher rank before the lower. Within a rank the scheduling is
// fair between users: the next job belongs to the user with the fewest running jobs, and among
// these to the user whose last start or end of a job is longest ago. The jobs of one user run in
// the order of arrival. A job of several users counts for the first of them. No job overtakes the
// next one, because otherwise a job that needs much memory might never run.
//
// Each job with a waiting request takes a slot. Jobs without a waiting request use free slots, but
// never make a request wait for one; the daemon's own jobs take none. One user may have all slots
// but one. If no other user needs the last slot, it is lent to the user as well, and still counts
// as free for others, so that one more job than slots may run for a while.
//
// The estimates of all running jobs together stay within the memory. A job that needs more runs
// alone. If jobs of lower ranks, or in a lent slot, block a request, the ones that began last are
// stopped and queued again.
type Queue struct {
	jobs   int
	memory int64 // bytes; 0: no bound
	now    func() time.Time

	mu           sync.Mutex
	waiting      []*Ticket // in the order in which they will run; guarded by mu
	running      []*Ticket // in the order in which they began; guarded by mu
	lastActivity uint64    // counter of beginnings and ends of jobs; guarded by mu
	// activityCount has the value of lastActivity when a job of the user last began or ended;
	// guarded by mu.
	activityCount map[uint32]uint64
}

// Ticket is a job's place in a queue. Its exported fields are set before Enter and do not change.
type Ticket struct {
	Number uint64        // order of arrival: within user and rank the lower one runs first
	Memory int64         // estimated need of the job in bytes
	Length time.Duration // estimated time of the job; 0: not known
	// Yield tells the running job to stop, and does not block. The job leaves the queue when it has
	// ended.
	Yield func()

	startedRunning chan struct{} // closed when the job may run
	rank           Rank          // guarded by Queue.mu, like the fields below
	// The rank is from requests of users. A running job counts for user, which sort chooses from
	// them.
	users   []uint32
	user    uint32
	round   int       // number of running and earlier queued jobs of user
	since   time.Time // when it began to run
	running bool
	yielded bool // Yield was called
}

// ErrYielded is the error of a job that was stopped because a request needs its slot or memory.
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

// AcquireSlot waits for a slot for work outside of a Job that a request of the users waits for.
// leave returns the slot.
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
		t.running = false // it may leave twice
	}
	q.startReady()
}

// SetRank changes a ticket's rank and users, and reports whether it runs. The rank of a running
// ticket can only rise, and its user stays.
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

// noteActivity records, for fair scheduling, that a job of the users began or ended. The caller
// holds mu.
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

// sort orders the waiting tickets, and drops the counters of users without a ticket. The caller
// holds mu.
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

// ticketsOnLoan returns the running tickets, of ranks up to rank, in lent slots, and how many
// tickets of each user run. A user's own share is all slots but one. The caller holds mu.
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

// stopForMemory stops jobs of lower ranks, and those in slots lent to other users, if that frees
// the memory that the ticket needs. The caller holds mu.
func (q *Queue) stopForMemory(t *Ticket) {
	if !q.hasSlot(t) {
		return // it lacks a slot, not memory
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
		return // stopping jobs would not free enough
	}
	for _, one := range stop {
		one.yielded = true
		one.Yield()
	}
}

// fitsMemory reports whether the ticket fits into the memory beside the running ones. The caller
// holds mu.
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

// EstimateWait estimates how long the ticket has to wait, from the lengths of the jobs before it.
// Jobs of unknown length count as 0.
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

// Costs record the time and memory of compiles, to estimate those of the next one. There is one
// record for each list of execution providers and each power of two of the model's size. The
// records are stored beside the index and may be lost. The time is a moving average in which the
// newest job has the weight 0.3, so that one outlier changes little. The memory is a maximum that
// decays by a tenth with each job that needs less.
//
// An unknown size is estimated from the nearest known one, at most four powers of two away.
type Costs struct {
	memos memo.Book
	log   *slog.Logger
}

// NewCosts returns the costs that are stored in the memos.
func NewCosts(memos memo.Book, log *slog.Logger) Costs { return Costs{memos, log} }

// Kind identifies jobs with similar costs.
type Kind struct {
	EPs  []string // execution providers, in order
	Size int64    // bytes of the model
}

type cost struct {
	Seconds float64 // from the start of the job to its end
	Memory  int64   // peak of the workers in bytes
	Output  int64   // bytes of output per KiB of the model
	Count   int     // number of jobs measured
}

// MinMemory is the least memory, in bytes, that an unknown job is expected to take, because the
// libraries alone need that much.
const MinMemory = 256 << 20

const (
	newTimeCounts    = 0.3
	memoryFades      = 0.1
	maxClassDistance = 4
	// assumed copies of the model in memory if the kind is unknown
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

// nearest returns the cost of the nearest known size, scaled to this one.
func (cs *Costs) nearest(k Kind) (cost, bool) {
	class := sizeClass(k.Size)
	for away := range maxClassDistance + 1 {
		if one, ok := cs.load(k, class-away); ok { // smaller ones
			one.Seconds *= float64(int64(1) << away)
			one.Memory <<= away
			return one, true
		}
		// Larger sizes: only the time is scaled down, because memory does not shrink in proportion.
		if one, ok := cs.load(k, class+away); ok {
			one.Seconds /= float64(int64(1) << away)
			return one, true
		}
	}
	return cost{}, false
}

// Estimate returns how much memory a job will need, and how long it will take; 0: unknown.
func (cs *Costs) Estimate(k Kind) (memory int64, length time.Duration) {
	// bounded, because a sparse file may have any size
	memory = MinMemory + memoryPerModel*min(k.Size, largestJob)
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

// Learn records what a job took. memory is 0 if it was not measured. The time of an idle job
// depends on how busy the machine was, so it is recorded only if there is no other.
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
			"compile", "error", err) // the next job of this kind measures again
	}
}
