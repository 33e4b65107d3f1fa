package evict

import "github.com/epcached/epcached/index"

// Thrashing is what says that the budget is too small: builds that were evicted and soon compiled again.
type Thrashing struct {
	Evicted, Back int     // entries
	Seconds       float64 // of compiling what was there before
	Bytes         int64   // that they take
}

// thrashAt is how many entries have to come back before it is spoken of.
const thrashAt = 3

// Counts tells whether it is worth speaking of: so many entries come back, and a quarter of those that went.
func (t Thrashing) Counts() bool { return t.Back >= thrashAt && 4*t.Back >= t.Evicted }

// Thrashes looks at tombstones, the oldest first: an entry has come back where there is a build of it, or a later tombstone, from after it went. madeSince tells of a
// tombstone's entry whether there is such a build.
func Thrashes(tombstones []index.Tombstone, madeSince func(*index.Tombstone) bool) (t Thrashing) {
	type entry struct {
		key   index.RequestKey
		scope string
	}
	times := make(map[entry]int)
	for i := range tombstones {
		times[entry{tombstones[i].RequestKey, tombstones[i].Scope}]++
	}
	counted, back := make(map[entry]bool), make(map[entry]bool)
	for i := range tombstones {
		g := &tombstones[i]
		e := entry{g.RequestKey, g.Scope}
		if !counted[e] {
			counted[e] = true
			t.Evicted++
		}
		times[e]--
		if times[e] == 0 && !madeSince(g) {
			continue
		}
		t.Seconds += g.CompileSeconds
		if !back[e] {
			back[e] = true
			t.Back++
			t.Bytes += g.Bytes
		}
	}
	return t
}
