package evict

import (
	"time"

	"github.com/epcached/epcached/index"
)

// Snapshot is what is known of a store when a plan is made for it. A plan uses its inventory up.
type Snapshot struct {
	At        time.Time
	Builds    []index.Brief // those that may be collected
	Others    []index.Brief // that count for the quotas of their users as well, and may not be collected by who plans
	Whole     bool          // they are all that there are: bounds of the whole store are for them
	Inventory *Inventory    // of the whole store, of the same survey

	NotServed map[index.BuildID]string // the states of those that are not
	Pinned    map[index.BuildID]bool
	Storing   map[uint32]int64 // logical bytes by user: what is being stored comes in place of what is there

	// Spared says why a build may not go now, "" if it may. It is asked once at most for each that would, and not of those that nobody thinks of
	// removing, for it may have to look at files.
	Spared func(*index.Brief) string
}

// Limits are what is to be kept to. The zero value lets no byte stay: where there is no goal, Bytes is below 0.
type Limits struct {
	Bytes   int64         // on disk that may stay; below 0: as many as there are
	Missing int64         // bytes on disk that have to go at least
	Unused  time.Duration // builds that were not used for longer go; 0: any time
	User    int64         // logical bytes of all builds that one user asked for; 0: any number
	Entries uint64        // request keys, of a whole store; 0: any number
	Packs   bool          // builds may be packed, which takes longer than to remove them
}

// Plan plans to keep to the limits. What has not been used for too long goes, and what is above a user's quota or the
// number of entries. Then, for room: unpacked copies; builds that are not served, then those that a newer one has taken the place
// of; what packing frees; and then the builds whose compile seconds and recent use pay least for their bytes.
func (s *Snapshot) Plan(to Limits) *Plan {
	pl := &planner{Snapshot: s, plan: &Plan{Goal: -1}, limits: to, inv: s.Inventory, kept: make(map[string]*Kept)}
	pl.gather()
	pl.aim()
	pl.weigh()
	pl.tooOld()
	pl.aboveQuota()
	pl.tooMany()
	pl.dropCopies()
	pl.forRoom(classNotServed, classSuperseded)
	if to.Packs {
		pl.pack()
	}
	pl.served()
	pl.withoutDetours()
	pl.plan.End()
	pl.tell()
	pl.letGo()
	return pl.plan
}
