package upkeep

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/epcached/epcached/cache/jobs"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
)

// RebuildRequest asks for a rebuild of a build that no client waits for.
type RebuildRequest struct {
	Build   *index.Build // its request is compiled again, into the build's own scope
	Why     string       // for people and for the history: "the SDK is 1.8.1 now"
	Runtime string       // name of the runtime that it is compiled for; "": Compile chooses
	Compile Compile      // compiles the source that is recorded in the build

	// Asked is a request that the build answers. Its files are used if no source is kept; nil:
	// there is none. The caller closes them.
	Asked *request.Request

	// Refresh compiles even if the current libraries made the build, because it is too old, or
	// because they recommend a recompile.
	Refresh bool

	// Delay is how long the rebuild waits at least, because a request is probably about to compile
	// the same model.
	Delay time.Duration
}

// Compile compiles a build again and publishes it. asked has a request's files, or is nil.
type Compile func(ctx context.Context, what Rebuild, asked *request.Request) Outcome

// Outcome is the result of a Compile.
type Outcome struct {
	CPU time.Duration // processor time that the workers took

	// Same reports whether the runtime's libraries are still those of this try. It is nil if they
	// were not determined.
	Same func() bool

	Err error // nil if published; may wrap ErrNotNeeded or ErrNoSource
}

// Options are the dependencies of Rebuilds.
type Options struct {
	Limits func() Limits // in effect now
	// last use of a build, and its number of hits
	LastUse func(index.BuildID) (at time.Time, n uint64)
	// Busy reports whether a request waits for a compile.
	Busy func() bool
	Now  func() time.Time
	Log  *slog.Logger
}

// Rebuilds compile builds again in the background: one at a time by default, the most used first,
// only while no request waits for a compile, only at the configured times of day, and within a
// share of the processor. The compiles are ordinary jobs: a request for the same build joins the
// job and makes it urgent, and a request for another build does not wait for it.
//
// The queue is in memory only, because after a restart the builds are judged again, which queues
// them again.
//
// A build with a missing or changed source waits for its next request. A failed rebuild is
// retried a few times with a growing delay, and later only if the runtime's libraries have changed
// or a day has passed.
//
// The zero value queues nothing before Start.
type Rebuilds struct {
	options Options
	ctx     context.Context // context of the compiles
	work    sync.WaitGroup

	mu             sync.Mutex // guards the fields below
	serving        int        // running worker goroutines, some perhaps above the limit and idle
	closed         bool
	tasks          map[taskKey]*task
	tasksWithFiles int           // tasks that hold a request's files
	changed        chan struct{} // closed and replaced when a task may have become ready
}

// taskKey: one build of a request, scope and runtime is compiled at a time.
type taskKey struct {
	request index.RequestKey
	scope   string
	runtime string // its name; "" if the wish left it open
}

// task is an entry of the queue.
type task struct {
	Rebuild
	compile     Compile
	request     *request.Request // with duplicates of its files; may be nil
	keepUntil   time.Time
	same        func() bool     // Outcome.Same of the last try that set it
	nextRequest *RebuildRequest // arrived while the task was running
}

// The states of a Rebuild.
const (
	Queued  = "queued"
	Running = "running"
	Waiting = "waiting" // for a request, because there is no source
	Failed  = "failed"
)

const (
	maxTries   = 3
	giveUpTime = 24 * time.Hour
	// interval of looking again for a missing source
	retryInterval = time.Hour
	// a request's files are held so long at most, because open files keep file systems mounted
	keepFilesFor      = 5 * time.Minute
	maxTasksWithFiles = 16 // tasks that hold a request's files
	maxOpenFiles      = 64 // files of one task
	maxTasks          = 1 << 16
	longestWait       = time.Minute // of a timer, because clocks are set and machines sleep
)

// Backoff returns how long to wait before the next retry, after tries failures.
func Backoff(tries int) time.Duration {
	pause := time.Minute
	for range tries - 1 {
		pause *= 10
	}
	return pause
}

// Enqueue queues a rebuild. It returns at once, and may be called for each hit: a rebuild that is
// queued already, or failed recently with the same libraries, is not queued again.
func (q *Rebuilds) Enqueue(w RebuildRequest) {
	if q.ctx == nil || q.options.Limits().Off {
		return
	}
	now := q.options.Now()
	key := taskKey{request: w.Build.RequestKey, scope: w.Build.Scope, runtime: w.Runtime}
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.tasks[key]
	switch {
	case t == nil && len(q.tasks) >= maxTasks:
		return // the next judgement queues it again
	case t == nil:
		t = &task{Rebuild: Rebuild{ID: jobs.NewID(), RequestKey: key.request, Scope: key.scope,
			Runtime: key.runtime, Since: now}}
		q.tasks[key] = t
	case t.State == Running:
		again := w
		again.Asked = nil
		t.nextRequest = &again // the libraries may have changed since the task began
		return
	case t.State == Queued:
		t.Refresh = t.Refresh || w.Refresh
		q.keepFiles(t, &w, now)
		return
	case t.State == Waiting && !q.keepFiles(t, &w, now) && now.Before(t.After):
		return
	case t.State == Failed && now.Before(t.After) && t.sameLibraries():
		return
	default:
		t.Tries = 0
	}
	t.Build, t.ModelName, t.Why = w.Build.ID, w.Build.ModelName, w.Why
	t.compile, t.Refresh = w.Compile, w.Refresh
	t.State, t.Text, t.After = Queued, "", now.Add(w.Delay)
	q.keepFiles(t, &w, now)
	q.wakeLocked()
}

// sameLibraries reports whether the runtime has the libraries of the last try, as far as is known.
func (t *task) sameLibraries() bool { return t.same == nil || t.same() }

// keepFiles keeps a request's files open for a task that runs soon, if possible. mu is held.
func (q *Rebuilds) keepFiles(t *task, w *RebuildRequest, now time.Time) bool {
	if t.request != nil {
		return true
	}
	if w.Asked == nil || q.tasksWithFiles >= maxTasksWithFiles ||
		len(w.Asked.Descriptors()) > maxOpenFiles ||
		q.options.Limits().window.untilOpen(now) > 0 {
		return false
	}
	own, err := w.Asked.WithOwnFiles()
	if err != nil {
		q.options.Log.Warn("cannot keep a request's files open", "model", t.ModelName, "error", err)
		return false
	}
	t.request, t.compile, t.keepUntil = own, w.Compile, now.Add(keepFilesFor)
	q.tasksWithFiles++
	return true
}

// closeFiles closes the files that the task holds.
func (q *Rebuilds) closeFiles(t *task) {
	if t.request != nil {
		t.request.Close()
		t.request = nil
		q.tasksWithFiles--
	}
}

// NotePublished reports a published build to the queue: a rebuild that waits for a request is done.
func (q *Rebuilds) NotePublished(b *index.Build) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for key, t := range q.tasks {
		if key.request == b.RequestKey && key.scope == b.Scope && t.State == Waiting {
			delete(q.tasks, key)
		}
	}
}

// Rebuild describes a queued, running, waiting or failed rebuild.
type Rebuild struct {
	ID         string // of its job
	RequestKey index.RequestKey
	Scope      string
	Build      index.BuildID // the build to be replaced
	ModelName  string
	Runtime    string // its name; "" where it is not decided yet
	Why        string
	Refresh    bool // see RebuildRequest
	// "queued", "running", "waiting" for a request that brings the model, "failed"
	State        string
	Text         string    // why it waits, or its error
	Since, After time.Time // when it was queued, and when it may be tried next
	Tries        int
}

// List returns the rebuilds that are queued, running, waiting or failed, the oldest first.
func (q *Rebuilds) List() []Rebuild {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := make([]Rebuild, 0, len(q.tasks))
	for _, t := range q.tasks {
		out = append(out, t.Rebuild)
	}
	slices.SortFunc(out, func(a, b Rebuild) int {
		return cmp.Or(a.Since.Compare(b.Since), slices.Compare(a.RequestKey[:], b.RequestKey[:]))
	})
	return out
}

// Waiting returns the builds with rebuilds that wait for a request that brings the model.
func (q *Rebuilds) Waiting() map[index.BuildID]bool {
	out := make(map[index.BuildID]bool)
	for _, r := range q.List() {
		if r.State == Waiting {
			out[r.Build] = true
		}
	}
	return out
}

// Drop removes a rebuild from the queue unless it is running, and reports whether it was queued. A
// later Enqueue queues it again.
func (q *Rebuilds) Drop(id string) bool {
	return q.drop(func(t *task) bool { return t.ID == id })
}

// DropAll removes all rebuilds that are not running.
func (q *Rebuilds) DropAll() { q.drop(func(*task) bool { return true }) }

func (q *Rebuilds) drop(which func(*task) bool) (any bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for key, t := range q.tasks {
		if t.State == Queued && which(t) {
			q.closeFiles(t)
			delete(q.tasks, key)
			any = true
		}
	}
	return any
}

// ByID returns the rebuild with that id, nil if there is none.
func (q *Rebuilds) ByID(id string) *Rebuild {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, t := range q.tasks {
		if t.ID == id {
			r := t.Rebuild
			return &r
		}
	}
	return nil
}

// RebuildOptions limit the rebuilds.
type RebuildOptions struct {
	Off      bool
	Jobs     int     // concurrent rebuilds; 0: 1
	CPUShare float64 // seconds of processor time per second and job; 0: 0.5
	Window   string  // local time of day, "22:00-06:00"; "": always
}

// Limits are RebuildOptions with the defaults filled in.
type Limits struct {
	RebuildOptions
	window window
}

// Limits checks the options.
func (o RebuildOptions) Limits() (Limits, error) {
	l := Limits{RebuildOptions: o}
	l.Jobs, l.CPUShare = cmp.Or(o.Jobs, 1), cmp.Or(o.CPUShare, 0.5)
	if l.Jobs < 0 || !(l.CPUShare > 0) {
		return l, fmt.Errorf("rebuilds: %d jobs with a share of %v of the processor: both must "+
			"be above zero", o.Jobs, o.CPUShare)
	}
	var err error
	l.window, err = parseWindow(o.Window)
	return l, err
}

// window is a range of times of day, over midnight if end is not after begin. The zero value is
// always open.
type window struct {
	begin, end time.Duration // since midnight, in local time
}

func parseWindow(text string) (window, error) {
	if text == "" {
		return window{}, nil
	}
	from, to, _ := strings.Cut(text, "-")
	begin, err := timeOfDay(from)
	end, err2 := timeOfDay(to)
	if cmp.Or(err, err2) == nil {
		return window{begin, end}, nil
	}
	return window{}, fmt.Errorf("rebuilds: window %q is not of the form 22:00-06:00", text)
}

func timeOfDay(text string) (time.Duration, error) {
	t, err := time.Parse("15:04", strings.TrimSpace(text))
	if err != nil {
		return 0, err
	}
	return time.Duration(t.Hour())*time.Hour + time.Duration(t.Minute())*time.Minute, nil
}

// untilOpen returns how long it is until the window opens, 0 if it is open. It follows the local
// clock over changes of daylight saving time.
func (w window) untilOpen(now time.Time) time.Duration {
	if w.begin == w.end {
		return 0
	}
	clock := time.Duration(now.Hour()*3600+now.Minute()*60+now.Second()) * time.Second
	open := clock >= w.begin && clock < w.end
	if w.end < w.begin {
		open = clock >= w.begin || clock < w.end
	}
	if open {
		return 0
	}
	y, m, d := now.Date()
	begin := time.Date(y, m, d, 0, int(w.begin/time.Minute), 0, 0, now.Location())
	if !begin.After(now) {
		begin = time.Date(y, m, d+1, begin.Hour(), begin.Minute(), 0, 0, now.Location())
	}
	return max(begin.Sub(now), time.Second)
}
