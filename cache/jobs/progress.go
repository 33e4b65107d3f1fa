package jobs

import (
	"sync"
	"time"

	"github.com/epcached/epcached/unixsock/wire"
)

// Progress is reported to a waiting caller.
type Progress struct {
	Phase       string // "reading", "queued", "probing", "converting", "compiling", "claimed", "checking", "storing", "verifying", "unpacking", "comparing"
	Detail      string
	Done, Total int64         // bytes, where they are known
	Estimate    time.Duration // of the whole request, from earlier compiles of like size; 0: not known
	Job         string        // that the request waits for; "": none
	Waiting     int           // requests that wait for this job
}

// Telling reports progress to one caller: what is new, and nothing after its end. A nil one reports nothing.
type Telling struct {
	Since    time.Time // when the caller asked
	progress func(Progress)

	mu   sync.Mutex
	last Progress // guarded by mu
	over bool     // guarded by mu
}

// NewTelling returns nil where progress is nil, so that a hit pays for nothing. since is when the caller asked.
func NewTelling(progress func(Progress), since time.Time) *Telling {
	if progress == nil {
		return nil
	}
	return &Telling{Since: since, progress: progress}
}

// Tell reports progress.
func (t *Telling) Tell(p Progress) {
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
func (t *Telling) Phase(name string) { t.Tell(Progress{Phase: name}) }

// End returns after the last report.
func (t *Telling) End() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
}

// Reply is the progress as clients are told of it; the socket adds since when.
func (p *Progress) Reply() *wire.Progress {
	return &wire.Progress{Phase: p.Phase, Detail: wire.Valid(p.Detail), DoneBytes: p.Done,
		TotalBytes: p.Total,
		EstimateMs: p.Estimate.Milliseconds(), Job: p.Job, Waiting: uint32(p.Waiting)}
}
