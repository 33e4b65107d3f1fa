package reports

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
)

// doubts are the builds that are withheld from single users, who reported that they do not load. They are kept in
// memory only: after a restart such a build is served, and reported, once more.
type doubts struct {
	now   func() time.Time
	any   atomic.Int64 // how many there are: a hit looks no further when there are none
	mu    sync.Mutex
	known map[doubtKey]doubt // guarded by mu
}

type doubtKey struct {
	build index.BuildID
	uid   uint32
}

type doubt struct {
	owner   uint32
	request index.RequestKey
	why     string
	counts  bool // towards the quorum
	until   time.Time
}

const (
	DoubtHolds    = 24 * time.Hour
	doubtsPerUser = 256
	maxDoubts     = 1 << 14
)

func newDoubts(now func() time.Time) *doubts {
	return &doubts{now: now, known: make(map[doubtKey]doubt)}
}

// add withholds a build from a user; false says that there are too many doubts already.
func (ds *doubts) add(b *index.Build, uid, owner uint32, why string, counts bool) bool {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	key := doubtKey{b.ID, uid}
	if _, again := ds.known[key]; !again && ds.full(owner) {
		ds.delete(func(_ doubtKey, d doubt) bool { return ds.now().After(d.until) })
		if ds.full(owner) {
			return false
		}
	}
	ds.known[key] = doubt{owner: owner, request: b.RequestKey, why: why, counts: counts, until: ds.now().Add(DoubtHolds)}
	ds.any.Store(int64(len(ds.known)))
	return true
}

// full tells whether there may be no other of an owner's. The caller holds mu.
func (ds *doubts) full(owner uint32) bool {
	own := 0
	for _, d := range ds.known {
		if d.owner == owner {
			own++
		}
	}
	return own >= doubtsPerUser || len(ds.known) >= maxDoubts
}

// delete is called with mu held.
func (ds *doubts) delete(which func(doubtKey, doubt) bool) {
	maps.DeleteFunc(ds.known, which)
	ds.any.Store(int64(len(ds.known)))
}

// holds says why the build is withheld from the user, "" if it is not.
func (ds *doubts) holds(id index.BuildID, uid uint32) string {
	if ds.any.Load() == 0 {
		return ""
	}
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d, ok := ds.known[doubtKey{id, uid}]
	if !ok || ds.now().After(d.until) {
		return ""
	}
	return d.why
}

func (ds *doubts) drop(id index.BuildID, uid uint32) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.delete(func(k doubtKey, _ doubt) bool { return k == doubtKey{id, uid} })
}

// answer ends the doubt of a user whose runtime the build was tried with. Those of others stay theirs, for they may have
// another runtime, but as it was tried at all they do not count towards the quorum any more.
func (ds *doubts) answer(id index.BuildID, uid uint32) {
	ds.drop(id, uid)
	ds.mu.Lock()
	defer ds.mu.Unlock()
	for k, d := range ds.known {
		if k.build == id {
			d.counts = false
			ds.known[k] = d
		}
	}
}

// settle ends all doubts about a build: it was found out how it is.
func (ds *doubts) settle(id index.BuildID) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.delete(func(k doubtKey, _ doubt) bool { return k.build == id })
}

// owners counts the distinct owners whose doubts about the build count.
func (ds *doubts) owners(id index.BuildID) int {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	distinct := make(map[uint32]bool)
	for k, d := range ds.known {
		if k.build == id && d.counts && !ds.now().After(d.until) {
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
	for k, d := range ds.known {
		if k.uid == uid && d.request == request && !ds.now().After(d.until) {
			n++
		}
	}
	return n
}

// ErrDoubted refuses to compile for a request again what its user reported as often as that counts.
func ErrDoubted(model string, key index.RequestKey) error {
	return apierr.New(apierr.Stale, nil, "model %q: you reported that what is compiled here for this "+
		"request does not load, and it could not be verified", model).
		WithFact("request_key", key.String()).
		WithHint("load the model without epcached; what is compiled here is offered again after %s", DoubtHolds)
}
