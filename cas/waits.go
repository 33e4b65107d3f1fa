package cas

import (
	"sync"
	"sync/atomic"
	"time"
)

// Waits are those of requests for who makes room: for a blob that is being
// removed, a build that is being retracted, a place that is being made. How
// long one took by the clock on the wall does not tell what was waited for:
// where there are more processes than processors, both sides may have waited
// for one of these most of the time. So beside that stands how long who makes
// room worked meanwhile, in processor time. The zero Waits is ready; a nil one
// notes nothing.
type Waits struct {
	mu      sync.Mutex
	workers map[int]*worker // by thread id; guarded by mu
	done    time.Duration   // by those that are not at work any more; guarded by mu

	wall, worked atomic.Int64 // nanoseconds: the longest
}

// worker is a thread at work.
type worker struct {
	began time.Duration // on the thread's clock
	calls int           // of Work, one within the other
}

// Work counts what the calling goroutine does until done, which it calls
// itself, as work that others may wait for. The goroutine has a thread of its
// own until then.
func (w *Waits) Work() (done func()) {
	if w == nil {
		return func() {}
	}
	id, unlock := lockThread()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.workers == nil {
		w.workers = make(map[int]*worker)
	}
	one := w.workers[id]
	if one == nil {
		one = &worker{began: threadTime(id)}
		w.workers[id] = one
	}
	one.calls++
	return func() {
		w.mu.Lock()
		if one.calls--; one.calls == 0 {
			delete(w.workers, id)
			w.done += threadTime(id) - one.began
		}
		w.mu.Unlock()
		unlock()
	}
}

// Working reports whether the calling goroutine is within Work. What it has
// others do for it counts if these call Work too.
func (w *Waits) Working() bool {
	if w == nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.workers) > 0 && w.workers[thread()] != nil
}

// Spent returns the processor time of all such work so far.
func (w *Waits) Spent() time.Duration {
	if w == nil {
		return 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	sum := w.done
	for id, one := range w.workers {
		sum += threadTime(id) - one.began
	}
	return sum
}

// Wait is one wait.
type Wait struct {
	w     *Waits
	began time.Time
	spent time.Duration
}

// Begin begins to wait.
func (w *Waits) Begin() Wait { return Wait{w, time.Now(), w.Spent()} }

// Wall returns for how long.
func (x Wait) Wall() time.Duration { return time.Since(x.began) }

// Worked returns how much of Work was done meanwhile, up to the moment at
// which Spent was until; 0: up to now.
func (x Wait) Worked(until time.Duration) time.Duration {
	if until == 0 {
		until = x.w.Spent()
	}
	return max(until-x.spent, 0)
}

// End notes how long it took, by the clock on the wall, and in work.
func (x Wait) End(wall, worked time.Duration) {
	if x.w != nil {
		longest(&x.w.wall, wall)
		longest(&x.w.worked, worked)
	}
}

// Longest returns the longest wait by the clock on the wall, and the most that
// was worked during one. They need not be those of one wait.
func (w *Waits) Longest() (wall, worked time.Duration) {
	return time.Duration(w.wall.Load()), time.Duration(w.worked.Load())
}

func longest(of *atomic.Int64, d time.Duration) {
	for {
		now := of.Load()
		if int64(d) <= now || of.CompareAndSwap(now, int64(d)) {
			return
		}
	}
}
