package index

import (
	"cmp"
	"slices"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index/manifestpb"
)

// Tombstone is the record of an evicted build: why it was evicted, and how long it took to compile.
type Tombstone struct {
	BuildID        BuildID
	RequestKey     RequestKey
	BuildKey       BuildKey
	ModelDigest    cas.Digest // zero in those of an earlier epcached
	ModelName      string
	Scope          string // which users may see it, as of the build
	At             time.Time
	Reason         string
	Bytes          int64   // bytes that its removal freed
	CompileSeconds float64 // time of its compile
	LastUsed       time.Time
	ForBudget      bool // evicted to keep to the budget, not by request or for another bound
	ForFloor       bool // evicted because too little of the disk was free
}

// maxTombstones bounds the tombstones, of which the oldest are dropped. One takes about 400 bytes.
const maxTombstones = 4 << 10

// addTombstone appends a tombstone, and bounds the memory without moving all of them each time.
func (j *Journal) addTombstone(one Tombstone) {
	if len(j.tombstones) >= 2*maxTombstones {
		j.tombstones = j.tombstones[len(j.tombstones)-maxTombstones:]
	}
	j.tombstones = append(j.tombstones, one)
}

// addTombstones makes the tombstones of builds durable that are about to be retracted: a crash in
// between leaves tombstones of existing builds, which the next Open drops.
func (j *Journal) addTombstones(list []*Change) {
	var buried []*Change
	var records []*manifestpb.Record
	for _, c := range list {
		if t := c.Tombstone; t != nil {
			t.At, t.LastUsed, t.Reason = trimTime(t.At), trimTime(t.LastUsed),
				shorten(t.Reason, maxText)
			t.ModelName, t.Scope = shorten(t.ModelName, maxName), shorten(t.Scope, 64)
			buried, records = append(buried, c), append(records, tombstoneRecord(t))
		}
	}
	if len(buried) == 0 {
		return
	}
	err := j.change(func() {
		for _, c := range buried {
			j.addTombstone(*c.Tombstone)
		}
	}, records...)
	for _, c := range buried {
		if c.fail(err); err != nil {
			j.dropTombstone(c.ID)
		}
	}
}

// dropTombstone drops the tombstone of a build that was not removed after all. It writes no record,
// because a tombstone of an existing build is ignored.
func (j *Journal) dropTombstone(id BuildID) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.tombstones = slices.DeleteFunc(j.tombstones, func(t Tombstone) bool {
		return t.BuildID == id
	})
}

// Tombstones returns the kept tombstones, oldest first. The latest 4,000 are always kept, and at
// most twice as many. match may be nil.
func (j *Journal) Tombstones(match func(*Tombstone) bool) []Tombstone {
	j.mu.Lock()
	defer j.mu.Unlock()
	var out []Tombstone
	for i := range j.tombstones {
		if one := &j.tombstones[i]; match == nil || match(one) {
			out = append(out, *one)
		}
	}
	return out
}

func tombstoneOf(m *manifestpb.Tombstone) (Tombstone, error) {
	t := Tombstone{ModelName: m.GetModelName(), Scope: m.GetScope(), At: fromNanos(m.GetAt()),
		Reason: m.GetReason(), Bytes: m.GetBytes(), CompileSeconds: m.GetCompileSeconds(),
		LastUsed: fromNanos(m.GetLastUsed()), ForBudget: m.GetForBudget(),
		ForFloor: m.GetForFloor()}
	copy(t.ModelDigest[:], m.GetModelDigest())
	return t, cmp.Or(fixed("build_id", t.BuildID[:], m.GetBuildId()),
		fixed("request_key", t.RequestKey[:], m.GetRequestKey()),
		fixed("build_key", t.BuildKey[:], m.GetBuildKey()))
}

func tombstoneRecord(t *Tombstone) *manifestpb.Record {
	return &manifestpb.Record{Kind: &manifestpb.Record_Tombstone{Tombstone: &manifestpb.Tombstone{
		BuildId: t.BuildID[:], RequestKey: t.RequestKey[:], BuildKey: t.BuildKey[:],
		ModelName: t.ModelName, Scope: t.Scope, ModelDigest: t.ModelDigest[:], At: nanos(t.At),
		Reason: t.Reason, Bytes: t.Bytes, CompileSeconds: t.CompileSeconds,
		LastUsed: nanos(t.LastUsed), ForBudget: t.ForBudget,
		ForFloor: t.ForFloor,
	}}}
}
