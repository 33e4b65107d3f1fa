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

// RebuildRequest asks for a build to be compiled again, though no request waits for that.
type RebuildRequest struct {
	Build   *index.Build // its request is compiled again, into the build's own scope
	Why     string       // for people and for the history: "the SDK is 1.8.1 now"
	Runtime string       // name of the runtime that it is compiled for; "": Compile chooses
	Compile Compile      // of the source that is kept with the build

	// Asked is a request that the build answers. Its files are used if no source is kept; nil:
	// there is none. They stay the caller's to close.
	Asked *request.Request

	// Refresh compiles also if the current libraries made the build and nothing is known against
	// it: it is too old, or they do not consider it the best any more.
	Refresh bool

	// Delay is how long the rebuild waits at least, because a request is about to compile the same.
	Delay time.Duration
}

// Compile compiles a build again and publishes it. asked has a request's files, or is nil.
type Compile func(ctx context.Context, what Rebuild, asked *request.Request) Outcome

// Outcome is the result of a Compile.
type Outcome struct {
	CPU time.Duration // processor time that the workers took

	// Same reports whether the runtime's libraries still are those that were tried, as far as is
	// known. nil: they were not determined.
	Same func() bool

	Err error // nil: published. ErrNotNeeded and ErrNoSource have meanings of their own.
}

// Options are what rebuilds need of the cache.
type Options struct {
	Limits  func() Limits                                // in effect now
	LastUse func(index.BuildID) (at time.Time, n uint64) // of a build, with the number of its hits
	// reports whether a request waits for a compile
	Busy func() bool
	Now  func() time.Time
	Log  *slog.Logger
}

// Rebuilds compile builds again in the background: one at a time by default, the most used first,
// only while no request waits for a compile, only at the configured times of day, and within a
// share of the processor. The compiles are ordinary jobs: a request for the same build joins, and
// makes the job urgent. A request for another build does not wait.
//
// The queue is in memory, because after a start the builds are judged, and asked for, again.
//
// A build without a source, or with another one by now, waits for its next request. A failed
// rebuild is retried a few times with a growing delay, and later only if the runtime's libraries
// have changed or a day has passed.
//
// The zero value queues nothing. Start makes it work.
type Rebuilds struct {
	options Options
	ctx     context.Context // of the work
	work    sync.WaitGroup

	mu             sync.Mutex // guards the rest
	serving        int        // goroutines that work on tasks, or would if there were as many jobs
	closed         bool
	tasks          map[taskKey]*task
	tasksWithFiles int           // tasks that hold a request's files
	changed        chan struct{} // closed and replaced when there may be something to do
}

// taskKey: one build of a request, scope and runtime is compiled at a time.
type taskKey struct {
	request index.RequestKey
	scope   string
	runtime string // its name; "" if the wish left it open
}

// task is a wish in the queue.
type task struct {
	Rebuild
	compile     Compile
	request     *request.Request // with duplicates of its files; nil: none is held
	keepUntil   time.Time
	same        func() bool     // Outcome.Same of the last try that got so far
	nextRequest *RebuildRequest // arrived while the task was running
}

// The states of a Rebuild.
const (
	Queued  = "queued"
	Running = "running"
	Waiting = "waiting" // for a request: there is no source
	Failed  = "failed"
)

const (
	maxTries   = 3
	giveUpTime = 24 * time.Hour
	// before a source that was not there is looked for again without a request
	retryInterval = time.Hour
	// a request's files: held for longer they would keep file systems mounted
	keepFilesFor      = 5 * time.Minute
	maxTasksWithFiles = 16 // requests with files that are held
	maxOpenFiles      = 64 // of one of them
	maxTasks          = 1 << 16
	longestWait       = time.Minute // of a timer: clocks are set, and machines sleep
)

// Backoff returns how long to wait after so many failures.
func Backoff(tries int) time.Duration {
	pause := time.Minute
	for range tries - 1 {
		pause *= 10
	}
	return pause
}

// Enqueue queues a rebuild. It returns at once, and may be called for each hit: a rebuild that is
// queued already, or failed lately with the same libraries, is not queued again.
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
		return // the next judging asks again
	case t == nil:
		t = &task{Rebuild: Rebuild{ID: jobs.NewID(), RequestKey: key.request, Scope: key.scope,
			Runtime: key.runtime, Since: now}}
		q.tasks[key] = t
	case t.State == Running:
		again := w
		again.Asked = nil
		t.nextRequest = &again // the libraries may have changed under it
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

// sameLibraries reports whether the runtime is, as far as is known, what it was at the last try.
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

// Rebuild is a build that is being compiled again, or waits for that.
type Rebuild struct {
	ID         string // of its job
	RequestKey index.RequestKey
	Scope      string
	Build      index.BuildID // the one that asked for it
	ModelName  string
	Runtime    string // its name; "" where it is not decided yet
	Why        string
	Refresh    bool // see RebuildRequest
	// "queued", "running", "waiting" for a request that brings the model, "failed"
	State        string
	Text         string    // why it waits, or what went wrong
	Since, After time.Time // queued, and not tried again before
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

// Drop removes a rebuild from the queue unless it is running, and reports whether it was there. It
// comes back when it is wanted again.
func (q *Rebuilds) Drop(id string) bool {
	return q.drop(func(t *task) bool { return t.ID == id })
}

// DropAll removes all of them, unless they are running.
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

// RebuildOptions bound the compiles that no request waits for.
type RebuildOptions struct {
	Off      bool
	Jobs     int     // at the same time; 0: 1
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

// window is a time of day, over midnight where end is not after begin. The zero value is always.
type window struct {
	begin, end time.Duration // since midnight, by the clock on the wall
}

func parseWindow(text string) (window, error) {
	if text == "" {
		return window{}, nil
	}
	from, to, ok := strings.Cut(text, "-")
	if begin, err := timeOfDay(from); err == nil && ok {
		var end time.Duration
		if end, err = timeOfDay(to); err == nil {
			return window{begin, end}, nil
		}
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

// untilOpen returns how long it is until the window is open; 0: it is. Days that are longer or
// shorter because the clocks were changed are taken as the clocks show them.
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
