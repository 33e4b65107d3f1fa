package evict

import (
	"cmp"
	"slices"
)

// Before a build is evicted for room, room is made of what comes back without a compile: copies of packed builds, and the whole
// forms of those that share enough.

// findNeeders lists who needs the blobs that may be packed, or have a copy. A blob that builds need which are not the peer's to
// collect is left out.
func (pl *planner) findNeeders() {
	if pl.needers != nil {
		return
	}
	pl.needers = make(map[uint32][]*candidate)
	if len(pl.inv.forms) == 0 {
		return
	}
	for i := range pl.all {
		one := &pl.all[i]
		for _, at := range one.Blobs {
			if f := pl.inv.forms[at]; f != nil && (f.saving > 0 || f.unpacked > 0) && !one.gone {
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

// mayShrink tells whether nobody who needs a blob minds that its form changes.
func (pl *planner) mayShrink(at uint32) bool {
	all := pl.needers[at]
	return len(all) > 0 && !slices.ContainsFunc(all, func(one *candidate) bool { return pl.spared(one) != "" })
}

// coldest lists the candidates that need some blob that may shrink, the ones that were not used for longest first.
func (pl *planner) coldest() (list []*candidate) {
	pl.findNeeders()
	for _, all := range pl.needers {
		for _, one := range all {
			if !one.gone {
				list = append(list, one)
			}
		}
	}
	slices.SortFunc(list, func(a, b *candidate) int {
		return cmp.Or(a.last.Compare(b.last), slices.Compare(a.ID[:], b.ID[:]))
	})
	return slices.Compact(list)
}

// shrinkUntilEnough makes a step of each candidate for which some of its blobs free something.
func (pl *planner) shrinkUntilEnough(action Action, free func(at uint32) int64) {
	if pl.plan.Enough(0) {
		return
	}
	for _, one := range pl.coldest() {
		if pl.plan.Enough(0) {
			return
		}
		s := Step{Action: action, of: one, why: cause{kind: becauseSmaller, action: action}}
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
			pl.step(s)
		}
	}
}

// dropCopies chooses unpacked copies until the goal is reached.
func (pl *planner) dropCopies() { pl.shrinkUntilEnough(DropCopy, pl.inv.dropCopy) }

// pack chooses what packing makes smaller, until the goal is reached.
func (pl *planner) pack() {
	pl.shrinkUntilEnough(PackBuild, func(at uint32) int64 {
		if !pl.inv.mayPack(at) {
			return 0
		}
		return pl.inv.pack(at)
	})
}

// withoutDetours leaves out what is done to builds that go in the end, for whose sake it need not be done.
func (pl *planner) withoutDetours() {
	goes := make(map[*candidate]*Step)
	for i := range pl.plan.Steps {
		if s := &pl.plan.Steps[i]; s.Action == Evict && s.of.gone {
			goes[s.of] = s
		}
	}
	pl.plan.Steps = slices.DeleteFunc(pl.plan.Steps, func(s Step) bool {
		last := goes[s.of]
		if s.Action == Evict || last == nil || slices.ContainsFunc(s.blobs, func(at uint32) bool { return pl.inv.blobs[at].Needs > 0 }) {
			return false
		}
		last.Frees += s.Frees // it comes later, and so has not been moved yet
		return true
	})
}
