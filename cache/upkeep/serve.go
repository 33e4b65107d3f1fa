// Package upkeep does work in the background that no request waits for. Rebuilds queues builds to
// compile again, and a Recompiler compiles them while no request needs the machine. Gains measures
// the time that builds save.
//
// The package is safe for concurrent use.
package upkeep

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/workspace"
	"github.com/epcached/epcached/index"
)

// Start starts the workers, which run until the context ends.
func (q *Rebuilds) Start(ctx context.Context, o Options) {
	q.options, q.ctx, q.tasks, q.changed = o, ctx, make(map[taskKey]*task), make(chan struct{})
	q.ApplyLimits()
}

// ApplyLimits applies changed limits. Running rebuilds continue. If rebuilds are switched off, the
// queued ones are dropped.
func (q *Rebuilds) ApplyLimits() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	limits := q.options.Limits()
	if limits.Off {
		for key, t := range q.tasks {
			if t.State != Running {
				q.closeFiles(t)
				delete(q.tasks, key)
			}
		}
	}
	for ; !limits.Off && q.serving < limits.Jobs; q.serving++ {
		number := q.serving
		q.work.Go(func() { q.worker(number) })
	}
	q.wakeLocked()
}

// Close waits for the work to end, after its context has, and closes the files that are held.
func (q *Rebuilds) Close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.work.Wait()
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, t := range q.tasks {
		q.closeFiles(t)
	}
}

// Changes returns a channel that is closed when the queue, or what it waits for, has changed.
func (q *Rebuilds) Changes() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.changed
}

// Wake makes the workers look at the queue again, because a request that they waited for has ended.
func (q *Rebuilds) Wake() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.wakeLocked()
}

func (q *Rebuilds) wakeLocked() {
	close(q.changed)
	q.changed = make(chan struct{})
}

// worker runs tasks one after the other, while the limit of jobs is above its number.
func (q *Rebuilds) worker(number int) {
	ctx := q.ctx
	var rest time.Time // no task begins before
	for ctx.Err() == nil {
		changed := q.Changes()
		if limits := q.options.Limits(); limits.Off || number >= limits.Jobs {
			sleepUntil(ctx, 0, changed)
			continue
		}
		t, wait, changed := q.next(rest)
		if t == nil {
			sleepUntil(ctx, wait, changed)
			continue
		}
		began := q.options.Now()
		cpu := q.run(ctx, t)
		rest = began.Add(time.Duration(float64(cpu) / q.options.Limits().CPUShare))
	}
}

// sleepUntil blocks until changed is closed, at most for wait unless that is 0.
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

// next takes the next task. If there is none it returns how long to wait, 0 for until changed is
// closed.
func (q *Rebuilds) next(rest time.Time) (t *task, wait time.Duration, changed <-chan struct{}) {
	now := q.options.Now()
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
	if wait = q.options.Limits().window.untilOpen(now); wait > 0 || q.options.Busy() {
		return nil, wait, changed // 0 if it is busy: until a change
	}
	q.byUse(ready)
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, one := range ready {
		if one.task.State == Queued { // no other worker has taken it
			one.task.State = Running
			return one.task, 0, changed
		}
	}
	return nil, time.Millisecond, changed // other workers took all tasks: look again
}

// ready lists the tasks that may run. wait is how long until another one may. The caller holds mu.
func (q *Rebuilds) ready(now time.Time) (ready []ranked, wait time.Duration) {
	later := func(at time.Time) {
		if d := max(at.Sub(now), time.Millisecond); wait == 0 || d < wait {
			wait = d
		}
	}
	for _, t := range q.tasks {
		if t.request != nil && t.State != Running {
			if now.After(t.keepUntil) {
				q.closeFiles(t)
			} else {
				later(t.keepUntil)
			}
		}
		switch {
		case t.State != Queued:
		case t.After.After(now):
			later(t.After)
		default:
			ready = append(ready, ranked{task: t, build: t.Build, since: t.Since})
		}
	}
	return ready, wait
}

// ranked is a task with the figures that its order depends on.
type ranked struct {
	task  *task
	build index.BuildID
	since time.Time
	hits  uint64
	last  time.Time
}

// byUse sorts tasks: most hits first, then the latest used, then the first come.
func (q *Rebuilds) byUse(list []ranked) {
	for i := range list {
		one := &list[i]
		one.last, one.hits = q.options.LastUse(one.build)
	}
	slices.SortFunc(list, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(b.hits, a.hits), b.last.Compare(a.last), a.since.Compare(b.since))
	})
}

// run compiles for a task that next returned, and returns how much processor time that took.
func (q *Rebuilds) run(ctx context.Context, t *task) time.Duration {
	q.mu.Lock()
	compile, what, asked := t.compile, t.Rebuild, t.request
	q.mu.Unlock()
	out := compile(ctx, what, asked)
	q.mu.Lock()
	defer q.mu.Unlock()
	now, err := q.options.Now(), out.Err
	if out.Same != nil {
		t.same = out.Same
	}
	again := t.nextRequest
	t.nextRequest = nil
	switch {
	case ctx.Err() != nil:
		t.State = Queued
		return out.CPU
	case err == nil || errors.Is(err, ErrNotNeeded):
		q.closeFiles(t)
		delete(q.tasks, taskKey{t.RequestKey, t.Scope, t.Runtime})
	case errors.Is(err, workspace.ErrNoSource):
		q.closeFiles(t)
		t.State, t.Text, t.After = Waiting, err.Error(), now.Add(retryInterval)
	case t.Tries+1 >= maxTries:
		q.closeFiles(t)
		t.Tries++
		t.State, t.Text, t.After = Failed, err.Error(), now.Add(giveUpTime)
	default:
		t.Tries++
		t.State, t.Text, t.After = Queued, err.Error(), now.Add(Backoff(t.Tries))
	}
	if again != nil {
		if t.State == Queued && !t.sameLibraries() {
			// the libraries changed after the failure, so retry at once
			t.After, t.Tries = time.Time{}, 0
		}
		q.mu.Unlock()
		q.Enqueue(*again)
		q.mu.Lock()
	}
	return out.CPU
}

// ErrNotNeeded says that the rebuild is no longer needed.
var ErrNotNeeded = errors.New("settled")

// NotNeeded returns an ErrNotNeeded with the reason.
func NotNeeded(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrNotNeeded, fmt.Sprintf(format, args...))
}
