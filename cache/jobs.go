package cache

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cache/queue"
	"github.com/epcached/epcached/cache/rights"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// The states of a job.
const (
	JobQueued    = "queued"
	JobRunning   = "running"
	JobClaimed   = "claimed" // an application compiles it
	JobDone      = "done"
	JobFailed    = "failed"
	JobCancelled = "cancelled"
)

// Job is a compile that waits, or runs, or has ended lately.
type Job struct {
	ID          string
	State       string // one of those above
	Phase       string // as in Progress
	ModelName   string
	ModelDigest cas.Digest
	RequestKey  index.RequestKey
	Build       index.BuildKey
	EP          string
	UID         uint32 // who asked first; another user who asked too, and is no administrator, is told the own one
	Background  bool   // nobody waits for it
	Waiting     int    // requests that wait for it
	Queued      time.Time
	Started     time.Time     // zero: not yet
	Elapsed     time.Duration // since it was queued, or until it ended
	Estimate    time.Duration // from queued to done; 0: not known
	Why         string        // "asked for", or why it is compiled anew
	Err         error         // of one that failed
	Models      int           // of a group: how many; else 0

	askers map[uint32]string // by uid, what those who asked call the model; its own
}

// jobFacts are what a job is, as far as that does not change.
type jobFacts struct {
	Job
	eps   []string
	size  int64         // bytes of the model
	files int           // that it is in
	scope string        // of the build; "" for one that is not kept
	anew  index.BuildID // the build that it is to replace; zero: somebody asked for it
	claim bool          // applications compile it, which may bring nothing

	keeps   bool // nothing is compiled: it keeps what was answered already
	inquiry bool // nothing is compiled: it finds out what compiles need
}

// compiles tells whether something is compiled.
func (a *jobFacts) compiles() bool { return !a.inquiry && !a.keeps }

func (a *jobFacts) kind() queue.Kind { return queue.Kind{EPs: a.eps, Size: a.size} }

// So many jobs are remembered after their end, and for so long: whoever follows one asks soon.
const (
	maxPastJobs = 256
	pastJobsFor = 10 * time.Minute
)

// forget drops what ended long ago. The caller holds fs.mu.
func (fs *flights) forget() {
	old := fs.now().Add(-pastJobsFor)
	first := max(0, len(fs.past)-maxPastJobs)
	for first < len(fs.past) && fs.past[first].ended.Before(old) {
		first++
	}
	if first > 0 {
		fs.past = slices.Clone(fs.past[first:])
	}
}

// job says how the flight stands.
func (f *flight) job() Job {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.jobLocked()
}

func (f *flight) jobLocked() Job {
	j := f.about.Job
	j.askers = maps.Clone(f.askers)
	j.ID, j.State, j.Phase, j.Waiting = f.id, f.state, f.phase, f.waiting()
	j.Queued, j.Started, j.Estimate = f.queued, f.started, f.estimate()
	j.Background = j.Waiting == 0
	end := f.ended
	if !f.over() {
		end = f.flights.now()
	}
	j.Elapsed = end.Sub(f.queued)
	if j.State == JobFailed {
		j.Err = f.err
	}
	return j
}

// mayFollow: who asked for a job, or has what it is to replace. Administrators may follow all.
func (c *Cache) mayFollow(p Peer, a *jobFacts, asked bool) bool {
	switch {
	case asked || c.rights.Administrator(p):
		return true
	case a.anew.IsZero():
		return false // it may be of the same scope, but of a request that somebody else made
	}
	return c.rights.MaySee(p, a.anew, a.scope)
}

// toldTo hides from others who asked first, and has everybody who asked hear of the model as they call it.
func (c *Cache) toldTo(p Peer, j Job) Job {
	j.ModelName = cmp.Or(j.askers[p.UID], j.ModelName)
	if !c.rights.Administrator(p) {
		j.UID = p.UID
	}
	return j
}

// Jobs gives the jobs that the peer may see, in the order in which they run: its own, those that make a build anew that
// it had, and for administrators all. Of those that the daemon wants by itself and has not begun there are the ones
// that have waited longest; the most used of all of them is the next.
func (c *Cache) Jobs(ctx context.Context, p Peer) ([]Job, error) {
	type placed struct {
		job    Job
		rank   queue.Rank
		number uint64
	}
	var all []placed
	for _, f := range c.flights.list() {
		if ctx.Err() != nil {
			return nil, apierr.New(apierr.Cancelled, ctx.Err(), "jobs")
		}
		f.mu.Lock()
		_, asked := f.askers[p.UID]
		one := placed{job: f.jobLocked(), rank: f.rank(), number: f.number}
		if one.job.State == JobRunning {
			one.rank = -1
		}
		hidden := f.hidden()
		f.mu.Unlock()
		if !hidden && c.mayFollow(p, &f.about, asked) {
			one.job = c.toldTo(p, one.job)
			all = append(all, one)
		}
	}
	slices.SortFunc(all, func(a, b placed) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.number, b.number)) // as the queue does, which not all have entered yet
	})
	jobs := make([]Job, len(all))
	for i := range all {
		jobs[i] = all[i].job
	}
	return append(jobs, c.jobsAnew(p)...), nil
}

// has tells whether there is a flight that can be joined.
func (fs *flights) has(key flightKey) bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return fs.open[key] != nil
}

// underWay gives the flight that the request would wait for, nil if there is none.
func (c *Cache) underWay(at *attempt) *flight {
	key, _ := at.flightKey()
	own := flightKey{build: key.build, scope: rights.OwnScope(at.Peer)} // where an application of the same user's holds the claim
	c.flights.mu.Lock()
	defer c.flights.mu.Unlock()
	if f := c.flights.open[key]; f != nil {
		return f
	}
	return c.flights.open[own]
}

// notYet is the error of a request that does not wait for the compile that is under way.
func (c *Cache) notYet(at *attempt, found *search) *apierr.Error {
	f := found.flight
	j := f.job()
	text := fmt.Sprintf("no build yet for model %q: it is being compiled (%s, for %s", at.Name, cmp.Or(j.Phase, j.State), j.Elapsed.Round(time.Second))
	if j.Estimate > 0 {
		text += fmt.Sprintf(", of about %s", j.Estimate.Round(time.Second))
	}
	e := apierr.New(apierr.NotFound, nil, "%s)", text).WithFact("request_key", at.plan.requestKey.String()).WithFact("phase", cmp.Or(j.Phase, j.State)).
		WithFact("elapsed_ms", fmt.Sprint(j.Elapsed.Milliseconds())).WithFact("estimate_ms", fmt.Sprint(j.Estimate.Milliseconds()))
	if !c.mayFollow(at.Peer, &f.about, f.askedBy(at.Peer.UID)) {
		return e.WithHint("wait for it: ask with on_miss wait")
	}
	return e.WithFact("job", j.ID).WithHint("wait for it: ask with on_miss wait, or epcachectl jobs follow %s", j.ID)
}

// list gives the flights that have not ended.
func (fs *flights) list() []*flight {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return slices.Collect(maps.Values(fs.all))
}

// Follow waits until the job ends, and gives its end; that of one which ended lately at once. progress is called at each
// change of phase, and not after Follow returned. Who only follows a job does not keep it going.
func (c *Cache) Follow(ctx context.Context, p Peer, id string, progress func(Progress)) (Job, error) {
	f, anew, err := c.findJob(p, id)
	if err == nil && f == nil {
		f, anew, err = c.awaitAnew(ctx, p, *anew)
	}
	if err != nil {
		return Job{}, err
	}
	if f == nil {
		return c.toldTo(p, *anew), nil
	}
	since := c.now()
	told := newTelling(progress, since)
	defer told.end()
	w := &waiter{asking: asking{uid: p.UID, since: since, tell: told.tell}}
	f.watch(w, true)
	defer f.watch(w, false)
	if !f.wait(ctx, w) {
		return Job{}, contextError(ctx, f.about.ModelName)
	}
	return c.toldTo(p, f.job()), nil
}

// watch has somebody told the phases, or not any more.
func (f *flight) watch(w *waiter, on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !on {
		delete(f.followed, w)
		return
	}
	if f.followed == nil {
		f.followed = make(map[*waiter]struct{})
	}
	f.followed[w] = struct{}{}
	if f.phase != "" && !f.over() {
		w.tell(f.progress(w))
	}
}

// CancelJobs ends jobs, or all that the peer asked for, for administrators all there are, and gives them as they are then. A
// user who is no administrator gives up the own part: others who wait for the same job have it go on.
func (c *Cache) CancelJobs(ctx context.Context, p Peer, ids []string, all bool) ([]Job, error) {
	if all == (len(ids) > 0) {
		return nil, apierr.New(apierr.BadRequest, nil, "cancel: name jobs, or say all")
	}
	flights, past, err := c.named(p, ids, all)
	if err != nil {
		return nil, err
	}
	for _, f := range flights {
		ends, held := c.giveUp(p, f)
		if held != nil {
			held.finish(jobCancelled, 0) // for the next who wants it, if somebody does
		}
		if ends && f.about.compiles() {
			c.happened(event.For(event.About{Peer: Peer{UID: f.about.UID}, Key: f.about.RequestKey, Model: f.about.ModelName},
				event.Cancelled, "by uid %d", p.UID))
		}
	}
	for _, f := range flights {
		f.mu.Lock()
		stopped := f.stopped
		f.mu.Unlock()
		if !stopped {
			past = append(past, c.toldTo(p, f.job()))
			continue
		}
		select { // the worker is being killed
		case <-f.done:
			past = append(past, c.toldTo(p, f.job()))
		case <-ctx.Done():
			return past, contextError(ctx, f.about.ModelName)
		}
	}
	return past, nil
}

// named gives the jobs that are meant. Those that ended already are given as they are.
func (c *Cache) named(p Peer, ids []string, all bool) (flights []*flight, past []Job, err error) {
	if all {
		for _, f := range c.flights.list() {
			if f.askedBy(p.UID) || c.rights.Administrator(p) {
				flights = append(flights, f)
			}
		}
		return flights, c.dropAnew(p), nil
	}
	for _, id := range ids {
		f, anew, err := c.findJob(p, id)
		switch {
		case err != nil:
			return nil, nil, err
		case f != nil && !waits(f.done):
			past = append(past, c.toldTo(p, f.job()))
		case !c.rights.Administrator(p) && (f == nil || !f.askedBy(p.UID)):
			return nil, nil, apierr.New(apierr.NotAllowed, nil, "job %.80q: you did not ask for it", id)
		case f == nil:
			if c.rebuilds.Drop(id) {
				anew.State = JobCancelled
			}
			past = append(past, c.toldTo(p, *anew))
		default:
			flights = append(flights, f)
		}
	}
	return flights, past, nil
}

func (f *flight) askedBy(uid uint32) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, asked := f.askers[uid]
	return asked
}

// giveUp takes the peer's requests out of the job, an administrator everybody's, and tells whether that ends it. held is the claim that
// is given up with it, nil for none: the caller ends it.
func (c *Cache) giveUp(p Peer, f *flight) (ends bool, held *claim) {
	fs, everybody := &c.flights, c.rights.Administrator(p)
	fs.mu.Lock()
	defer fs.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over() || f.stopped {
		return false, nil
	}
	if held = f.held; held != nil && !everybody && held.Peer.UID != p.UID {
		held = nil
	}
	left := 0
	for w := range f.waiters {
		if !everybody && (w.uid != p.UID || w.idle) {
			left++
			continue
		}
		w.giveUp()
	}
	delete(f.kept, p.UID)
	if everybody {
		clear(f.kept)
	}
	if left == 0 && len(f.kept) == 0 {
		fs.stop(f)
		return true, held
	}
	f.rerank()
	return false, held
}
