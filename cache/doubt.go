package cache

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/index"
)

// doubts are the builds that are withheld from single users, who reported that they do not load. They are kept in
// memory only: after a restart such a build is served, and reported, once more.
type doubts struct {
	now   func() time.Time
	any   atomic.Int64 // how many there are: a hit looks no further when there are none
	mu    sync.Mutex
	about map[index.BuildID]map[uint32]doubt // by uid; guarded by mu
	of    map[uint32]int                     // by owner, how many; guarded by mu
}

type doubt struct {
	owner   uint32
	request index.RequestKey
	why     string
	counts  bool // towards the quorum
	until   time.Time
}

const (
	doubtHolds    = 24 * time.Hour
	doubtsPerUser = 256
	maxDoubts     = 1 << 14
)

func newDoubts(now func() time.Time) *doubts {
	return &doubts{now: now, about: make(map[index.BuildID]map[uint32]doubt), of: make(map[uint32]int)}
}

// add withholds a build from a user; false says that there are too many doubts already.
func (ds *doubts) add(b *index.Build, uid, owner uint32, why string, counts bool) bool {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	if _, again := ds.about[b.ID][uid]; !again && (ds.of[owner] >= doubtsPerUser || ds.any.Load() >= maxDoubts) {
		ds.expire()
		if ds.of[owner] >= doubtsPerUser || ds.any.Load() >= maxDoubts {
			return false
		}
	}
	ds.remove(b.ID, uid)
	if ds.about[b.ID] == nil {
		ds.about[b.ID] = make(map[uint32]doubt)
	}
	ds.about[b.ID][uid] = doubt{owner: owner, request: b.RequestKey, why: why, counts: counts, until: ds.now().Add(doubtHolds)}
	ds.of[owner]++
	ds.any.Add(1)
	return true
}

// holds says why the build is withheld from the user, "" if it is not.
func (ds *doubts) holds(id index.BuildID, uid uint32) string {
	if ds.any.Load() == 0 {
		return ""
	}
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d, ok := ds.about[id][uid]
	if !ok || ds.now().After(d.until) {
		return ""
	}
	return d.why
}

// drop ends a user's doubt.
func (ds *doubts) drop(id index.BuildID, uid uint32) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.remove(id, uid)
}

// answer ends the doubt of a user whose runtime the build was tried with. Those of others stay theirs, for they may have
// another runtime, but as it was tried at all they do not count towards the quorum any more.
func (ds *doubts) answer(id index.BuildID, uid uint32) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.remove(id, uid)
	for other, d := range ds.about[id] {
		d.counts = false
		ds.about[id][other] = d
	}
}

// settle ends all doubts about a build: it was found out how it is.
func (ds *doubts) settle(id index.BuildID) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	for uid := range ds.about[id] {
		ds.remove(id, uid)
	}
}

// owners counts the distinct owners whose doubts about the build count.
func (ds *doubts) owners(id index.BuildID) int {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	distinct := make(map[uint32]bool)
	for _, d := range ds.about[id] {
		if d.counts && !ds.now().After(d.until) {
			distinct[d.owner] = true
		}
	}
	return len(distinct)
}

// rounds counts the builds of the request that are withheld from the user.
func (ds *doubts) rounds(request index.RequestKey, uid uint32) int {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	n := 0
	for _, by := range ds.about {
		if d, ok := by[uid]; ok && d.request == request && !ds.now().After(d.until) {
			n++
		}
	}
	return n
}

// remove takes one out. The caller holds mu.
func (ds *doubts) remove(id index.BuildID, uid uint32) {
	d, ok := ds.about[id][uid]
	if !ok {
		return
	}
	delete(ds.about[id], uid)
	if len(ds.about[id]) == 0 {
		delete(ds.about, id)
	}
	if ds.of[d.owner]--; ds.of[d.owner] == 0 {
		delete(ds.of, d.owner)
	}
	ds.any.Add(-1)
}

// expire takes out what is over. The caller holds mu.
func (ds *doubts) expire() {
	for id, by := range ds.about {
		for uid, d := range by {
			if ds.now().After(d.until) {
				ds.remove(id, uid)
			}
		}
	}
}
