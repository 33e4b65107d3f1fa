package store

import (
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// ErrRemoved says that a build was removed after the look-up and before it was served.
var ErrRemoved = errors.New("the build was removed during the request")

// buildGuard prevents a request and the collector from using the same build at the same time. The
// first one gets it, and neither waits for the other: a later request fails with ErrRemoved, and
// the collector skips the build.
type buildGuard struct {
	mu sync.Mutex
	// number of requests that are taking a lease; guarded by mu
	serving  map[index.BuildID]int
	stored   map[index.BuildID]recentBuild // builds stored just now; guarded by mu
	evicting map[index.BuildID]bool        // builds being evicted; guarded by mu
}

type recentBuild struct {
	until  time.Time
	takers int // waiting requests that have not leased it yet
}

// storedGrace is how long a stored build is protected for requests that waited for it.
const storedGrace = 10 * time.Second

func newBuildGuard() *buildGuard {
	return &buildGuard{serving: make(map[index.BuildID]int),
		stored: make(map[index.BuildID]recentBuild), evicting: make(map[index.BuildID]bool)}
}

// BeginServing guards a build for a request until done. It fails with ErrRemoved if the collector
// is removing it.
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

// ExpectTakers records how many requests waited for a stored build. The collector skips it until
// all of them have leased it.
func (a *buildGuard) ExpectTakers(id index.BuildID, takers int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if takers == 0 {
		delete(a.stored, id)
		return
	}
	// also a build that was found and not stored just now
	a.stored[id] = recentBuild{time.Now().Add(storedGrace), takers}
}

// TakerDone records that one of the waiting requests has leased the build, or will not use it.
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

// inUse reports whether a request guards the build or is expected to.
func (a *buildGuard) inUse(id index.BuildID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.inUseLocked(id)
}

func (a *buildGuard) inUseLocked(id index.BuildID) bool {
	return a.serving[id] > 0 || time.Now().Before(a.stored[id].until)
}

// beginEviction guards a build for the collector until done, or returns why it may not be evicted.
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

// AsErrRemoved returns ErrRemoved if err is the error of serving a build that was removed in the
// meantime, and other errors unchanged.
func (st *Store) AsErrRemoved(id index.BuildID, err error) error {
	if !errors.Is(err, cas.ErrNotFound) {
		return err
	}
	if _, getErr := st.index.Get(id); errors.Is(getErr, index.ErrNotFound) {
		return ErrRemoved
	}
	return err
}
