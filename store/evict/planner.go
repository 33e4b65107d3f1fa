// Package evict plans the eviction of builds for space, and divides the space of blobs among
// builds.
//
// It works on an Inventory of a store at one moment, which also gives sums by model and user.
// Snapshot.Plan simulates evictions, packing and dropped copies until the Limits are kept. It opens
// no file, takes no lock, and knows no views or requests: the caller's WhySpared says which builds
// may be evicted. Check that again before executing each Step. The package is not safe for
// concurrent use.
package evict

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
)

// halfLife is the age at which a use of a build counts half.
const halfLife = 7 * 24 * time.Hour

// The classes of candidates. Lower ones are evicted first.
const (
	classNotServed = iota
	classSuperseded
	classServed
)

// entry is what requests look up: builds of one entry replace each other.
type entry struct {
	key   index.RequestKey
	scope string
}

type candidate struct {
	*index.Brief
	last        time.Time
	class       int8
	successor   *candidate // of classSuperseded: the newer build
	chosen      bool       // to be evicted
	sparedKnown bool       // spared is valid
	spared      string     // why it may not be evicted
	worth       float64
	justStored  bool // just stored, so it is kept although its user exceeds the quota
	above       bool // not within its user's share, so it is evicted before builds of other users
	useless     bool // evicting it frees hardly any bytes, because others need its blobs
}

// minFreedPart is the divisor for the part of a build's bytes that an eviction must free to be
// worth a compile.
const minFreedPart = 16

// planner is the state of making one plan.
type planner struct {
	*Snapshot
	plan   *Plan
	limits Limits
	inv    *Inventory
	all    []candidate
	sorted []*candidate
	kept   map[string]*Kept
	// needers has, for blobs that may be packed or have a copy, the candidates that need them.
	needers map[uint32][]*candidate
}

// classify sets the classes of the candidates.
func (pl *planner) classify() {
	all := make([]candidate, 0, len(pl.Builds)) // allocated at once, so that pointers stay valid
	newest := make(map[entry]*candidate, len(pl.Builds))
	var several []*candidate // builds that share their entry with others
	for i := range pl.Builds {
		b := &pl.Builds[i]
		all = append(all, candidate{Brief: b, last: b.Use.Last, class: classServed})
		one := &all[len(all)-1]
		if one.last.Before(b.Created) {
			one.last = b.Created
		}
		if len(pl.NotServed) > 0 {
			if _, not := pl.NotServed[b.ID]; not {
				one.class = classNotServed
				continue
			}
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
		if first := newest[entry{one.RequestKey, one.Scope}]; first != one &&
			!one.last.After(first.Created) {
			one.class, one.successor = classSuperseded, first
		}
	}
	pl.all = all
	pl.plan.Considered = uint64(len(all))
}

// setGoal computes the used bytes and the goal.
func (pl *planner) setGoal() {
	if pl.Whole {
		pl.plan.Used = pl.inv.sum()
	} else {
		pl.plan.Used = pl.inv.sumOf(pl.all)
	}
	pl.plan.Goal = max(pl.limits.Bytes, -1)
	if pl.limits.Missing > 0 {
		if to := max(pl.plan.Used-pl.limits.Missing, 0); pl.plan.Goal < 0 || to < pl.plan.Goal {
			pl.plan.Goal = to
		}
	}
}

// rank sorts the candidates by the order of eviction: the least compile time and use per byte
// first.
func (pl *planner) rank() {
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
		idle := max(pl.At.Sub(one.last), 0)
		one.worth = one.CompileSeconds * float64(1+one.Use.Hits) *
			math.Exp2(-float64(idle)/float64(halfLife)) / max(share, 1)
		order[i] = place{one.worth, one.last.UnixNano(), uint32(i), one.class}
	}
	slices.SortFunc(order, func(a, b place) int {
		return cmp.Or(int(a.class)-int(b.class), cmp.Compare(a.worth, b.worth),
			cmp.Compare(a.last, b.last))
	})
	pl.sorted = make([]*candidate, len(order))
	for i := range order {
		pl.sorted[i] = &pl.all[order[i].at]
	}
	pl.markAboveShare()
}

// markAboveShare finds the builds that are not within the shares of their users, and sorts them
// before those of other users. A share covers reservations first, then pinned builds, and then the
// most valuable ones.
func (pl *planner) markAboveShare() {
	if pl.limits.Share == 0 {
		return
	}
	has, bound, found := make(map[uint32]int64), make(map[uint32]bool), false
	maps.Copy(has, pl.Storing)
	count := func(b *index.Brief) (above bool) {
		if _, known := bound[b.UID]; !known {
			bound[b.UID] = pl.Bound(b.UID)
		}
		has[b.UID] += b.LogicalBytes
		return bound[b.UID] && has[b.UID] > pl.limits.Share
	}
	for _, one := range pl.sorted {
		if pl.Pinned[one.ID] {
			count(one.Brief)
		}
	}
	for _, one := range slices.Backward(pl.sorted) {
		if !pl.Pinned[one.ID] {
			one.above = count(one.Brief)
			found = found || one.above
		}
	}
	place := func(one *candidate) int8 {
		if one.above {
			return 2 * one.class
		}
		return 2*one.class + 1
	}
	if found {
		slices.SortStableFunc(pl.sorted, func(a, b *candidate) int {
			return int(place(a) - place(b))
		})
	}
}

// evictUnused chooses the builds that were not used for too long.
func (pl *planner) evictUnused() {
	if pl.limits.Unused == 0 {
		return
	}
	limit := days(pl.limits.Unused)
	for _, one := range pl.sorted {
		from := one.last
		if from.Before(pl.AgesFrom) || from.After(pl.At) {
			from = pl.AgesFrom
		}
		if pl.At.Sub(from) > pl.limits.Unused {
			pl.choose(one, true, causeUnused, limit)
		}
	}
}

// evictAboveQuota chooses builds of each user that exceeds the quota.
func (pl *planner) evictAboveQuota() {
	if pl.limits.User == 0 {
		return
	}
	has := make(map[uint32]int64)
	for i := range pl.all {
		if one := &pl.all[i]; !one.chosen {
			has[one.UID] += one.LogicalBytes
		}
	}
	for i := range pl.Others {
		has[pl.Others[i].UID] += pl.Others[i].LogicalBytes
	}
	for uid, bytes := range pl.Storing {
		has[uid] += bytes
	}
	over := func(uid uint32) string {
		if has[uid]-pl.Storing[uid] <= pl.limits.User {
			return fmt.Sprintf("uid %d would have more than its quota of %s with a new build", uid,
				bytesize.Text(pl.limits.User))
		}
		return fmt.Sprintf("uid %d has more than its quota of %s", uid,
			bytesize.Text(pl.limits.User))
	}
	newest, above := pl.newestOfUsers(), make(map[uint32]bool)
	for uid, bytes := range has {
		above[uid] = bytes > pl.limits.User
	}
	for _, one := range pl.sorted {
		more := above[one.UID] &&
			has[one.UID]-one.LogicalBytes >= pl.limits.User-pl.limits.UserSlack
		if one.chosen || has[one.UID] <= pl.limits.User && !more || one == newest[one.UID] {
			continue
		}
		if pl.choose(one, true, causeLeastValuable, over(one.UID)) {
			has[one.UID] -= one.LogicalBytes
		}
	}
	for uid, one := range newest {
		one.justStored = has[uid] > pl.limits.User
	}
	for i := range pl.all {
		if one := &pl.all[i]; one.spared != "" && has[one.UID] > pl.limits.User {
			pl.uncountKept(one)
			one.spared += ", though " + over(one.UID)
			pl.countKept(one.spared)
		}
	}
	for i := range pl.Others {
		if one := &pl.Others[i]; has[one.UID] > pl.limits.User {
			k := pl.countKept("shared, so only administrators may remove it, though " +
				over(one.UID))
			for _, at := range one.Blobs {
				k.Bytes += pl.inv.bytes(at)
			}
		}
	}
}

// newestGrace is how long a user's newest build is kept although the user exceeds the quota,
// because the user's older builds may have been in use when it was stored.
const newestGrace = time.Minute

// newestOfUsers returns for each user the newest build, if it was just stored and alone would be
// within the quota. A user with a reservation has none, because its build is newer.
func (pl *planner) newestOfUsers() map[uint32]*candidate {
	all := make(map[uint32]*candidate)
	for i := range pl.all {
		one := &pl.all[i]
		if one.chosen || one.class != classServed || pl.At.Sub(one.Created).Abs() >= newestGrace ||
			one.LogicalBytes > pl.limits.User || pl.Storing[one.UID] > 0 {
			continue
		}
		if last := all[one.UID]; last == nil || last.Created.Before(one.Created) {
			all[one.UID] = one
		}
	}
	return all
}

// evictClasses chooses builds of these classes until the goal is reached.
func (pl *planner) evictClasses(classes ...int8) {
	for _, one := range pl.sorted {
		if pl.plan.GoalReached(0) {
			return
		}
		if slices.Contains(classes, one.class) {
			limit := ""
			if one.above {
				limit = fmt.Sprintf("uid %d has more than its share of %s", one.UID,
					bytesize.Text(pl.limits.Share))
			}
			pl.choose(one, false, causeLeastValuable, limit)
		}
	}
}

// maxPlanRounds bounds the rounds of replacing useless choices, because each walks all candidates.
const maxPlanRounds = 16

// evictServed chooses served builds until the goal is reached. A build that frees hardly any bytes
// is evicted only with those that it shares bytes with, or as the last resort. Choices that prove
// unnecessary are undone.
func (pl *planner) evictServed() {
	pl.evictClasses(classServed)
	for round := 0; round < maxPlanRounds; round++ {
		if little, _ := pl.unchooseUseless(); len(little) == 0 || pl.plan.GoalReached(0) {
			break
		}
		pl.evictClasses(classServed)
	}
	if !pl.plan.GoalReached(0) {
		for i := range pl.all {
			pl.all[i].useless = false // the other builds that need its blobs may be chosen by now
		}
		if pl.evictClasses(classServed); !pl.plan.GoalReached(0) {
			pl.chooseTogether(pl.unchooseUseless())
		}
	}
	pl.unchooseNeedless()
	pl.recount()
}

// unchooseUseless undoes the choice of served builds that free no or hardly any bytes, because kept
// builds need their blobs or their bases. It returns those that free few, and how many they would
// free together.
func (pl *planner) unchooseUseless() (little []*candidate, freed int64) {
	for i := range pl.plan.Steps {
		s := &pl.plan.Steps[i]
		if !s.isOptional() {
			continue
		}
		takes := pl.restore(s.of)
		if takes > 0 && takes > (pl.inv.neededBytes(s.of)-takes)/minFreedPart {
			pl.reapply(s.of)
			continue
		}
		s.of.useless = true
		little, freed = append(little, s.of), freed+takes
	}
	pl.dropRestored()
	return little, freed
}

// chooseTogether chooses builds again that each free hardly any bytes but together enough, if the
// goal is missed otherwise. An example is many builds that are packed with one base.
func (pl *planner) chooseTogether(little []*candidate, frees int64) {
	if frees == 0 || frees <= (pl.inv.neededBytes(little...)-frees)/minFreedPart {
		return
	}
	for _, one := range little {
		one.useless = false
		pl.choose(one, false, causeLeastValuable, "")
	}
}

// unchooseNeedless undoes the choice of served builds that a larger, later choice makes
// unnecessary, the most valuable first.
func (pl *planner) unchooseNeedless() {
	if pl.plan.Goal < 0 || !pl.plan.GoalReached(0) {
		return
	}
	for i := len(pl.plan.Steps) - 1; i >= 0; i-- {
		if s := &pl.plan.Steps[i]; s.isOptional() {
			if pl.restore(s.of); !pl.plan.GoalReached(0) {
				pl.reapply(s.of)
			}
		}
	}
	pl.dropRestored()
}

// isOptional reports whether a step evicts a served build only to reach the goal.
func (s *Step) isOptional() bool {
	return s.Action == Evict && !s.Must && s.of.class == classServed
}

// restore undoes the choice of a build, and returns the bytes that it takes. No blob may have been
// packed since.
func (pl *planner) restore(one *candidate) (takes int64) {
	for _, at := range one.Blobs {
		takes += pl.inv.retain(at)
	}
	one.chosen = false
	pl.plan.Freed -= takes
	return takes
}

// reapply undoes restore.
func (pl *planner) reapply(one *candidate) (frees int64) {
	frees = pl.release(one)
	one.chosen = true
	pl.plan.Freed += frees
	return frees
}

// dropRestored removes the steps of restored builds.
func (pl *planner) dropRestored() {
	pl.plan.Steps = slices.DeleteFunc(pl.plan.Steps, func(s Step) bool {
		return s.isOptional() && !s.of.chosen
	})
}

// recount recounts what each step frees after the remaining ones before it.
func (pl *planner) recount() {
	for i := range pl.plan.Steps {
		if s := &pl.plan.Steps[i]; s.isOptional() {
			pl.restore(s.of)
		}
	}
	for i := range pl.plan.Steps {
		if s := &pl.plan.Steps[i]; s.isOptional() {
			s.Frees = pl.reapply(s.of)
		}
	}
}

// choose chooses a build, if it may be evicted.
func (pl *planner) choose(one *candidate, must bool, kind int8, limit string) bool {
	if one.chosen || one.useless && !must || pl.whySpared(one) != "" {
		return false
	}
	one.chosen = true
	frees := pl.release(one)
	pl.addStep(Step{Action: Evict, Frees: frees, why: pl.causeOf(one, kind, limit),
		Must: must, of: one})
	return true
}

func (pl *planner) release(one *candidate) (frees int64) {
	for _, at := range one.Blobs {
		frees += pl.inv.release(at)
	}
	return frees
}

func (pl *planner) addStep(s Step) {
	s.ID, s.Last, s.Outcome = s.of.ID, s.of.last, planned
	pl.plan.Freed += s.Frees
	pl.plan.Steps = append(pl.plan.Steps, s)
}

// dropSurvey drops pointers to the survey, so that it is freed before the plan is carried out.
func (pl *planner) dropSurvey() {
	for i := range pl.plan.Steps {
		pl.plan.Steps[i].of, pl.plan.Steps[i].blobs = nil, nil
	}
}

// whySpared returns why a candidate may not be evicted, and counts it.
func (pl *planner) whySpared(one *candidate) string {
	if !one.sparedKnown {
		one.sparedKnown = true
		if one.spared = pl.WhySpared(one.Brief); one.spared != "" {
			pl.countKept(one.spared)
		}
	}
	return one.spared
}

// countKept counts a kept build; sumKept sums the bytes.
func (pl *planner) countKept(why string) *Kept {
	k := pl.kept[why]
	if k == nil {
		k = &Kept{Reason: why}
		pl.kept[why] = k
	}
	k.Builds++
	return k
}

func (pl *planner) uncountKept(one *candidate) {
	k := pl.kept[one.spared]
	if k.Builds--; k.Builds == 0 {
		delete(pl.kept, one.spared)
	}
}

// Reasons why builds are kept.
const (
	keptPinned    = "pinned"
	keptNewest    = "just stored"
	keptValuable  = "not needed for the goal"
	keptNeeded    = "other builds need its bytes"
	keptNotStored = "needed by builds outside the plan"
)

// sumKept counts the kept builds and their bytes.
func (pl *planner) sumKept() {
	for i := range pl.all {
		one := &pl.all[i]
		if one.chosen || one.spared != "" {
			continue
		}
		switch {
		case one.justStored:
			one.spared = keptNewest
		case one.useless:
			one.spared = keptNeeded
		case pl.Pinned[one.ID]:
			one.spared = keptPinned
		default:
			one.spared = keptValuable
		}
		pl.countKept(one.spared)
	}
	strength := func(why string) int { // reasons that would keep all builds come first
		if strings.HasPrefix(why, keptPinned) {
			return -2
		}
		return slices.Index([]string{keptValuable, keptNeeded}, why)
	}
	order := slices.SortedFunc(maps.Keys(pl.kept), func(a, b string) int {
		return cmp.Or(strength(a)-strength(b), strings.Compare(a, b))
	})
	pl.sumKeptShares(order)
	for _, why := range order {
		pl.plan.Kept = append(pl.plan.Kept, *pl.kept[why])
	}
	left := pl.plan.Used - pl.plan.Freed
	for i := range pl.all {
		if k := pl.kept[pl.all[i].spared]; k != nil {
			left -= k.Bytes
			delete(pl.kept, k.Reason)
		}
	}
	if left > 0 {
		pl.plan.Kept = append(pl.plan.Kept, Kept{Reason: keptNotStored, Bytes: left})
	}
}

// sumKeptShares counts each blob that kept builds need, as a file or a base, for the first of the
// reasons why these are kept.
func (pl *planner) sumKeptShares(order []string) {
	place := make(map[string]uint32, len(order)) // numbered from 1
	for i, why := range order {
		place[why] = uint32(i + 1)
	}
	first := make([]uint32, len(pl.inv.blobs))
	named := 0
	for i := range pl.all {
		one := &pl.all[i]
		if one.chosen {
			continue
		}
		if k := pl.kept[one.spared]; named < maxNamed {
			named++
			k.First = append(k.First, one.ID)
		}
		at := place[one.spared]
		pl.inv.parts(one.Brief, func(blob uint32, base bool) {
			if base && !pl.Whole && pl.inv.blobs[blob].Needs > 0 {
				return // Used does not have it, because no collected build needs it
			}
			if first[blob] == 0 || at < first[blob] {
				first[blob] = at
			}
		})
	}
	for blob, at := range first {
		if at > 0 {
			pl.kept[order[at-1]].Bytes += pl.inv.bytes(uint32(blob))
		}
	}
}

func days(d time.Duration) string {
	if d%(24*time.Hour) == 0 {
		return fmt.Sprintf("%dd", d/(24*time.Hour))
	}
	return d.String()
}

// Snapshot is the state of a store for which a plan is made. Plan changes the inventory, so make
// one plan of a snapshot.
type Snapshot struct {
	At time.Time
	// AgesFrom is when the clock last jumped; ages for Limits.Unused begin there at the earliest.
	AgesFrom  time.Time
	Builds    []index.Brief // builds that may be collected
	Others    []index.Brief // builds that count for quotas but may not be collected
	Whole     bool          // Builds are all of the store, so that its bounds apply to them
	Inventory *Inventory    // of the whole store, from the same survey

	NotServed map[index.BuildID]string // states of builds that are not served
	Pinned    map[index.BuildID]bool
	// Storing has the reserved logical bytes by user.
	Storing map[uint32]int64
	Bound   func(uid uint32) bool // reports whether Limits.Share bounds the user; nil: no user

	// WhySpared returns why a build may not be evicted now, "" if it may. It is called at most once
	// for each build that would be evicted, because it may check files.
	WhySpared func(*index.Brief) string
}

// Limits are the bounds that a plan has to keep. With the zero value all bytes must be freed;
// without a goal for bytes, Bytes is negative.
type Limits struct {
	Bytes   int64         // allowed on disk; negative: no bound
	Missing int64         // bytes on disk to free at least
	Unused  time.Duration // evict builds that were not used for longer; 0: no bound
	User    int64         // logical bytes of all builds that one user requested; 0: no bound
	// Share is how many logical bytes of a bound user are evicted only after other users' bytes
	// above their shares; 0: no bound.
	Share int64
	Packs bool // builds may be packed, which takes longer than removing them

	// UserSlack is how many bytes to free in addition when User is exceeded, rounded down to whole
	// builds.
	UserSlack int64
}

// Plan plans to keep to the limits. It evicts builds that were not used for too long, or that
// exceed a quota. Then it frees space: copies; builds that are not served,
// then superseded ones; by packing; and then builds of the least compile time and use per byte.
func (s *Snapshot) Plan(to Limits) *Plan {
	pl := &planner{Snapshot: s, plan: &Plan{Goal: -1}, limits: to, inv: s.Inventory,
		kept: make(map[string]*Kept)}
	pl.classify()
	pl.setGoal()
	pl.rank()
	pl.evictUnused()
	pl.evictAboveQuota()
	pl.shrinkUntilEnough(DropCopy, pl.inv.dropCopy)
	pl.evictClasses(classNotServed, classSuperseded)
	if to.Packs {
		pl.shrinkUntilEnough(PackBuild, pl.inv.pack)
	}
	pl.evictServed()
	pl.dropUselessSteps()
	pl.plan.Finish()
	pl.sumKept()
	pl.dropSurvey()
	return pl.plan
}

// Before a plan evicts for space, it frees bytes that do not cost a compile: copies of packed
// builds, and the whole files of blobs that share enough bytes.

// findNeeders lists the builds that need blobs which may be packed, or have a copy. It omits blobs
// that builds outside the peer's reach need.
func (pl *planner) findNeeders() {
	if pl.needers != nil {
		return
	}
	pl.needers = make(map[uint32][]*candidate)
	if len(pl.inv.packing) == 0 {
		return
	}
	for i := range pl.all {
		one := &pl.all[i]
		for _, at := range one.Blobs {
			f := pl.inv.packing[at]
			if f != nil && (f.saving > 0 || f.unpacked > 0) && !one.chosen {
				pl.needers[at] = append(pl.needers[at], one)
			}
		}
	}
	for at, all := range pl.needers {
		if uint32(len(all)) < pl.inv.blobs[at].Needs {
			delete(pl.needers, at)
		}
	}
}

// mayShrink reports whether a blob may be packed, or its copy dropped, for all builds that need it.
func (pl *planner) mayShrink(at uint32) bool {
	all := pl.needers[at]
	return len(all) > 0 && !slices.ContainsFunc(all, func(one *candidate) bool {
		return pl.whySpared(one) != ""
	})
}

// coldest lists the candidates that need some blob that may shrink, the ones that were not used for
// longest first.
func (pl *planner) coldest() (list []*candidate) {
	pl.findNeeders()
	for _, all := range pl.needers {
		for _, one := range all {
			if !one.chosen {
				list = append(list, one)
			}
		}
	}
	slices.SortFunc(list, func(a, b *candidate) int {
		return cmp.Or(a.last.Compare(b.last), slices.Compare(a.ID[:], b.ID[:]))
	})
	return slices.Compact(list)
}

// shrinkUntilEnough makes steps with the action, for candidates with blobs that free bytes by it,
// until the goal is reached.
func (pl *planner) shrinkUntilEnough(action Action, free func(at uint32) int64) {
	if pl.plan.GoalReached(0) {
		return
	}
	for _, one := range pl.coldest() {
		if pl.plan.GoalReached(0) {
			return
		}
		s := Step{Action: action, of: one, why: cause{kind: causeSmaller, action: action}}
		for _, at := range one.Blobs {
			if !pl.mayShrink(at) {
				continue
			}
			if n := free(at); n > 0 {
				s.Frees += n
				s.blobs = append(s.blobs, at)
			}
		}
		if s.Frees > 0 {
			pl.addStep(s)
		}
	}
}

// dropUselessSteps drops steps that are needed only by builds that are evicted in the end.
func (pl *planner) dropUselessSteps() {
	goes := make(map[*candidate]*Step)
	for i := range pl.plan.Steps {
		if s := &pl.plan.Steps[i]; s.Action == Evict && s.of.chosen {
			goes[s.of] = s
		}
	}
	pl.plan.Steps = slices.DeleteFunc(pl.plan.Steps, func(s Step) bool {
		last := goes[s.of]
		if s.Action == Evict || last == nil || slices.ContainsFunc(s.blobs, func(at uint32) bool {
			return pl.inv.blobs[at].Needs > 0
		}) {
			return false
		}
		last.Frees += s.Frees // it comes later, so it was not moved yet
		return true
	})
}
