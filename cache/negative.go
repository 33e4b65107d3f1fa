package cache

import (
	"cmp"
	"encoding/json"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/epcached/epcached/index"
)

// failures remember the compiles that failed, so that they are answered at once and not tried with each request. What is
// remembered holds for a build key and a scope, and for the ONNX Runtime, the drivers and the configuration of that time.
// It lasts by what it says: a refusal of the execution provider until that is another, a crash for a minute at first.
type failures struct {
	now   func() time.Time
	index *index.Index
	under [32]byte // of the configuration that compiles depend on
	log   *slog.Logger

	mu    sync.Mutex
	known map[failureKey]*remembered // guarded by mu
	told  map[toldFailure]time.Time  // events of late; guarded by mu
}

// failureKey is what a failure is remembered for.
type failureKey struct {
	build index.BuildKey
	scope string
	with  [16]byte // ONNX Runtime, drivers and devices: no part of the build key, for builds that exist do not depend on them
}

// remembered is a failure with those who were answered from it.
type remembered struct {
	Failure
	askers map[uint32]string // by uid, what that user calls the model
}

// toldFailure is a failure that the history has.
type toldFailure struct {
	request index.RequestKey
	uid     uint32
	reason  Reason
}

const (
	maxFailures     = 2048
	failuresPerUser = 256            // of those that asked first
	askersPerOne    = 64             // whose names for the model are known
	keptAfter       = 24 * time.Hour // from when it may be tried again: so long a further failure counts as one in a row
	toldEvery       = 10 * time.Minute
	maxToldFailures = 1 << 12
)

// FailureOptions say how long failures of each kind are answered from memory.
type FailureOptions struct {
	Off     bool
	Crash   time.Duration // after the first crash; doubled with each further one. 0: a minute
	Limit   time.Duration // after the first time that a limit was reached, likewise. 0: ten minutes
	Longest time.Duration // of what doubles. 0: a day
	Refused time.Duration // a refusal, no node taken, output that is none or does not load. 0: a day
}

func (o FailureOptions) orDefault() FailureOptions {
	o.Crash, o.Limit = cmp.Or(o.Crash, time.Minute), cmp.Or(o.Limit, 10*time.Minute)
	o.Longest, o.Refused = cmp.Or(o.Longest, 24*time.Hour), cmp.Or(o.Refused, 24*time.Hour)
	return o
}

// lasts says how long the count-th failure in a row is answered from memory; 0: not at all.
func (o FailureOptions) lasts(f *Failure, count int) time.Duration {
	reason := f.Reason
	switch {
	case o.Off || !reason.ofModel():
		return 0
	case reason == ReasonCrash || reason == ReasonWorkerDied || f.Facts["signal"] != "":
		return doubled(o.Crash, count-1, o.Longest)
	case reason == ReasonTimeout || reason == ReasonCPU || reason == ReasonMemory || reason == ReasonOutputLimit:
		return doubled(o.Limit, count-1, o.Longest)
	}
	return o.Refused
}

func doubled(first time.Duration, times int, longest time.Duration) time.Duration {
	for ; times > 0 && first < longest; times-- {
		first *= 2
	}
	return min(first, longest)
}

func newFailures(now func() time.Time, x *index.Index, conditions string, log *slog.Logger) *failures {
	fs := &failures{now: now, index: x, under: digestOf([]byte(conditions)), log: log,
		known: make(map[failureKey]*remembered), told: make(map[toldFailure]time.Time)}
	rows, err := x.Failures()
	if err != nil {
		log.Warn("remembered failures not read", "error", err) // they are tried once more
	}
	for row, raw := range rows {
		key, f, ok := fs.decode(row, raw)
		if !ok || len(fs.known) >= maxFailures {
			x.DropFailure([]byte(row))
			continue
		}
		fs.known[key] = &remembered{Failure: f}
	}
	fs.sweep()
	return fs
}

// keptFailure is how a failure is stored.
type keptFailure struct {
	Under   [32]byte // the configuration's digest: a failure under another is no failure any more
	Build   index.BuildKey
	Scope   string
	With    [16]byte
	Failure Failure
}

// row is the key's name in the index.
func (k failureKey) row() []byte {
	return append(append(append([]byte(nil), k.build[:]...), k.with[:]...), k.scope...)
}

func (fs *failures) decode(row string, raw []byte) (failureKey, Failure, bool) {
	var kept keptFailure
	if json.Unmarshal(raw, &kept) != nil || kept.Under != fs.under {
		return failureKey{}, Failure{}, false
	}
	key := failureKey{kept.Build, kept.Scope, kept.With}
	return key, kept.Failure, string(key.row()) == row
}

func (fs *failures) save(key failureKey, f *Failure) {
	raw, err := json.Marshal(keptFailure{fs.under, key.build, key.scope, key.with, *f})
	if err == nil {
		err = fs.index.SaveFailure(key.row(), raw)
	}
	if err != nil {
		fs.log.Warn("failure not kept", "model", f.ModelName, "error", err) // it is tried once more after a restart
	}
}

// remember takes in a failure, and fills in how often it came and when it may be tried again.
func (fs *failures) remember(key failureKey, f *Failure, o FailureOptions) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	now := fs.now()
	f.Count, f.First, f.Last = 1, now, now
	before := fs.known[key]
	if before != nil {
		f.First, f.UID = before.First, before.UID
		f.ModelName = before.ModelName
		if before.Reason == f.Reason {
			f.Count = before.Count + 1
		}
	}
	lasts := o.lasts(f, f.Count)
	if lasts == 0 {
		return
	}
	f.Retry = now.Add(lasts)
	if before == nil {
		fs.makeRoom(f.UID)
		before = &remembered{}
		fs.known[key] = before
	}
	before.Failure = *f
	fs.save(key, f)
}

// makeRoom forgets the oldest failure of a user who has too many, else the oldest of all. The caller holds mu.
func (fs *failures) makeRoom(uid uint32) {
	var own, any []failureKey
	for key, f := range fs.known {
		any = append(any, key)
		if f.UID == uid {
			own = append(own, key)
		}
	}
	oldest := func(keys []failureKey) {
		fs.drop(slices.MinFunc(keys, func(a, b failureKey) int { return fs.known[a].Last.Compare(fs.known[b].Last) }))
	}
	switch {
	case len(own) >= failuresPerUser:
		oldest(own)
	case len(any) >= maxFailures:
		oldest(any)
	}
}

// drop forgets one. The caller holds mu.
func (fs *failures) drop(key failureKey) {
	delete(fs.known, key)
	fs.index.DropFailure(key.row())
}

// forget drops what is known under the key: a compile succeeded, or who may asked for another.
func (fs *failures) forget(key failureKey) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.known[key] != nil {
		fs.drop(key)
	}
}

// holds gives the failure that a request of the user for the key is answered with, nil if it may be tried.
func (fs *failures) holds(key failureKey, uid uint32, name string) *Failure {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	f, now := fs.known[key], fs.now()
	if f == nil || !now.Before(f.Retry) || now.Before(f.Last.Add(-time.Minute)) { // the clock was set back: nobody knows how long ago it was
		return nil
	}
	if f.askers == nil {
		f.askers = make(map[uint32]string)
	}
	if len(f.askers) < askersPerOne {
		f.askers[uid] = name
	}
	return f.as(name)
}

// sweep forgets what may long be tried again and was not: of libraries that are gone, or of models that nobody wants.
func (fs *failures) sweep() {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	now := fs.now()
	for key, f := range fs.known {
		if now.After(f.Retry.Add(keptAfter)) || f.Last.After(now.Add(24*time.Hour)) {
			fs.drop(key)
		}
	}
	for told, at := range fs.told {
		if now.Sub(at) > toldEvery {
			delete(fs.told, told)
		}
	}
}

// news tells whether the history is to have this failure: one that comes over and over must not wash away what else is
// known.
func (fs *failures) news(request index.RequestKey, uid uint32, reason Reason) bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	key, now := toldFailure{request, uid, reason}, fs.now()
	if at, told := fs.told[key]; told && now.Sub(at) < toldEvery && !now.Before(at) {
		return false
	}
	if len(fs.told) >= maxToldFailures {
		clear(fs.told)
	}
	fs.told[key] = now
	return true
}
