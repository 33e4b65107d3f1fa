package store

import (
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// ErrGone says that a build was removed between the look-up that found it and its being served.
var ErrGone = errors.New("the build has just been removed")

// inHand keeps requests and the collector from having the same build in hand: whichever comes first
// has it, and neither waits. A request that comes second finds no build; a collector that does
// leaves it alone.
type inHand struct {
	mu     sync.Mutex
	served map[index.BuildID]int   // requests that are making sure of a view; guarded by mu
	fresh  map[index.BuildID]fresh // stored just now; guarded by mu
	going  map[index.BuildID]bool  // being collected; guarded by mu
}

type fresh struct {
	until  time.Time
	takers int // requests that waited and have not taken it yet
}

// freshFor bounds how long requests that waited for a compile have to take its result.
const freshFor = 10 * time.Second

func newInHand() *inHand {
	return &inHand{served: make(map[index.BuildID]int), fresh: make(map[index.BuildID]fresh), going: make(map[index.BuildID]bool)}
}

// Take takes a build in hand for a request until done. ErrGone: the collector is removing it.
func (a *inHand) Take(id index.BuildID) (done func(), err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.going[id] {
		return nil, ErrGone
	}
	a.served[id]++
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.served[id]--; a.served[id] == 0 {
			delete(a.served, id)
		}
	}, nil
}

// stored notes a build that is about to be published.
func (a *inHand) stored(id index.BuildID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(a.fresh, func(_ index.BuildID, f fresh) bool { return f.until.Before(now) })
	a.fresh[id] = fresh{until: now.Add(freshFor)}
}

// Expect says how many requests waited for a build that was stored: the collector leaves it alone
// until all of them have it.
func (a *inHand) Expect(id index.BuildID, takers int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if takers == 0 {
		delete(a.fresh, id)
		return
	}
	a.fresh[id] = fresh{time.Now().Add(freshFor), takers} // also one that was found, and not stored just now
}

// Taken says that one of the requests that waited for a build has it, or never will.
func (a *inHand) Taken(id index.BuildID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f := a.fresh[id]
	if f.takers--; f.takers <= 0 {
		delete(a.fresh, id)
		return
	}
	a.fresh[id] = f
}

// busy tells whether a request has the build in hand, or is about to.
func (a *inHand) busy(id index.BuildID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.busyNow(id)
}

func (a *inHand) busyNow(id index.BuildID) bool {
	return a.served[id] > 0 || time.Now().Before(a.fresh[id].until)
}

// evict takes a build in hand for the collector until done, or says why it stays.
func (a *inHand) evict(id index.BuildID) (done func(), why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.going[id]:
		return nil, KeptGone
	case a.busyNow(id):
		return nil, KeptInUse
	}
	a.going[id] = true
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.going, id)
	}, ""
}

// GoneMeanwhile returns ErrGone for an error of serving a build that was removed meanwhile, and
// other errors as they are.
func (st *Store) GoneMeanwhile(id index.BuildID, err error) error {
	if !errors.Is(err, cas.ErrNotFound) {
		return err
	}
	if _, getErr := st.index.Get(id); errors.Is(getErr, index.ErrNotFound) {
		return ErrGone
	}
	return err
}
