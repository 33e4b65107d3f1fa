// Package jobs is the single-flight of the daemon: it runs each piece of work once for all callers:
// a compile, a claim, the adoption of an artefact, an inquiry about a runtime.
//
// A piece of work is a Work. Jobs finds the Job that does it or starts one. A caller waits for the
// job (Join), or leaves it running (Start). A job is cancelled when its last waiter has left and no
// user keeps it. Work that runs in a worker calls AcquireSlot first: a Queue admits jobs by rank,
// and within a rank in turn by user, within bounds on their number and on their memory. Costs
// remember how long jobs of one kind took, and how much memory, so that a job can say what it will
// need.
//
// The package is safe for concurrent use. Only Costs are stored on disk. Start reading at
// Jobs.Join.
package jobs

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/views"
	"github.com/epcached/epcached/unixsock/wire"
)

// Options are what Jobs need to run.
type Options struct {
	Slots  int   // how many jobs with waiting requests run at the same time
	Memory int64 // bytes that all running jobs may take together; 0: no bound
	Costs  Costs
	Now    func() time.Time

	OnGivenUp error // the error that callers of a cancelled job get

	// takers is the number of waiters, which have yet to lease the build
	Expect  func(id index.BuildID, takers int)
	OnTaken func(id index.BuildID) // one waiter has leased it, or does not use it

	OnBegan, OnEnded func() // a compile begins (called with a lock held), has ended
}

// Jobs are the jobs under way: one for each build key and scope, however many callers wait for it.
// A job lives while a caller waits for it or a user keeps it.
type Jobs struct {
	Options
	queue *Queue

	mu     sync.Mutex   // locked before Job.mu, and that before Queue.mu
	number uint64       // of the newest job; guarded by mu
	open   map[Key]*Job // jobs that can be joined; guarded by mu
	// by id, with cancelled jobs that have not ended yet; guarded by mu
	all    map[string]*Job
	ended  []*Job // ended recently, oldest first; guarded by mu
	closed bool   // guarded by mu
	work   sync.WaitGroup
}

// New returns Jobs without any job.
func New(o Options) *Jobs {
	return &Jobs{Options: o, queue: NewQueue(o.Slots, o.Memory, o.Now), open: make(map[Key]*Job),
		all: make(map[string]*Job)}
}

// Key identifies the work of a job. Callers with equal keys share one job.
type Key struct {
	Build index.BuildKey
	Scope string
	Alone string // not empty: a unique text, so that no other caller shares the job
}

// Work is what a job does.
type Work interface {
	// Description describes the job. Its progress is in the Job.
	Description() Description

	// Run does the work. It calls j.AcquireSlot before it starts a worker.
	Run(ctx context.Context, j *Job) (*Result, error)
}

// Func is Work with a function as its Run.
type Func struct {
	Work Description
	Do   func(ctx context.Context, j *Job) (*Result, error)
}

func (f Func) Description() Description { return f.Work }

func (f Func) Run(ctx context.Context, j *Job) (*Result, error) { return f.Do(ctx, j) }

// Result is the result of a job: a stored build, or a view of a build that is not stored.
type Result struct {
	Build *index.Build
	Alone *views.View // view of a build that is not stored, otherwise nil
	Why   string      // why it is not stored, unless the request asked for that
	Found bool        // the build existed already
	// Fetched: another machine compiled the build, so each request has it judged first.
	Fetched bool
	Fact    any // what an inquiry found out; its only result
}

// Caller describes the request that joins a job.
type Caller struct {
	UID      uint32
	Owner    uint32 // for a user of a container, the owner of the container
	Name     string // of the model
	Idle     bool   // the daemon itself: no request waits
	Keep     bool   // the job runs to its end even if no caller waits
	Continue bool   // as Keep, without the bound on a user's kept jobs
	Since    time.Time
	Progress func(Progress)
}

// Join waits for the result of the key's job. If there is none, it starts one with the work that
// prepare returns, and first is true. When the last caller leaves, the job is cancelled, unless a
// user keeps it.
func (js *Jobs) Join(ctx context.Context, key Key, caller Caller,
	prepare func() (Work, error)) (result *Result, first bool, err error) {
	waiting, giveUp := context.WithCancel(ctx)
	defer giveUp()
	w := &waiter{Caller: caller, giveUp: giveUp}
	j, first, err := js.find(key, caller, w, prepare)
	if err != nil {
		return nil, first, err
	}
	if !j.wait(waiting, w) {
		j.leaveUntaken(w)
		return nil, first, cmp.Or(ctx.Err(), js.OnGivenUp)
	}
	j.leave(w)
	return j.result, first, j.err
}

// Start has the key's job run to its end without waiting for it. It starts the job if there is
// none.
func (js *Jobs) Start(key Key, caller Caller, prepare func() (Work, error)) (j *Job, first bool,
	err error) {
	caller.Keep = true
	return js.find(key, caller, nil, prepare)
}

// find returns the key's job, and records the caller, because the job's rank depends on its
// callers.
func (js *Jobs) find(key Key, caller Caller, w *waiter, prepare func() (Work, error)) (j *Job,
	first bool, err error) {
	js.mu.Lock()
	defer js.mu.Unlock()
	j = js.open[key]
	if err := js.mayKeep(j, &caller); err != nil {
		return nil, false, err
	}
	if j != nil {
		j.addCaller(&caller, w)
		return j, false, nil
	}
	if js.closed {
		return nil, true, context.Canceled
	}
	work, err := prepare()
	if err != nil {
		return nil, true, err
	}
	j = js.add(key, work)
	j.addCaller(&caller, w)
	js.start(key, j, work)
	return j, true, nil
}

// MaxKept and maxKeptFiles bound a user's jobs without waiting requests, because each of them holds
// the files of its model open until it runs.
const (
	MaxKept      = 64
	maxKeptFiles = 1024
)

// mayKeep fails if the caller would exceed MaxKept or maxKeptFiles with the job. j is nil for a new
// one. The caller holds js.mu.
func (js *Jobs) mayKeep(j *Job, caller *Caller) error {
	if !caller.Keep {
		return nil
	}
	jobs, files := 0, 0
	for _, one := range js.open {
		one.mu.Lock()
		mine := false
		for _, owner := range one.kept {
			mine = mine || owner == caller.Owner && !one.description.Inquiry
		}
		// their files stay open until it is known whether they need a job
		for h, n := range one.followUps {
			if owner, keeps := one.kept[h.UID]; keeps && owner == caller.Owner {
				files += n
			}
		}
		one.mu.Unlock()
		if mine && one == j {
			return nil
		}
		if mine {
			jobs++
			files += one.description.Files
		}
	}
	if jobs >= MaxKept || jobs > 0 && files >= maxKeptFiles {
		return apierr.New(apierr.Busy, nil, "this user has %d queued background compiles", jobs).
			WithHint("retry when some are done, or cancel some: epcachectl jobs")
	}
	return nil
}

// add makes a job. The caller holds js.mu.
func (js *Jobs) add(key Key, work Work) *Job {
	js.number++
	about := work.Description()
	j := &Job{jobs: js, ID: cmp.Or(about.ID, NewID()), description: about, number: js.number,
		Since: js.Now(), done: make(chan struct{}), state: Queued,
		waiters: make(map[*waiter]struct{}), kept: make(map[uint32]uint32),
		users: make(map[uint32]string), urgent: make(chan struct{}),
		followUps: make(map[FollowUp]int), followed: make(map[*waiter]struct{})}
	js.open[key], js.all[j.ID] = j, j
	return j
}

// start runs the job on a goroutine of its own. The caller holds js.mu.
func (js *Jobs) start(key Key, j *Job, work Work) {
	ctx, cancel := context.WithCancel(context.Background())
	j.cancel = cancel
	if js.OnBegan != nil && j.description.Compiles() {
		js.OnBegan()
	}
	js.work.Go(func() {
		defer cancel()
		result, err := work.Run(ctx, j)
		js.mu.Lock()
		j.finish(result, err)
		if js.open[key] == j {
			delete(js.open, key)
		}
		delete(js.all, j.ID)
		if !j.isHidden() {
			js.ended = append(js.ended, j)
			js.forget()
		}
		js.mu.Unlock()
		close(j.done)
		if js.OnEnded != nil && j.description.Compiles() {
			js.OnEnded()
		}
	})
}

// maxEnded and EndedFor bound the ended jobs that are remembered for callers that follow.
const (
	maxEnded = 256
	EndedFor = 10 * time.Minute
)

// forget drops jobs that ended more than EndedFor ago. The caller holds js.mu.
func (js *Jobs) forget() {
	old := js.Now().Add(-EndedFor)
	first := max(0, len(js.ended)-maxEnded)
	for first < len(js.ended) && js.ended[first].ended.Before(old) {
		first++
	}
	if first > 0 {
		js.ended = slices.Clone(js.ended[first:])
	}
}

// stop cancels the job, so that a later caller starts a new one. The caller holds js.mu and j.mu.
func (js *Jobs) stop(j *Job) {
	j.stopped = true
	j.cancel()
	maps.DeleteFunc(js.open, func(_ Key, open *Job) bool { return open == j })
}

// Joinable returns the job for the first of the keys with a job that can be joined, nil if there is
// none.
func (js *Jobs) Joinable(keys ...Key) *Job {
	js.mu.Lock()
	defer js.mu.Unlock()
	for _, key := range keys {
		if j := js.open[key]; j != nil {
			return j
		}
	}
	return nil
}

// List returns the jobs that have not ended.
func (js *Jobs) List() []*Job {
	js.mu.Lock()
	defer js.mu.Unlock()
	return slices.Collect(maps.Values(js.all))
}

// ListWithEnded returns jobs that ended recently, the oldest first, and then those that have not
// ended.
func (js *Jobs) ListWithEnded() []*Job {
	js.mu.Lock()
	defer js.mu.Unlock()
	js.forget()
	return slices.AppendSeq(slices.Clone(js.ended), maps.Values(js.all))
}

// InOrder describes the requested jobs that have not ended and for which only returns true, in the
// order in which they will run.
func (js *Jobs) InOrder(only func(*Job) bool) []Info {
	type placed struct {
		info   Info
		rank   Rank
		place  int
		number uint64
	}
	var all []placed
	places := js.queue.positions()
	for _, j := range js.List() {
		if j.isHidden() || !only(j) {
			continue
		}
		one := placed{info: j.Info(), number: j.number, rank: -1}
		if one.info.State != Running {
			j.mu.Lock()
			one.rank = j.rank()
			var entered bool
			if one.place, entered = places[j.ticket]; !entered {
				one.place = len(places)
			}
			j.mu.Unlock()
		}
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b placed) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.place, b.place),
			cmp.Compare(a.number, b.number))
	})
	out := make([]Info, len(all))
	for i := range all {
		out[i] = all[i].info
	}
	return out
}

// Count returns how many jobs are under way.
func (js *Jobs) Count() (n int) {
	for _, j := range js.List() {
		if !j.isHidden() {
			n++
		}
	}
	return n
}

// Busy reports whether a compile is under way that a user requested.
func (js *Jobs) Busy() bool { return slices.ContainsFunc(js.List(), (*Job).isWanted) }

// Close cancels all jobs and waits until they have ended.
func (js *Jobs) Close() {
	js.mu.Lock()
	js.closed = true
	for _, j := range js.all {
		j.mu.Lock()
		js.stop(j)
		j.mu.Unlock()
	}
	js.mu.Unlock()
	js.work.Wait()
}

// NewID returns an id that was never used before and cannot be guessed.
func NewID() string { return views.NewID() }

// RunInquiry runs find for the key, once for all concurrent callers, to find out facts that plans
// need, for example the devices of an execution provider. An inquiry may take long, so users see it
// among the jobs and may cancel it. It continues after its callers have left, because the next
// caller can use the result. ep is the execution provider.
func (js *Jobs) RunInquiry(ctx context.Context, key string, caller Caller, ep string,
	find func(context.Context) (any, error)) (any, error) {
	caller.Continue, caller.Since = true, js.Now()
	about := Description{Inquiry: true, Info: Info{ModelName: caller.Name, EP: ep, UID: caller.UID,
		Why: "requested: its execution provider is probed first"}}
	result, _, err := js.Join(ctx, Key{Alone: key}, caller, func() (Work, error) {
		return Func{about, func(ctx context.Context, j *Job) (*Result, error) {
			j.MarkRunning("probing")
			fact, err := find(ctx)
			return &Result{Fact: fact}, err
		}}, nil
	})
	if err != nil {
		return nil, err
	}
	return result.Fact, nil
}

// Progress is reported to a waiting caller.
type Progress struct {
	// "fetching", "reading", "queued", "probing", "converting", "compiling", "claimed", "checking",
	// "storing", "verifying", "unpacking", "comparing"
	Phase       string
	Detail      string
	Done, Total int64 // bytes, where they are known
	// Estimate is for the whole request, from earlier compiles of similar size; 0: not known.
	Estimate time.Duration
	Job      string // id of the job that the request waits for; "": none
	Waiting  int    // requests that wait for this job
}

// ProgressReporter passes changes of progress to one caller, until End. A nil one reports nothing.
type ProgressReporter struct {
	Since    time.Time // when the request arrived
	progress func(Progress)

	mu   sync.Mutex
	last Progress // guarded by mu
	over bool     // guarded by mu
}

// NewProgressReporter returns nil if progress is nil, so that a hit allocates nothing. since is
// when the request arrived.
func NewProgressReporter(progress func(Progress), since time.Time) *ProgressReporter {
	if progress == nil {
		return nil
	}
	return &ProgressReporter{Since: since, progress: progress}
}

// Report reports progress.
func (t *ProgressReporter) Report(p Progress) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over || p == t.last {
		return
	}
	t.last = p
	t.progress(p)
}

// Phase reports a change of phase.
func (t *ProgressReporter) Phase(name string) { t.Report(Progress{Phase: name}) }

// End waits for a report under way. No report follows it.
func (t *ProgressReporter) End() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
}

// Reply returns the message that clients receive; the server adds the elapsed time.
func (p *Progress) Reply() *wire.Progress {
	return &wire.Progress{Phase: p.Phase, Detail: wire.Valid(p.Detail), DoneBytes: p.Done,
		TotalBytes: p.Total,
		EstimateMs: p.Estimate.Milliseconds(), Job: p.Job, Waiting: uint32(p.Waiting)}
}
