package index

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cas"
)

// turn is a lock that knows for how long those who retract builds have held
// it, and so for how much of a wait they are to blame.
type turn struct {
	mu    sync.Mutex
	since time.Time    // when who retracts took it; zero: somebody else has it; guarded by mu
	held  atomic.Int64 // nanoseconds, by all who retracted
}

// lock takes the turn; waits takes in how long that was on account of who
// retracts.
func (t *turn) lock(waits *cas.Waits) {
	if t.mu.TryLock() {
		return
	}
	before, wait := t.held.Load(), waits.Begin()
	t.mu.Lock()
	// Who held it when we came may have held it for a while already.
	if held := time.Duration(t.held.Load() - before); held > 0 {
		wait.End(min(held, wait.Wall()), min(held, wait.Worked(0)))
	}
}

// lockToRetract is lock for who retracts a build.
func (t *turn) lockToRetract() {
	t.mu.Lock()
	t.since = time.Now()
}

func (t *turn) unlock() {
	if !t.since.IsZero() {
		t.held.Add(int64(time.Since(t.since)))
		t.since = time.Time{}
	}
	t.mu.Unlock()
}
