package cache

import (
	"sync"
	"time"
)

// Progress is what a waiting caller is told.
type Progress struct {
	Phase       string // "reading", "queued", "probing", "converting", "compiling", "claimed", "checking", "storing", "verifying", "unpacking", "comparing"
	Detail      string
	Done, Total int64         // bytes, where they are known
	Estimate    time.Duration // of the whole request, from earlier compiles of like size; 0: not known
	Job         string        // that the request waits for; "": none
	Waiting     int           // requests that wait for this job
}

// telling passes progress on to one caller: what is new, and nothing after its end. A nil one tells nobody.
type telling struct {
	since    time.Time // when the caller asked
	progress func(Progress)

	mu   sync.Mutex
	last Progress // guarded by mu
	over bool     // guarded by mu
}

// newTelling gives nil where there is nobody to tell: a hit pays for nothing then.
func newTelling(progress func(Progress), since time.Time) *telling {
	if progress == nil {
		return nil
	}
	return &telling{since: since, progress: progress}
}

func (t *telling) tell(p Progress) {
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

func (t *telling) phase(name string) { t.tell(Progress{Phase: name}) }

func (t *telling) end() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
}
