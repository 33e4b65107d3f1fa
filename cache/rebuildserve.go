package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/index"
)

// pause says why nothing is begun now, and for how long that will last: 0 until something changes. "" is no pause.
func (q *rebuilds) pause(now time.Time) (why string, wait time.Duration) {
	if wait := q.limits().window.opens(now); wait > 0 {
		return "it is not the time of day", wait
	}
	if q.c.flights.busy() {
		return "requests wait for compiles", 0
	}
	return "", 0
}

// start begins the work. It ends with the context.
func (q *rebuilds) start(ctx context.Context, c *Cache) {
	q.c, q.ctx, q.tasks, q.changed = c, ctx, make(map[taskKey]*task), make(chan struct{})
	q.adjust()
}

func (q *rebuilds) limits() rebuildLimits { return q.c.settings.Load().rebuild }

// adjust follows the limits that are in force now. What is being worked on goes on; without rebuilds nothing is queued.
func (q *rebuilds) adjust() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	limits := q.limits()
	if limits.off {
		for key, t := range q.tasks {
			if t.state != rebuildRunning {
				q.release(t)
				delete(q.tasks, key)
			}
		}
	}
	for ; !limits.off && q.serving < limits.jobs; q.serving++ {
		number := q.serving
		q.work.Go(func() { q.serve(number) })
	}
	q.wakeLocked()
}

func (q *rebuilds) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.work.Wait()
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, t := range q.tasks {
		q.release(t)
	}
}

// changes gives what is closed when there may be something to do.
func (q *rebuilds) changes() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.changed
}

func (q *rebuilds) wake() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.wakeLocked()
}

func (q *rebuilds) wakeLocked() {
	close(q.changed)
	q.changed = make(chan struct{})
}

// serve works on one task after the other, as long as there are more jobs than its number.
func (q *rebuilds) serve(number int) {
	ctx := q.ctx
	var rest time.Time // nothing is begun before
	for ctx.Err() == nil {
		changed := q.changes()
		if limits := q.limits(); limits.off || number >= limits.jobs {
			sleepUntil(ctx, 0, changed)
			continue
		}
		t, wait, changed := q.next(rest)
		if t == nil {
			sleepUntil(ctx, wait, changed)
			continue
		}
		began := q.c.now()
		cpu := q.work1(ctx, t)
		rest = began.Add(time.Duration(float64(cpu) / q.limits().share))
	}
}

// sleepUntil waits for a change, and not longer than the wait unless that is 0.
func sleepUntil(ctx context.Context, wait time.Duration, changed <-chan struct{}) {
	var tick <-chan time.Time
	if wait > 0 {
		timer := time.NewTimer(min(wait, longestWait))
		defer timer.Stop()
		tick = timer.C
	}
	select {
	case <-ctx.Done():
	case <-changed:
	case <-tick:
	}
}

// next takes the task that is to be worked on now; without one it says how long there will be none, 0 until changed
// is closed.
func (q *rebuilds) next(rest time.Time) (t *task, wait time.Duration, changed <-chan struct{}) {
	now := q.c.now()
	q.mu.Lock()
	changed = q.changed
	ready, wait := q.ready(now)
	q.mu.Unlock()
	if len(ready) == 0 {
		return nil, wait, changed
	}
	if rest.After(now) {
		return nil, rest.Sub(now), changed
	}
	if why, wait := q.pause(now); why != "" {
		return nil, wait, changed
	}
	q.c.byUse(ready)
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, one := range ready {
		if one.t.state == rebuildQueued { // not another's by now
			one.t.state = rebuildRunning
			return one.t, 0, changed
		}
	}
	return nil, time.Millisecond, changed // all went to others meanwhile: look again
}

// ready lists the tasks that could be worked on. wait is how long until there is another. The caller holds mu.
func (q *rebuilds) ready(now time.Time) (ready []ranked, wait time.Duration) {
	later := func(at time.Time) {
		if d := max(at.Sub(now), time.Millisecond); wait == 0 || d < wait {
			wait = d
		}
	}
	for _, t := range q.tasks {
		if t.request != nil && t.state != rebuildRunning {
			if now.After(t.heldTill) {
				q.release(t)
			} else {
				later(t.heldTill)
			}
		}
		switch {
		case t.state != rebuildQueued:
		case t.after.After(now):
			later(t.after)
		default:
			ready = append(ready, ranked{t: t, build: t.build, since: t.since})
		}
	}
	return ready, wait
}

// ranked is a task with what its place depends on.
type ranked struct {
	t     *task
	build index.BuildID
	since time.Time
	hits  uint64
	last  time.Time
}

// byUse sorts tasks: most hits first, then the latest used, then the first come.
func (c *Cache) byUse(list []ranked) {
	for i := range list {
		one := &list[i]
		one.last, one.hits = c.index.Uses.Last(one.build)
	}
	slices.SortFunc(list, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(b.hits, a.hits), b.last.Compare(a.last), a.since.Compare(b.since))
	})
}

// work1 works on a task that next gave, and says how much processor time that took.
func (q *rebuilds) work1(ctx context.Context, t *task) time.Duration {
	cpu, err := q.c.compileAnew(ctx, t)
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.c.now()
	again := t.again
	t.again = nil
	switch {
	case ctx.Err() != nil:
		t.state = rebuildQueued
		return cpu
	case err == nil || errors.Is(err, errSettled):
		q.release(t)
		delete(q.tasks, t.key)
	case errors.Is(err, errNoSource):
		q.release(t)
		t.state, t.text, t.after = rebuildWaiting, err.Error(), now.Add(askAgain)
	case t.tries+1 >= maxTries:
		q.release(t)
		t.tries++
		t.state, t.text, t.after = rebuildFailed, err.Error(), now.Add(giveUpFor)
	default:
		t.tries++
		t.state, t.text, t.after = rebuildQueued, err.Error(), now.Add(backoff(t.tries))
	}
	if again != nil {
		if t.state == rebuildQueued && !t.sameLibraries() {
			t.after, t.tries = time.Time{}, 0 // it failed of the very change that it is wanted for again
		}
		q.mu.Unlock()
		q.want(*again)
		q.mu.Lock()
	}
	return cpu
}

// errSettled: there is nothing left to do.
var errSettled = errors.New("settled")

func settled(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errSettled, fmt.Sprintf(format, args...))
}

// rebuildLimits are RebuildOptions with the defaults filled in.
type rebuildLimits struct {
	off    bool
	jobs   int
	share  float64 // seconds of processor time per second and job
	window window
}

func (o RebuildOptions) check() (rebuildLimits, error) {
	l := rebuildLimits{off: o.Off, jobs: o.Jobs, share: o.CPUShare}
	if l.jobs == 0 {
		l.jobs = 1
	}
	if l.share == 0 {
		l.share = 0.5
	}
	if l.jobs < 0 || !(l.share > 0) {
		return l, fmt.Errorf("rebuilds: %d jobs with a share of %v of the processor: both have to be above zero", o.Jobs, o.CPUShare)
	}
	var err error
	l.window, err = parseWindow(o.Window)
	return l, err
}

// window is a time of day: from begin until end, over midnight where end is not after begin. The zero value is always.
type window struct {
	begin, end time.Duration // since midnight, by the clock on the wall
}

func parseWindow(text string) (window, error) {
	if text == "" {
		return window{}, nil
	}
	from, to, ok := strings.Cut(text, "-")
	begin, err := timeOfDay(from)
	if err == nil && ok {
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

// opens says how long it is until the window is open; 0: it is. Days that are longer or shorter because the clocks
// were changed are taken as the clocks show them.
func (w window) opens(now time.Time) time.Duration {
	if w.begin == w.end {
		return 0
	}
	clock := time.Duration(now.Hour())*time.Hour + time.Duration(now.Minute())*time.Minute + time.Duration(now.Second())*time.Second
	open := clock >= w.begin && clock < w.end
	if w.end < w.begin {
		open = clock >= w.begin || clock < w.end
	}
	if open {
		return 0
	}
	y, m, d := now.Date()
	begin := time.Date(y, m, d, int(w.begin/time.Hour), int(w.begin%time.Hour/time.Minute), 0, 0, now.Location())
	if !begin.After(now) {
		begin = time.Date(y, m, d+1, begin.Hour(), begin.Minute(), 0, 0, now.Location())
	}
	return max(begin.Sub(now), time.Second)
}
