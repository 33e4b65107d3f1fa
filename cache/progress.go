package cache

import (
	"fmt"
	"sync"
	"time"

	"github.com/epcached/epcached/index"
)

// Progress is what a waiting caller is told.
type Progress struct {
	Phase       string // "reading", "queued", "probing", "converting", "compiling", "claimed", "checking", "storing", "verifying", "unpacking", "comparing"
	Detail      string
	Done, Total int64         // bytes, where they are known
	Estimate    time.Duration // of the whole request, from earlier compiles of like size; 0: not known
	Job         string        // that the request waits for; "": none
	Waiting     int           // requests that wait for this job

	Through, Of uint64 // of what goes through the whole store: builds or files that it is through with, and how many there are; 0: not known
}

// farAfter is how many builds or files are gone through between two reports.
const farAfter = 256

// far tells how far something is that goes through the whole store: of so many things, as they are called, or, where of is 0, of it is not known how many.
func far(progress func(Progress), phase, things string, through, of uint64) {
	if progress == nil {
		return
	}
	p := Progress{Phase: phase, Detail: fmt.Sprintf("%d %s", through, things), Through: through, Of: of}
	if of > 0 {
		p.Through = min(through, of)
		p.Detail = fmt.Sprintf("%d of %d %s", p.Through, of, things)
	}
	progress(p)
}

// farThrough is far for the index, of a phase called by its verb and the things that it goes through.
func farThrough(progress func(Progress), verb string) index.Told {
	if progress == nil {
		return nil
	}
	return func(things string, through, of uint64) { far(progress, verb+" "+things, things, through, of) }
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
