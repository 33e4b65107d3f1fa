package jobs

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// The states of a job.
const (
	Queued    = "queued"
	Running   = "running"
	Claimed   = "claimed" // an application compiles it
	Done      = "done"
	Failed    = "failed"
	Cancelled = "cancelled"
)

// Info describes a job that is queued, runs, or ended recently.
type Info struct {
	ID          string
	State       string // one of the states above
	Phase       string // as Progress.Phase
	ModelName   string
	ModelDigest cas.Digest
	RequestKey  index.RequestKey
	Build       index.BuildKey
	EP          string
	UID         uint32 // the user of the first request; AsSeenBy replaces it for other users
	Background  bool   // no caller waits for it
	Waiting     int    // requests that wait for it
	Queued      time.Time
	Started     time.Time     // zero: not yet
	Elapsed     time.Duration // from when it was queued until now or its end
	Estimate    time.Duration // from queued to done; 0: not known
	Why         string        // "requested", or why it is compiled again
	Err         error         // why it failed
	Models      int           // number of models of a group; 0: no group

	users map[uint32]string // by uid: the name that each user gave the model; not shared
}

// AsSeenBy returns the info with the user's name for the model and, for ordinary users, their uid.
func (i Info) AsSeenBy(uid uint32, administrator bool) Info {
	if name := i.users[uid]; name != "" {
		i.ModelName = name
	}
	if !administrator {
		i.UID = uid
	}
	return i
}

// Description is the part of a job's Info that does not change, and what the daemon needs besides.
type Description struct {
	Info
	EPs      []string
	Size     int64         // bytes of the model
	Files    int           // number of the model's files
	Scope    string        // of the build; "" for one that is not kept
	Replaces index.BuildID // the build that a rebuild replaces; zero for a user's request
	Claim    bool          // applications compile it, which may end without a result

	Keeps   bool // compiles nothing: stores a build that was already answered
	Inquiry bool // compiles nothing: finds out facts that compiles need
}

// Compiles reports whether something is compiled.
func (a *Description) Compiles() bool { return !a.Inquiry && !a.Keeps }

// Kind is the key under which Costs record the job.
func (a *Description) Kind() Kind { return Kind{EPs: a.EPs, Size: a.Size} }

// Job is one piece of work under way, and its waiters.
type Job struct {
	ID    string    // as users see it
	Since time.Time // when it was queued

	jobs        *Jobs
	description Description
	number      uint64
	done        chan struct{} // closed when result and err are set, which wakes all waiters
	cancel      context.CancelFunc
	result      *Result
	err         error

	mu           sync.Mutex // guards the fields below
	state        string
	phase        string
	moved, whole int64                // bytes bytes of the phase; 0: not known
	left         time.Duration        // time left of the phase; 0: not known
	waiters      map[*waiter]struct{} // each receives the phases
	kept         map[uint32]uint32    // users that requested it without waiting -> owner
	users        map[uint32]string    // users that may see it -> their names for the model
	followUps    map[FollowUp]int     // users that may need a job of their own -> files held open
	endHeld      func()               // ends an application's claim; nil: no claim
	holder       uint32               // the user of that application
	ticket       *Ticket              // its place in the queue; nil: none
	urgent       chan struct{}        // closed as soon as a request waits
	started      time.Time            // zero: not yet
	ended        time.Time
	stopped      bool                 // cancelled
	followed     map[*waiter]struct{} // callers that show its progress, and do not keep it alive
}

// FollowUp is a user that gets a job of its own if this one returns no build that the user may
// have. A request that is strict about the version of ONNX Runtime may need one when the user's
// other requests do not.
type FollowUp struct {
	UID    uint32
	Strict bool
}

type waiter struct {
	Caller
	giveUp context.CancelFunc // ends the wait; nil for a caller that only follows
	// the build is protected until this waiter has leased it; guarded by Job.mu
	counted bool
}

const maxUsers = 1024

// ProgressEvery is how often waiters are told the number of waiters, even if nothing else has
// changed.
const ProgressEvery = time.Second

func (j *Job) Description() *Description { return &j.description }

// Done is closed when the job has ended.
func (j *Job) Done() <-chan struct{} { return j.done }

// HasEnded reports whether the job has ended.
func (j *Job) HasEnded() bool {
	select {
	case <-j.done:
		return true
	default:
		return false
	}
}

// Outcome returns the job's result. Call it only after Done is closed.
func (j *Job) Outcome() (*Result, error) { return j.result, j.err }

// IsCancelled reports whether the job was cancelled. A cancelled job runs until its worker is
// killed.
func (j *Job) IsCancelled() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.stopped
}

// IsRequestedBy reports whether a request of the user waits for the job or keeps it.
func (j *Job) IsRequestedBy(uid uint32) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	_, asked := j.users[uid]
	return asked
}

// CountWatchers counts the callers that wait for the job, and those that only follow it.
func (j *Job) CountWatchers() (waiting, following int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.waiters), len(j.followed)
}

// Info returns the job's state.
func (j *Job) Info() Info {
	j.mu.Lock()
	defer j.mu.Unlock()
	i := j.description.Info
	i.users = maps.Clone(j.users)
	i.ID, i.State, i.Phase, i.Waiting = j.ID, j.state, j.phase, j.waiting()
	i.Queued, i.Started, i.Estimate = j.Since, j.started, j.estimate()
	i.Background = i.Waiting == 0
	end := j.ended
	if !j.hasEndedLocked() {
		end = j.jobs.Now()
	}
	i.Elapsed = end.Sub(j.Since)
	if i.State == Failed {
		i.Err = j.err
	}
	return i
}

// Follow waits until the job or the context ends, and reports whether the job ended. It calls
// report at each change of phase. Following does not keep the job alive.
func (j *Job) Follow(ctx context.Context, uid uint32, since time.Time, report func(Progress)) bool {
	w := &waiter{Caller: Caller{UID: uid, Since: since, Progress: report}}
	j.mu.Lock()
	j.followed[w] = struct{}{}
	j.report(w)
	j.mu.Unlock()
	defer func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		delete(j.followed, w)
	}()
	return j.wait(ctx, w)
}

// AddFollowUp records that the user, with so many files held open, gets a job of its own if this
// one returns no build that the user may have. It returns false if that is recorded already.
func (j *Job) AddFollowUp(h FollowUp, files int) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, there := j.followUps[h]; there {
		return false
	}
	j.followUps[h] = files
	return true
}

// KeepFor keeps the job going for an application that compiles it and does not wait, unless the job
// is cancelled already. end is called if the user, or its owner, cancels the job.
func (j *Job) KeepFor(uid, owner uint32, end func()) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.stopped {
		return false
	}
	j.state, j.started, j.endHeld, j.holder = Claimed, j.jobs.Now(), end, uid
	j.kept[uid] = owner
	return true
}

// Release undoes the user's KeepFor.
func (j *Job) Release(uid uint32) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.endHeld = nil
	delete(j.kept, uid)
}

// GiveUp removes the user's requests from the job, or with everybody those of all users, and
// reports whether that ends the job. If held is not nil, the caller must call it to end the
// application's claim.
func (j *Job) GiveUp(uid uint32, everybody bool) (ends bool, held func()) {
	js := j.jobs
	js.mu.Lock()
	defer js.mu.Unlock()
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.hasEndedLocked() || j.stopped {
		return false, nil
	}
	if everybody || j.holder == uid {
		held = j.endHeld
	}
	left := 0
	for w := range j.waiters {
		if !everybody && (w.UID != uid || w.Idle) {
			left++
			continue
		}
		w.giveUp()
	}
	delete(j.kept, uid)
	if everybody {
		clear(j.kept)
	}
	return j.cancelIfUnwanted(left), held
}

// cancelIfUnwanted cancels the job if no waiter is left and no user keeps it, and reports whether
// it did. The caller holds Jobs.mu and j.mu.
func (j *Job) cancelIfUnwanted(left int) (ends bool) {
	if left == 0 && len(j.kept) == 0 {
		j.jobs.stop(j)
		return true
	}
	j.rerank()
	return false
}

// wait waits until the job or the context ends, and reports whether the job ended.
func (j *Job) wait(ctx context.Context, w *waiter) bool {
	tick := time.NewTicker(ProgressEvery)
	defer tick.Stop()
	for {
		select {
		case <-j.done:
			return true
		case <-ctx.Done():
			return false
		case <-tick.C:
			j.mu.Lock()
			j.report(w)
			j.mu.Unlock()
		}
	}
}

// addCaller records the caller, and the waiter unless it is nil. The caller holds Jobs.mu.
func (j *Job) addCaller(caller *Caller, w *waiter) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !caller.Idle && len(j.users) < maxUsers {
		j.users[caller.UID] = caller.Name
	}
	if caller.Keep || caller.Continue {
		j.kept[caller.UID] = caller.Owner
	}
	if w != nil {
		j.waiters[w] = struct{}{}
		defer j.report(w)
	}
	j.rerank()
}

// leaveUntaken removes a waiter that does not use the result, and releases the result if there is
// one.
func (j *Job) leaveUntaken(w *waiter) {
	j.leave(w)
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.hasEndedLocked() && w.counted {
		j.jobs.OnTaken(j.result.Build.ID)
	}
}

// leave removes a waiter. The last one cancels the job unless a user keeps it.
func (j *Job) leave(w *waiter) {
	js := j.jobs
	js.mu.Lock() // no caller may join between the count and the cancel
	defer js.mu.Unlock()
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.waiters, w)
	if !j.hasEndedLocked() {
		j.cancelIfUnwanted(len(j.waiters))
	}
}

// hasEndedLocked reports whether the work has ended. The caller holds j.mu.
func (j *Job) hasEndedLocked() bool { return !j.ended.IsZero() }

func (j *Job) isHidden() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.description.Inquiry && len(j.users) == 0
}

// isWanted reports whether a user requested this compile. An inquiry does not count, because it
// takes no slot from a compile.
func (j *Job) isWanted() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return !j.stopped && !j.description.Inquiry && j.rank() != RankBackground
}

// rank returns the job's current rank in the queue. The caller holds j.mu.
func (j *Job) rank() Rank {
	switch {
	case j.waiting() > 0:
		return RankWaited
	case len(j.kept) > 0:
		return RankRequested
	}
	return RankBackground
}

// owners returns the users that give the job its rank. The caller holds j.mu.
func (j *Job) owners(rank Rank) (users []uint32) {
	switch rank {
	case RankWaited:
		for w := range j.waiters {
			if !w.Idle {
				users = append(users, w.Owner)
			}
		}
	case RankRequested:
		users = slices.Collect(maps.Values(j.kept))
	}
	slices.Sort(users)
	return slices.Compact(users)
}

// rerank updates the job's rank in the queue, and raises the priority of a running one. The caller
// holds j.mu.
func (j *Job) rerank() {
	now := j.rank()
	running := j.ticket != nil && j.jobs.queue.SetRank(j.ticket, now, j.owners(now)...)
	select {
	case <-j.urgent:
		if now != RankWaited && !running {
			// reset: no request waits any more, and the job has not begun
			j.urgent = make(chan struct{})
		}
	default:
		if now == RankWaited {
			close(j.urgent)
		}
	}
}

// Slot is the right to run a worker.
type Slot struct {
	// Context is the worker's. It ends with the job's, or with the cause ErrYielded.
	Context context.Context
	// Idle is closed as soon as a request waits for the job. Until then the worker runs at the
	// lowest priority.
	Idle <-chan struct{}
	// Leave returns the slot early, for the rest of the work to run without it.
	Leave func()
	End   func() // returns the slot, and ends Context; call it after the process has ended
}

// AcquireSlot waits until the job may run. Work that yielded its slot may call it again.
func (j *Job) AcquireSlot(ctx context.Context) (Slot, error) {
	q := j.jobs.queue
	memory, length := j.jobs.Costs.Estimate(j.description.Kind())
	run, stop := context.WithCancelCause(ctx)
	j.mu.Lock()
	t := &Ticket{Number: j.number, Memory: memory, Length: length, Yield: func() {
		stop(ErrYielded)
	}}
	j.ticket, j.state, j.started = t, Queued, time.Time{}
	rank := j.rank()
	q.Enter(t, rank, j.owners(rank)...)
	j.setPhaseLocked("queued")
	j.mu.Unlock()
	if err := q.Await(ctx, t); err != nil {
		stop(nil)
		return Slot{}, err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.state, j.started = Running, j.jobs.Now()
	j.rerank()
	leave := func() { q.Leave(t) }
	return Slot{Context: run, Idle: j.urgent, Leave: leave,
		End: func() { stop(nil); leave() }}, nil
}

// MarkRunning marks a job as running that needs no slot.
func (j *Job) MarkRunning(phase string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.state, j.started = Running, j.jobs.Now()
	j.setPhaseLocked(phase)
}

// finish records the end. The caller holds Jobs.mu.
func (j *Job) finish(result *Result, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.result, j.err, j.ended = result, err, j.jobs.Now()
	if err == nil && result.Build != nil && j.jobs.Expect != nil {
		takers := 0
		for w := range j.waiters {
			if w.counted = !w.Idle; w.counted {
				takers++
			}
		}
		j.jobs.Expect(result.Build.ID, takers)
	}
	switch {
	case err == nil:
		j.state = Done
	case j.stopped:
		j.state, j.err = Cancelled, j.jobs.OnGivenUp
	default:
		j.state = Failed
	}
}

// SetPhase passes a change of phase to all waiters.
func (j *Job) SetPhase(phase string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.setPhaseLocked(phase)
}

func (j *Job) setPhaseLocked(phase string) {
	j.phase, j.moved, j.whole, j.left = phase, 0, 0, 0
	j.reportAll()
}

// SetTransfer reports the progress of the phase in bytes, and the time left, to all waiters; 0: not
// known.
func (j *Job) SetTransfer(done, total int64, left time.Duration) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.moved, j.whole, j.left = done, total, left
	j.reportAll()
}

// reportAll reports the progress to all waiters. The caller holds j.mu.
func (j *Job) reportAll() {
	for _, set := range []map[*waiter]struct{}{j.waiters, j.followed} {
		for w := range set {
			j.report(w)
		}
	}
}

// report sends the progress to a waiter. The caller holds j.mu.
func (j *Job) report(w *waiter) {
	if w.Progress == nil || j.phase == "" || j.hasEndedLocked() {
		return
	}
	p := Progress{Phase: j.phase, Job: j.ID, Waiting: j.waiting(), Done: j.moved, Total: j.whole}
	if j.left > 0 {
		p.Estimate = j.jobs.Now().Add(j.left).Sub(w.Since)
	}
	if whole := j.estimate(); whole > 0 {
		p.Estimate = j.Since.Add(whole).Sub(w.Since)
	}
	w.Progress(p)
}

// waiting counts the requests that wait. The caller holds j.mu.
func (j *Job) waiting() int {
	n := 0
	for w := range j.waiters {
		if !w.Idle {
			n++
		}
	}
	return n
}

// estimate returns how long the job may take from queued to done, 0 if unknown. The caller holds
// j.mu.
func (j *Job) estimate() time.Duration {
	switch {
	case j.ticket == nil || j.ticket.Length == 0 || j.hasEndedLocked() && j.started.IsZero():
		return 0
	case j.started.IsZero():
		return j.jobs.Now().Sub(j.Since) + j.jobs.queue.EstimateWait(j.ticket) + j.ticket.Length
	}
	return j.started.Sub(j.Since) + j.ticket.Length
}
