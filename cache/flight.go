package cache

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"sync"
	"time"

	"github.com/epcached/epcached/cache/queue"
	"github.com/epcached/epcached/cache/runtimes"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
)

// flights are the jobs under way: one for each build key and scope, however many wait for it. They live as long as
// somebody waits for them, or asked to have them finished.
type flights struct {
	queue *queue.Queue
	costs queue.Costs
	now   func() time.Time
	store *store.Store // is told who has yet to take what was stored; may be nil

	mu     sync.Mutex            // taken before flight.mu, and that before the queue's
	number uint64                // of the latest; guarded by mu
	open   map[flightKey]*flight // that can be joined; guarded by mu
	all    map[string]*flight    // by id: also those that are cancelled and have not ended yet; guarded by mu
	past   []*flight             // that ended lately, oldest first; guarded by mu
	closed bool                  // guarded by mu
	work   sync.WaitGroup

	began, ended func() // called as each flight begins, with mu held, and after it; may be nil
}

type flightKey struct {
	build index.BuildKey
	scope string
	alone string // not empty: shared with nobody
}

// runner does a flight's work.
type runner interface {
	// facts tell what the job is; what becomes of it is the flight's to tell.
	facts() jobFacts

	// run brings the result. What compiles in a process of the daemon's asks f.begin first whether it may.
	run(ctx context.Context, f *flight) (*compiled, error)
}

// flight is one job and those who wait for it.
type flight struct {
	flights *flights
	id      string
	about   jobFacts
	number  uint64
	queued  time.Time
	done    chan struct{} // closed when result and err are there: that lets everybody go at once
	cancel  context.CancelFunc
	result  *compiled
	err     error

	mu       sync.Mutex // guards the rest
	state    string
	phase    string
	waiters  map[*waiter]struct{} // each is told the phases
	kept     map[uint32]uint32    // users who want it finished without waiting -> whose uid that is
	askers   map[uint32]string    // users who asked, and so may hear of it, with what they call the model
	heirs    map[heir]int         // how many files are held open for whom it is begun again here, if it brings nothing that they may have
	held     *claim               // that an application has; nil: none
	turn     *queue.Turn          // nil: it has no place in the queue
	urgent   chan struct{}        // closed as soon as a request waits
	started  time.Time            // zero: not yet
	ended    time.Time
	stopped  bool                 // cancelled
	followed map[*waiter]struct{} // those who only look on
}

// waiter is one request's part in a flight.
type waiter struct {
	asking
	giveUp  context.CancelFunc // ends the wait; nil for who only looks on
	counted bool               // the build is kept from the collector until it has it; guarded by flight.mu
}

// maxAskers bounds the users who are remembered with a job.
const maxAskers = 1024

// asking is how a request takes part in a flight.
type asking struct {
	uid, owner uint32
	name       string // of the model
	idle       bool   // the daemon's own: no request waits
	keep       bool   // to be finished even if nobody waits
	goOn       bool   // likewise, and it is none of the jobs of which a user may have so many
	since      time.Time
	tell       func(Progress)
}

// join enters the flight for the key, starting it with what prepare gives if there is none, and waits for its result.
// When the last one leaves it is cancelled, unless it is to be kept. first says whether this call began it.
func (fs *flights) join(ctx context.Context, key flightKey, who asking, prepare func() (runner, error)) (result *compiled, first bool, err error) {
	waiting, giveUp := context.WithCancel(ctx)
	defer giveUp()
	w := &waiter{asking: who, giveUp: giveUp}
	f, first, err := fs.find(key, who, w, prepare)
	if err != nil {
		return nil, first, err
	}
	if !f.wait(waiting, w) {
		f.giveUp(w)
		return nil, first, cmp.Or(ctx.Err(), runtimes.ErrGivenUp)
	}
	f.leave(w)
	return f.result, first, f.err
}

// wait waits for the flight's end, and tells whether it came before that of the context.
func (f *flight) wait(ctx context.Context, w *waiter) bool {
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		select {
		case <-f.done:
			return true
		case <-ctx.Done():
			return false
		case <-tick.C:
			f.tellOne(w)
		}
	}
}

// progressEvery is how often those who wait hear how many they are, though nothing else is new.
const progressEvery = time.Second

// send has the flight for the key finished, starting it if there is none, without waiting.
func (fs *flights) send(key flightKey, who asking, prepare func() (runner, error)) (f *flight, first bool, err error) {
	who.keep = true
	return fs.find(key, who, nil, prepare)
}

// find gives the flight for the key, after noting who asks, and the waiter unless that is nil: the work is to see from its
// beginning how urgent it is.
func (fs *flights) find(key flightKey, who asking, w *waiter, prepare func() (runner, error)) (f *flight, first bool, err error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	f = fs.open[key]
	if err := fs.mayKeep(f, &who); err != nil {
		return nil, false, err
	}
	if f != nil {
		f.enter(&who, w)
		return f, false, nil
	}
	if fs.closed {
		return nil, true, context.Canceled
	}
	work, err := prepare()
	if err != nil {
		return nil, true, err
	}
	f = fs.add(key, work)
	f.enter(&who, w)
	fs.start(key, f, work)
	return f, true, nil
}

// add makes a flight. The caller holds fs.mu.
func (fs *flights) add(key flightKey, work runner) *flight {
	if fs.open == nil {
		fs.open, fs.all = make(map[flightKey]*flight), make(map[string]*flight)
	}
	fs.number++
	about := work.facts()
	f := &flight{flights: fs, id: cmp.Or(about.ID, newID()), about: about, number: fs.number, queued: fs.now(), done: make(chan struct{}), state: JobQueued,
		waiters: make(map[*waiter]struct{}), kept: make(map[uint32]uint32), askers: make(map[uint32]string), urgent: make(chan struct{})}
	fs.open[key], fs.all[f.id] = f, f
	return f
}

// start runs the flight on a goroutine of its own. The caller holds fs.mu.
func (fs *flights) start(key flightKey, f *flight, work runner) {
	ctx, cancel := context.WithCancel(context.Background())
	f.cancel = cancel
	if fs.began != nil && f.about.compiles() {
		fs.began()
	}
	fs.work.Go(func() {
		defer cancel()
		result, err := work.run(ctx, f)
		fs.mu.Lock()
		f.finish(result, err)
		if fs.open[key] == f {
			delete(fs.open, key)
		}
		delete(fs.all, f.id)
		if !f.hidden() {
			fs.past = append(fs.past, f)
			fs.forget()
		}
		fs.mu.Unlock()
		close(f.done)
		if fs.ended != nil && f.about.compiles() {
			fs.ended()
		}
	})
}

// enter notes who asks, and the waiter unless it is nil. The caller holds fs.mu.
func (f *flight) enter(who *asking, w *waiter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !who.idle && len(f.askers) < maxAskers {
		f.askers[who.uid] = who.name
	}
	if who.keep || who.goOn {
		f.kept[who.uid] = who.owner
	}
	if w != nil {
		f.waiters[w] = struct{}{}
	}
	f.rerank()
	if w != nil && f.phase != "" && w.tell != nil {
		w.tell(f.progress(w))
	}
}

// giveUp is leave for a waiter that does not take what came, if it has come meanwhile.
func (f *flight) giveUp(w *waiter) {
	f.leave(w)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over() && w.counted {
		f.flights.store.Taken(f.result.build.ID)
	}
}

// leave takes a waiter out. The last one cancels, if nobody wants the result any more.
func (f *flight) leave(w *waiter) {
	fs := f.flights
	fs.mu.Lock() // nobody may join between the count and the cancel
	defer fs.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.waiters, w)
	if f.over() {
		return
	}
	if len(f.waiters) == 0 && len(f.kept) == 0 {
		fs.stop(f)
		return
	}
	f.rerank()
}

// over tells whether the work has ended. The caller holds f.mu.
func (f *flight) over() bool { return !f.ended.IsZero() }

// stop cancels the flight; who comes now starts afresh. The caller holds fs.mu and f.mu.
func (fs *flights) stop(f *flight) {
	f.stopped = true
	f.cancel()
	for key, open := range fs.open {
		if open == f {
			delete(fs.open, key)
		}
	}
}

// rank is how much the flight matters now. The caller holds f.mu.
func (f *flight) rank() queue.Rank {
	for w := range f.waiters {
		if !w.idle {
			return queue.WaitedFor
		}
	}
	if len(f.kept) > 0 {
		return queue.AskedFor
	}
	return queue.OwnWish
}

// rerank moves the flight in the queue, and hurries what runs already. The caller holds f.mu.
func (f *flight) rerank() {
	now := f.rank()
	running := f.turn != nil && f.flights.queue.Move(f.turn, now)
	select {
	case <-f.urgent:
		if now != queue.WaitedFor && !running {
			f.urgent = make(chan struct{}) // nobody waits any more, and nothing has begun in haste
		}
	default:
		if now == queue.WaitedFor {
			close(f.urgent)
		}
	}
}

// place is the right to run a process of the daemon's.
type place struct {
	ctx  context.Context // of the process: it ends with the job's, or with queue.ErrYielded as its cause
	idle <-chan struct{} // closed as soon as a request waits for the job; before that it runs at the lowest priority
	end  func()          // gives the place back, after the process has ended
}

// begin waits until the job may run. What yielded its place may begin again.
func (f *flight) begin(ctx context.Context) (place, error) {
	q := f.flights.queue
	memory, length := f.flights.costs.Estimate(f.about.kind())
	run, stop := context.WithCancelCause(ctx)
	f.mu.Lock()
	t := &queue.Turn{Number: f.number, Memory: memory, Length: length, Yield: func() { stop(queue.ErrYielded) }}
	f.turn, f.state, f.started = t, JobQueued, time.Time{}
	q.Enter(t, f.rank())
	f.tellLocked("queued")
	f.mu.Unlock()
	if err := q.Await(ctx, t); err != nil {
		stop(nil)
		return place{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state, f.started = JobRunning, f.flights.now()
	f.rerank()
	return place{ctx: run, idle: f.urgent, end: func() { stop(nil); q.Leave(t) }}, nil
}

// finish notes the end. The caller holds fs.mu.
func (f *flight) finish(result *compiled, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.result, f.err, f.ended = result, err, f.flights.now()
	if err == nil && result.build != nil && f.flights.store != nil {
		takers := 0
		for w := range f.waiters {
			if w.counted = !w.idle; w.counted {
				takers++
			}
		}
		f.flights.store.Expect(result.build.ID, takers)
	}
	switch {
	case err == nil:
		f.state = JobDone
	case f.stopped:
		f.state, f.err = JobCancelled, runtimes.ErrGivenUp
	default:
		f.state = JobFailed
	}
}

// tell passes a change of phase to everybody who waits.
func (f *flight) tell(phase string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tellLocked(phase)
}

func (f *flight) tellLocked(phase string) {
	f.phase = phase
	for _, set := range []map[*waiter]struct{}{f.waiters, f.followed} {
		for w := range set {
			if w.tell != nil {
				w.tell(f.progress(w))
			}
		}
	}
}

// tellOne tells a waiter how things stand.
func (f *flight) tellOne(w *waiter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.phase != "" && w.tell != nil && !f.over() {
		w.tell(f.progress(w))
	}
}

// progress is what the waiter is told. The caller holds f.mu.
func (f *flight) progress(w *waiter) Progress {
	p := Progress{Phase: f.phase, Job: f.id, Waiting: f.waiting()}
	if whole := f.estimate(); whole > 0 {
		p.Estimate = f.queued.Add(whole).Sub(w.since)
	}
	return p
}

// waiting counts the requests that wait. The caller holds f.mu.
func (f *flight) waiting() int {
	n := 0
	for w := range f.waiters {
		if !w.idle {
			n++
		}
	}
	return n
}

// estimate is how long it may take from queued to done; 0: not known. The caller holds f.mu.
func (f *flight) estimate() time.Duration {
	switch {
	case f.turn == nil || f.turn.Length == 0 || f.over() && f.started.IsZero():
		return 0
	case f.started.IsZero():
		return f.flights.now().Sub(f.queued) + f.flights.queue.Wait(f.turn) + f.turn.Length
	}
	return f.started.Sub(f.queued) + f.turn.Length
}

// count is how many jobs are under way.
func (fs *flights) count() int {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	n := 0
	for _, f := range fs.all {
		f.mu.Lock()
		if !f.hidden() {
			n++
		}
		f.mu.Unlock()
	}
	return n
}

// busy tells whether a user wants a compile.
func (fs *flights) busy() bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for _, f := range fs.open {
		f.mu.Lock()
		now := f.rank()
		if f.about.inquiry {
			now = queue.OwnWish // it takes no place that a compile might have
		}
		f.mu.Unlock()
		if now != queue.OwnWish {
			return true
		}
	}
	return false
}

// close cancels what is under way and waits for it to end.
func (fs *flights) close() {
	fs.mu.Lock()
	fs.closed = true
	for _, f := range fs.all {
		f.mu.Lock()
		fs.stop(f)
		f.mu.Unlock()
	}
	fs.mu.Unlock()
	fs.work.Wait()
}

// newID gives an id that was never used before and cannot be guessed.
func newID() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // it never fails
	return hex.EncodeToString(b[:])
}

// Idle tells whether nothing is being compiled and nobody holds what was served since the start: who keeps the cache open for others
// only may close it. It looks into the folder of every view that is in use, so it is not for each request.
func (c *Cache) Idle() bool {
	if c.flights.count() > 0 {
		return false
	}
	return !c.views.AnyHeld()
}
