package cache

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/epcached/epcached/index"
)

// recent is how long it takes for a build's use to count half.
const recent = 7 * 24 * time.Hour

// Goal says what a collection is to come to.
type Goal struct {
	Bytes *int64 // on disk, of what the peer may collect, if that is less than the configuration wants; nil: as it wants
	slack bool   // somewhat less than the configuration wants, so that not each put has to make room
	need  int64  // bytes on disk that are to fit in besides
	hurry bool   // somebody waits: nothing is packed, which takes longer than to evict

	Progress func(Progress) // is told how far the survey of the store is; may be nil
}

// The classes of candidates; lower ones go first.
const (
	classNotServed = iota
	classSuperseded
	classServed
)

// candidate is a build of the survey.
type candidate struct {
	*index.Brief
	last  time.Time
	class int8
	first *candidate // of classSuperseded: the build that has taken its place
	gone  bool       // chosen
	known bool       // whether it is spared was looked at
	why   string     // it is spared
	worth float64
}

// planner is the work of one plan.
type planner struct {
	c       *Cache
	plan    *Collection
	bounds  bounds
	inv     *inventory
	all     []candidate
	sorted  []*candidate
	entries map[index.RequestKey]uint32 // builds of each, where their number is bounded
	kept    map[string]*Kept
	own     ownFiles                // as of this plan
	needers map[uint32][]*candidate // of blobs that may be packed, or have a copy: the candidates that need them
	waits   bool                    // what the daemon is just reading may go, when it is done; not where requests may need the room now
}

// maxShown bounds the steps of a plan whose builds are read in full: what is told. The others are when their turn comes.
const maxShown = 256

// PlanCollection plans to bring what the peer may collect within the configured bounds, or within the goal: everything for
// administrators, else the peer's own builds. What has not been used for too long goes, and what is above a user's quota or the
// number of entries. Then, for room: unpacked copies; builds that are not served, then those that a newer one has taken the place
// of; what packing frees; and then the builds whose compile seconds and recent use pay least for their bytes.
func (c *Cache) PlanCollection(ctx context.Context, p Peer, goal Goal) (*Collection, error) {
	began := time.Now()
	c.flushUses()
	b, err := c.bounds()
	if err != nil {
		return nil, fail(Internal, err, "collect")
	}
	survey, inv, err := c.takeInventory(ctx, goal.Progress)
	if err != nil {
		return nil, fail(Internal, err, "collect")
	}
	pl := &planner{c: c, plan: &Collection{Goal: -1, at: c.now(), hurry: goal.hurry}, bounds: b, inv: inv,
		kept: make(map[string]*Kept), waits: !goal.slack}
	pl.gather(p, survey)
	if err := pl.aim(p, goal); err != nil {
		return nil, fail(Internal, err, "collect")
	}
	pl.weigh()
	pl.tooOld()
	pl.aboveQuota()
	pl.tooMany()
	pl.dropCopies()
	pl.forRoom(classNotServed, classSuperseded)
	if !goal.hurry {
		pl.pack()
	}
	pl.forRoom(classServed)
	pl.withoutUse()
	pl.withoutDetours()
	pl.finish()
	if pl.plan.Goal >= 0 {
		pl.plan.Short = max(pl.plan.Used-pl.plan.Freed-pl.plan.Goal, 0)
	}
	pl.tell()
	pl.plan.Took = time.Since(began)
	return pl.plan, nil
}

// gather takes what the peer may collect, and finds out what is not served or superseded.
func (pl *planner) gather(p Peer, survey *index.Survey) {
	type entry struct {
		key   index.RequestKey
		scope string
	}
	c, all := pl.c, make([]candidate, 0, len(survey.Builds)) // at once: pointers to them stay good
	administrator, own := c.Administrator(p), OwnScope(p)
	newest := make(map[entry]*candidate, len(survey.Builds))
	if pl.bounds.entries > 0 && administrator {
		pl.entries = make(map[index.RequestKey]uint32, len(survey.Builds))
	}
	notServed := make(map[index.BuildID]bool)
	for _, id := range c.index.NotServed() {
		notServed[id] = true
	}
	var several []*candidate // builds that are not the only one of their entry
	for i := range survey.Builds {
		b := &survey.Builds[i]
		if !administrator && b.Scope != own {
			continue
		}
		all = append(all, candidate{Brief: b, last: b.Use.Last, class: classServed})
		one := &all[len(all)-1]
		if one.last.Before(b.Created) {
			one.last = b.Created
		}
		if pl.entries != nil {
			pl.entries[b.RequestKey]++
		}
		if len(notServed) > 0 && notServed[b.ID] {
			one.class = classNotServed
			continue
		}
		at := entry{b.RequestKey, b.Scope}
		before := newest[at]
		if before == nil || before.Created.Before(b.Created) {
			newest[at] = one
		}
		if before != nil {
			several = append(several, before, one)
		}
	}
	for _, one := range several {
		if first := newest[entry{one.RequestKey, one.Scope}]; first != one && !one.last.After(first.Created) {
			one.class, one.first = classSuperseded, first
		}
	}
	pl.all = all
	pl.plan.Considered = uint64(len(all))
}

// aim finds out what is used, and how much is to stay.
func (pl *planner) aim(p Peer, goal Goal) error {
	if pl.c.Administrator(p) {
		pl.plan.Used = pl.inv.sum()
		if err := pl.aimAtBounds(goal); err != nil {
			return err
		}
	} else {
		pl.plan.Used = pl.inv.sumOf(pl.all)
	}
	if goal.Bytes != nil && (pl.plan.Goal < 0 || *goal.Bytes < pl.plan.Goal) {
		pl.plan.Goal = *goal.Bytes
	}
	return nil
}

// slackPart is the part of the budget that a collection leaves free beyond what it has to.
const slackPart = 20

func (pl *planner) aimAtBounds(goal Goal) error {
	now, err := pl.c.account()
	if err != nil {
		return err
	}
	s := pl.c.places
	s.mu.Lock()
	reserved := s.reserved
	s.mu.Unlock()
	besides := now.manifests + now.held + reserved + goal.need
	if b := pl.bounds.budget; b > 0 {
		if goal.slack {
			b -= b / slackPart
		}
		pl.plan.Goal = max(b-besides, 0)
	}
	if missing := pl.bounds.floor - (pl.bounds.free - reserved - goal.need); pl.bounds.floor > 0 && missing > 0 {
		if goal.slack {
			missing += pl.bounds.floor / slackPart
		}
		if to := max(pl.plan.Used-missing, 0); pl.plan.Goal < 0 || to < pl.plan.Goal {
			pl.plan.Goal = to
		}
	}
	return nil
}

// weigh sorts the candidates: what pays least goes first.
func (pl *planner) weigh() {
	type place struct { // what is compared, side by side
		worth float64
		last  int64
		at    uint32
		class int8
	}
	order := make([]place, len(pl.all))
	for i := range pl.all {
		one := &pl.all[i]
		share := 0.0
		for _, at := range one.Blobs {
			share += pl.inv.perBuild(at)
		}
		idle := max(pl.plan.at.Sub(one.last), 0)
		one.worth = one.CompileSeconds * float64(1+one.Use.Hits) * math.Exp2(-float64(idle)/float64(recent)) / max(share, 1)
		order[i] = place{one.worth, one.last.UnixNano(), uint32(i), one.class}
	}
	slices.SortFunc(order, func(a, b place) int {
		return cmp.Or(int(a.class)-int(b.class), cmp.Compare(a.worth, b.worth), cmp.Compare(a.last, b.last))
	})
	pl.sorted = make([]*candidate, len(order))
	for i := range order {
		pl.sorted[i] = &pl.all[order[i].at]
	}
}

// tooOld chooses what was not used for longer than it may.
func (pl *planner) tooOld() {
	if pl.bounds.unused == 0 {
		return
	}
	limit := days(pl.bounds.unused)
	for _, one := range pl.sorted {
		if idle := pl.plan.at.Sub(one.last); idle > pl.bounds.unused {
			pl.take(one, true, becauseOld, limit)
		}
	}
}

// aboveQuota chooses among the builds of each user who has too much.
func (pl *planner) aboveQuota() {
	if pl.bounds.user == 0 {
		return
	}
	has := make(map[uint32]int64)
	for i := range pl.all {
		if one := &pl.all[i]; !one.gone {
			has[one.UID] += one.LogicalBytes
		}
	}
	s := pl.c.places
	s.mu.Lock()
	for uid, bytes := range s.byUser { // what is being stored comes in place of what is there
		has[uid] += bytes
	}
	s.mu.Unlock()
	limits := make(map[uint32]string)
	for _, one := range pl.sorted {
		if one.gone || has[one.UID] <= pl.bounds.user {
			continue
		}
		limit := limits[one.UID]
		if limit == "" {
			limit = fmt.Sprintf("uid %d has more than its quota of %s", one.UID, bytesText(pl.bounds.user))
			limits[one.UID] = limit
		}
		if pl.take(one, true, becausePoorest, limit) {
			has[one.UID] -= one.LogicalBytes
		}
	}
}

// tooMany chooses while there are more entries than there may be.
func (pl *planner) tooMany() {
	limit := fmt.Sprintf("there are more entries than max_entries, %d", pl.bounds.entries)
	for _, one := range pl.sorted {
		if uint64(len(pl.entries)) <= pl.bounds.entries || pl.bounds.entries == 0 {
			return
		}
		pl.take(one, true, becausePoorest, limit)
	}
}

// enough tells that the goal is reached.
func (pl *planner) enough() bool {
	return pl.plan.Goal < 0 || pl.plan.Used-pl.plan.Freed <= pl.plan.Goal
}

// forRoom chooses builds of these classes until the goal is reached.
func (pl *planner) forRoom(classes ...int8) {
	for _, one := range pl.sorted {
		if pl.enough() {
			return
		}
		if slices.Contains(classes, one.class) {
			pl.take(one, false, becausePoorest, "")
		}
	}
}

// withoutUse keeps served builds that were chosen and free nothing after all: recipes take from them, and these stay.
func (pl *planner) withoutUse() {
	pl.plan.Steps = slices.DeleteFunc(pl.plan.Steps, func(s Step) bool {
		if s.Action != Evict || s.Must || s.Frees > 0 || s.of.class != classServed ||
			slices.ContainsFunc(s.of.Blobs, func(at uint32) bool { return !pl.inv.stands(at) }) {
			return false
		}
		for _, at := range s.of.Blobs {
			pl.inv.blobs[at].Needs++
		}
		s.of.gone = false
		return true
	})
}

// take chooses a build, if it may go.
func (pl *planner) take(one *candidate, must bool, kind int8, limit string) bool {
	if one.gone || pl.spared(one) != "" {
		return false
	}
	one.gone = true
	frees := int64(0)
	for _, at := range one.Blobs {
		frees += pl.inv.release(at)
	}
	pl.step(Step{Action: Evict, Frees: frees, why: pl.causeOf(one, kind, limit), Must: must, of: one})
	if pl.entries != nil {
		if pl.entries[one.RequestKey]--; pl.entries[one.RequestKey] == 0 {
			delete(pl.entries, one.RequestKey)
		}
	}
	return true
}

// step appends one to the plan.
func (pl *planner) step(s Step) {
	s.ID, s.Last, s.Outcome = s.of.ID, s.of.last, "planned"
	pl.plan.Freed += s.Frees
	pl.plan.Steps = append(pl.plan.Steps, s)
}

// finish reads the records of the steps that are told, and lets go of the survey, which else would stay for as long as the plan is carried out.
func (pl *planner) finish() {
	for i := range pl.plan.Steps {
		s := &pl.plan.Steps[i]
		s.of, s.blobs = nil, nil
		if i < maxShown {
			b, _ := pl.c.index.Get(s.ID) // of one that has just gone, nothing
			s.Build = &b
		}
	}
}

// spared says why a candidate may not go, and counts it.
func (pl *planner) spared(one *candidate) string {
	if !one.known {
		one.known = true
		if one.why = pl.c.wantedNow(one.ID); one.why == "" && (one.Viewed || pl.c.hasView(one.ID)) {
			one.why = pl.c.spared(one.ID, &pl.own) // which looks at files: most builds of a large store have no view
			if one.why == keptReading && pl.waits {
				one.why = ""
			}
		}
		if one.why != "" {
			pl.keep(one, one.why)
		}
	}
	return one.why
}

func (pl *planner) keep(one *candidate, why string) {
	k := pl.kept[why]
	if k == nil {
		k = &Kept{Reason: why}
		pl.kept[why] = k
	}
	k.Builds++
	for _, at := range one.Blobs {
		k.Bytes += pl.inv.bytes(at)
	}
}

// tell counts what stays.
func (pl *planner) tell() {
	pinned := make(map[index.BuildID]bool)
	for _, id := range pl.c.index.PinnedBuilds() {
		pinned[id] = true
	}
	for i := range pl.all {
		one := &pl.all[i]
		switch {
		case one.gone || one.why != "":
		case len(pinned) > 0 && pinned[one.ID]:
			pl.keep(one, "pinned")
		default:
			pl.keep(one, "pays most")
		}
	}
	for _, why := range sortedKeys(pl.kept) {
		pl.plan.Kept = append(pl.plan.Kept, *pl.kept[why])
	}
}

func days(d time.Duration) string {
	if d%(24*time.Hour) == 0 {
		return fmt.Sprintf("%dd", d/(24*time.Hour))
	}
	return d.String()
}
