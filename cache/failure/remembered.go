package failure

import (
	"cmp"
	"encoding/json"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/index"
)

// Remembered is the negative cache: it answers requests with remembered failures instead of
// retrying the compile. An entry is valid for a build key, a scope, the ONNX Runtime, the drivers
// and the configuration. It expires after a time that depends on the reason (see Options).
type Remembered struct {
	now   func() time.Time
	index *index.Index
	under [32]byte // digest of the configuration that compiles depend on
	log   *slog.Logger

	mu       sync.Mutex
	known    map[Key]*entry                // guarded by mu
	reported map[reportedFailure]time.Time // recent events; guarded by mu
}

// Key identifies a remembered failure.
type Key struct {
	Build index.BuildKey
	Scope string
	With  [16]byte // digest of ONNX Runtime, drivers and devices, which build keys do not cover
}

type entry struct {
	Failure
	users map[uint32]string // by uid: the user's name for the model
}

type reportedFailure struct {
	request index.RequestKey
	uid     uint32
	reason  Reason
}

const (
	maxFailures = 2048
	// entries for each user, counted for that of the first request
	failuresPerUser = 256
	usersPerFailure = 64 // users with known names for the model
	// after Retry; a failure within this time counts as one in a row
	keptUnused          = 24 * time.Hour
	reportInterval      = 10 * time.Minute
	maxReportedFailures = 1 << 12
)

// Options say how long failures of each kind are remembered.
type Options struct {
	Crash   time.Duration // after the first crash; doubled by each further one; 0: a minute
	Limit   time.Duration // after a limit was reached; doubled too; 0: ten minutes
	Longest time.Duration // bound of the doubling; 0: a day
	// Refused is for a refusal, no node taken, and output that is invalid or does not load; 0: a
	// day.
	Refused time.Duration
}

// OrDefault replaces zeros by the defaults.
func (o Options) OrDefault() Options {
	o.Crash, o.Limit = cmp.Or(o.Crash, time.Minute), cmp.Or(o.Limit, 10*time.Minute)
	o.Longest, o.Refused = cmp.Or(o.Longest, 24*time.Hour), cmp.Or(o.Refused, 24*time.Hour)
	return o
}

// holdTime returns how long the count-th failure in a row is remembered; 0: not at all.
func (o Options) holdTime(f *Failure, count int) time.Duration {
	reason := f.Reason
	switch {
	case !reason.BlamesModel():
		return 0
	case reason == Crash || reason == WorkerDied || f.Facts["signal"] != "":
		return doubled(o.Crash, count-1, o.Longest)
	case reason == Timeout || reason == CPU || reason == Memory || reason == OutputLimit:
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

// NewRemembered reads the failures that the index has. It drops those that were remembered under
// other conditions, the configuration that compiles depend on.
func NewRemembered(now func() time.Time, x *index.Index, conditions string,
	log *slog.Logger) *Remembered {
	fs := &Remembered{now: now, index: x, under: blake3.Sum256([]byte(conditions)), log: log,
		known: make(map[Key]*entry), reported: make(map[reportedFailure]time.Time)}
	rows, err := x.Failures.All()
	if err != nil {
		// best effort: the models are compiled again
		log.Warn("cannot read remembered failures", "error", err)
	}
	for row, raw := range rows {
		key, f, ok := fs.decode(row, raw)
		if !ok || len(fs.known) >= maxFailures {
			x.Failures.Drop([]byte(row))
			continue
		}
		fs.known[key] = &entry{Failure: f}
	}
	fs.Sweep()
	return fs
}

type keptFailure struct {
	Under   [32]byte // digest of the configuration; failures under another one do not count
	Build   index.BuildKey
	Scope   string
	With    [16]byte
	Failure Failure
}

func (k Key) row() []byte {
	return append(append(append([]byte(nil), k.Build[:]...), k.With[:]...), k.Scope...)
}

func (fs *Remembered) decode(row string, raw []byte) (Key, Failure, bool) {
	var kept keptFailure
	if json.Unmarshal(raw, &kept) != nil || kept.Under != fs.under {
		return Key{}, Failure{}, false
	}
	key := Key{kept.Build, kept.Scope, kept.With}
	return key, kept.Failure, string(key.row()) == row
}

func (fs *Remembered) save(key Key, f *Failure) {
	raw, err := json.Marshal(keptFailure{fs.under, key.Build, key.Scope, key.With, *f})
	if err == nil {
		err = fs.index.Failures.Save(key.row(), raw)
	}
	if err != nil {
		fs.log.Warn("cannot record a "+
			"failure", "model", f.ModelName, "error", err) // best effort: a restart loses it
	}
}

// Remember stores a failure, and sets its Count and Retry.
func (fs *Remembered) Remember(key Key, f *Failure, o Options) {
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
	lasts := o.holdTime(f, f.Count)
	if lasts == 0 {
		return
	}
	f.Retry = now.Add(lasts)
	if before == nil {
		fs.dropOldest(f.UID)
		before = &entry{}
		fs.known[key] = before
	}
	before.Failure = *f
	fs.save(key, f)
}

// dropOldest makes space: it removes the user's oldest failure if the user has too many, otherwise
// the oldest of all. The caller holds mu.
func (fs *Remembered) dropOldest(uid uint32) {
	var own, any []Key
	for key, f := range fs.known {
		any = append(any, key)
		if f.UID == uid {
			own = append(own, key)
		}
	}
	oldest := func(keys []Key) {
		fs.drop(slices.MinFunc(keys, func(a, b Key) int {
			return fs.known[a].Last.Compare(fs.known[b].Last)
		}))
	}
	switch {
	case len(own) >= failuresPerUser:
		oldest(own)
	case len(any) >= maxFailures:
		oldest(any)
	}
}

// drop removes an entry. The caller holds mu.
func (fs *Remembered) drop(key Key) {
	delete(fs.known, key)
	fs.index.Failures.Drop(key.row())
}

// Forget drops the failure under the key, after a compile succeeded or a retry was requested.
func (fs *Remembered) Forget(key Key) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.known[key] != nil {
		fs.drop(key)
	}
}

// Lookup returns the failure that answers the user's request for the key, nil if the request may
// compile.
func (fs *Remembered) Lookup(key Key, uid uint32, name string) *Failure {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	f, now := fs.known[key], fs.now()
	// The last condition: the clock was set back, so the times say nothing.
	if f == nil || !now.Before(f.Retry) || now.Before(f.Last.Add(-time.Minute)) {
		return nil
	}
	if f.users == nil {
		f.users = make(map[uint32]string)
	}
	if len(f.users) < usersPerFailure {
		f.users[uid] = name
	}
	return f.ForName(name)
}

// Sweep removes failures with a Retry more than keptUnused ago.
func (fs *Remembered) Sweep() {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	now := fs.now()
	for key, f := range fs.known {
		if now.After(f.Retry.Add(keptUnused)) || f.Last.After(now.Add(24*time.Hour)) {
			fs.drop(key)
		}
	}
	maps.DeleteFunc(fs.reported, func(_ reportedFailure, at time.Time) bool {
		return now.Sub(at) > reportInterval
	})
}

// IsNew reports whether the history should record this failure. A repeated one is not recorded,
// because it would displace other events.
func (fs *Remembered) IsNew(request index.RequestKey, uid uint32, reason Reason) bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	key, now := reportedFailure{request, uid, reason}, fs.now()
	if at, found := fs.reported[key]; found && now.Sub(at) < reportInterval && !now.Before(at) {
		return false
	}
	if len(fs.reported) >= maxReportedFailures {
		clear(fs.reported)
	}
	fs.reported[key] = now
	return true
}

// Audience selects the failures that a user may see: of its requests or its scope, or all.
type Audience struct {
	UID   uint32
	Scope string
	All   bool
}

// visible returns the failure as the audience may see it, nil if it may not.
func (to Audience) visible(r *entry) *Failure {
	name, asked := r.users[to.UID]
	switch {
	case to.All || r.UID == to.UID || r.Scope == to.Scope:
		return r.ForName(r.ModelName)
	case asked:
		return r.ForName(name)
	}
	return nil
}

// List returns failures that the audience may see, newest first, without those that forget selects.
func (fs *Remembered) List(to Audience, forget func(*Failure) bool) []Failure {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	var out []Failure
	for key, one := range fs.known {
		f := to.visible(one)
		if f == nil || forget != nil && !forget(f) {
			continue
		}
		out = append(out, *f)
		if forget != nil {
			fs.drop(key)
			delete(fs.reported, reportedFailure{f.RequestKey, one.UID, f.Reason})
		}
	}
	slices.SortFunc(out, func(a, b Failure) int {
		return cmp.Or(b.Last.Compare(a.Last), slices.Compare(a.BuildKey[:], b.BuildKey[:]))
	})
	return out
}
