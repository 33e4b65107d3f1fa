package store

import (
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// ErrRemoved says that a build was removed between the look-up that found it and its being served.
var ErrRemoved = errors.New("the build was removed during the request")

// buildGuard keeps requests and the collector from having the same build in hand: whichever comes
// first has it, and neither waits. A request that comes second finds no build; a collector that
// does leaves it alone.
type buildGuard struct {
	mu       sync.Mutex
	serving  map[index.BuildID]int         // requests that are making sure of a view; guarded by mu
	stored   map[index.BuildID]recentBuild // stored just now; guarded by mu
	evicting map[index.BuildID]bool        // being collected; guarded by mu
}

type recentBuild struct {
	until  time.Time
	takers int // requests that waited and have not taken it yet
}

// storedGrace bounds how long requests that waited for a compile have to take its result.
const storedGrace = 10 * time.Second

func newBuildGuard() *buildGuard {
	return &buildGuard{serving: make(map[index.BuildID]int),
		stored: make(map[index.BuildID]recentBuild), evicting: make(map[index.BuildID]bool)}
}

// BeginServing guards a build for a request until done. ErrRemoved: the collector is removing it.
func (a *buildGuard) BeginServing(id index.BuildID) (done func(), err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.evicting[id] {
		return nil, ErrRemoved
	}
	a.serving[id]++
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.serving[id]--; a.serving[id] == 0 {
			delete(a.serving, id)
		}
	}, nil
}

// noteStored records a build that is about to be published.
func (a *buildGuard) noteStored(id index.BuildID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(a.stored, func(_ index.BuildID, f recentBuild) bool {
		return f.until.Before(now)
	})
	a.stored[id] = recentBuild{until: now.Add(storedGrace)}
}

// ExpectTakers says how many requests waited for a build that was stored: the collector leaves it
// alone until all of them have it.
func (a *buildGuard) ExpectTakers(id index.BuildID, takers int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if takers == 0 {
		delete(a.stored, id)
		return
	}
	// also one that was found, and not stored just now
	a.stored[id] = recentBuild{time.Now().Add(storedGrace), takers}
}

// TakerDone says that one of the requests that waited for a build has it, or never will.
func (a *buildGuard) TakerDone(id index.BuildID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f := a.stored[id]
	if f.takers--; f.takers <= 0 {
		delete(a.stored, id)
		return
	}
	a.stored[id] = f
}

// inUse reports whether a request has the build in hand, or is about to.
func (a *buildGuard) inUse(id index.BuildID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.inUseLocked(id)
}

func (a *buildGuard) inUseLocked(id index.BuildID) bool {
	return a.serving[id] > 0 || time.Now().Before(a.stored[id].until)
}

// beginEviction takes a build in hand for the collector until done, or says why it stays.
func (a *buildGuard) beginEviction(id index.BuildID) (done func(), why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.evicting[id]:
		return nil, KeptRemoved
	case a.inUseLocked(id):
		return nil, KeptInUse
	}
	a.evicting[id] = true
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.evicting, id)
	}, ""
}

// AsErrRemoved returns ErrRemoved for an error of serving a build that was removed meanwhile, and
// other errors as they are.
func (st *Store) AsErrRemoved(id index.BuildID, err error) error {
	if !errors.Is(err, cas.ErrNotFound) {
		return err
	}
	if _, getErr := st.index.Get(id); errors.Is(getErr, index.ErrNotFound) {
		return ErrRemoved
	}
	return err
}
