package cache

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/index"
)

// wish is a build that is to be made anew, without anybody's waiting for it.
type wish struct {
	build *index.Build // whose request is compiled again, into the build's own scope
	why   string       // for people and for the history: "the SDK is 1.8.1 now"

	// runtime is what it is compiled for. nil: the one whose library made the build, as it is by then, or else the
	// first that has its execution providers.
	runtime *runtime

	// refresh compiles also where the build itself is of the very libraries that would make it now, and nothing is
	// known against it: it is too old, or they do not think it the best any more.
	refresh bool

	// delay is how long to leave it: a request that is about to compile it need not find it begun.
	delay time.Duration

	// request, if not nil, is a request that the build answers. Its files are a source where none is kept: they are
	// duplicated, and stay the caller's to close.
	request *Request
}

// rebuilds compile builds anew in the background: one at a time or so, those that are used most first, only while no
// request waits for a compile, only at some times of day where it is so configured, and not for more than a share of
// the processor. The work goes through the same flights as that of requests: a request for a build that is being made
// joins, and makes it urgent; one for another build does not wait.
//
// The queue is in memory: after a start, whoever judges builds asks again.
//
// A build that has no source, or another one by now, waits for its next request. What failed is tried again a few
// times, later and later, and then only when the runtime's libraries are others, or a day is over.
type rebuilds struct {
	c    *Cache
	ctx  context.Context // of the work
	work sync.WaitGroup

	mu      sync.Mutex // guards the rest
	serving int        // goroutines that work on tasks, or would if there were as many jobs
	closed  bool
	tasks   map[taskKey]*task
	held    int           // tasks that hold a request's files
	changed chan struct{} // closed, and made anew, when there may be something to do
}

// taskKey: one build of a request, scope and runtime is made at a time, whichever of the earlier ones asked.
type taskKey struct {
	request index.RequestKey
	scope   string
	runtime string // its name; "" where the wish left it open
}

// task is a wish in the queue.
type task struct {
	id       string // of its job
	key      taskKey
	build    index.BuildID
	model    string
	why      string
	runtime  *runtime
	refresh  bool
	request  *Request // has descriptors of its own; nil: none
	heldTill time.Time

	state string
	text  string // why it is not done yet
	since time.Time
	after time.Time // not tried again before
	tries int
	rc    *runtimeContent // that the last try was for
	again *wish           // came while it was being worked on
}

// The states of a rebuild.
const (
	rebuildQueued  = "queued"
	rebuildRunning = "running"
	rebuildWaiting = "waiting" // for a request: there is no source
	rebuildFailed  = "failed"
)

const (
	maxTries     = 3
	giveUpFor    = 24 * time.Hour
	askAgain     = time.Hour       // before a source that was not there is looked for again without a request
	holdFor      = 5 * time.Minute // a request's files: held for longer they would keep file systems mounted
	maxHeld      = 16              // requests whose files are held
	maxHeldFiles = 64              // of one of them
	maxTasks     = 1 << 16
	longestWait  = time.Minute // of a timer: clocks are set, and machines sleep
)

// backoff is how long to wait after so many failures.
func backoff(tries int) time.Duration {
	pause := time.Minute
	for range tries - 1 {
		pause *= 10
	}
	return pause
}

// want asks for a build to be made anew. It returns at once, and may be called for each hit: what is queued already,
// or failed lately for the same libraries, is not queued again.
func (q *rebuilds) want(w wish) {
	if q.c == nil || q.limits().off {
		return
	}
	now := q.c.now()
	key := taskKey{request: w.build.RequestKey, scope: w.build.Scope}
	if w.runtime != nil {
		key.runtime = w.runtime.name
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.tasks[key]
	switch {
	case t == nil && len(q.tasks) >= maxTasks:
		return // the next judging asks again
	case t == nil:
		t = &task{id: newID(), key: key, since: now}
		q.tasks[key] = t
	case t.state == rebuildRunning:
		again := w
		again.request = nil
		t.again = &again // the libraries may have changed under it
		return
	case t.state == rebuildQueued:
		t.refresh = t.refresh || w.refresh
		q.hold(t, w.request, now)
		return
	case t.state == rebuildWaiting && !q.hold(t, w.request, now) && now.Before(t.after):
		return
	case t.state == rebuildFailed && now.Before(t.after) && t.sameLibraries():
		return
	default:
		t.tries = 0
	}
	t.build, t.model, t.why, t.runtime, t.refresh = w.build.ID, w.build.ModelName, w.why, w.runtime, w.refresh
	t.state, t.text, t.after = rebuildQueued, "", now.Add(w.delay)
	q.hold(t, w.request, now)
	q.wakeLocked()
}

// sameLibraries tells whether the runtime is, as far as is known, what it was at the last try.
func (t *task) sameLibraries() bool {
	if t.runtime == nil || t.rc == nil {
		return true
	}
	rc := t.runtime.facts.Load()
	return rc == nil || rc.same(t.rc)
}

// hold keeps a request's files for a task that is going to run soon, if that can be. The caller holds mu.
func (q *rebuilds) hold(t *task, r *Request, now time.Time) bool {
	if t.request != nil {
		return true
	}
	if r == nil || q.held >= maxHeld || len(r.descriptors()) > maxHeldFiles || q.limits().window.opens(now) > 0 {
		return false
	}
	own, err := r.own()
	if err != nil {
		q.c.log.Warn("a request's files cannot be held", "model", r.Name, "error", err)
		return false
	}
	t.request, t.heldTill = own, now.Add(holdFor)
	q.held++
	return true
}

// release gives the files of the task's request back.
func (q *rebuilds) release(t *task) {
	if t.request == nil {
		return
	}
	t.request.close()
	t.request = nil
	q.held--
}

// made tells the queue of a build that was published: whoever waited for a request has had it.
func (q *rebuilds) made(b *index.Build) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for key, t := range q.tasks {
		if key.request == b.RequestKey && key.scope == b.Scope && t.state == rebuildWaiting {
			delete(q.tasks, key)
		}
	}
}

// Rebuild is a build that is being made anew, or waits for that.
type Rebuild struct {
	ID           string // of its job
	RequestKey   index.RequestKey
	Scope        string
	Build        index.BuildID // the one that asked for it
	ModelName    string
	Runtime      string // its name; "" where it is not decided yet
	Why          string
	State        string // "queued", "running", "waiting" for a request that brings the model, "failed"
	Text         string // why it waits, or what went wrong
	Since, After time.Time
	Tries        int
}

func (t *task) told() Rebuild {
	return Rebuild{ID: t.id, RequestKey: t.key.request, Scope: t.key.scope, Build: t.build, ModelName: t.model, Runtime: t.key.runtime,
		Why: t.why, State: t.state, Text: t.text, Since: t.since, After: t.after, Tries: t.tries}
}

// list gives what is queued and what waits, in the order in which it came.
func (q *rebuilds) list() []Rebuild {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := make([]Rebuild, 0, len(q.tasks))
	for _, t := range q.tasks {
		out = append(out, t.told())
	}
	slices.SortFunc(out, func(a, b Rebuild) int {
		return cmp.Or(a.Since.Compare(b.Since), slices.Compare(a.RequestKey[:], b.RequestKey[:]))
	})
	return out
}
