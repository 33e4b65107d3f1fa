package evict

import (
	"bytes"
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// Accounts tell what of an inventory is whose, among some builds: what others need is nobody's business.
type Accounts struct {
	inv  *Inventory
	need []uint32 // by place in the inventory: builds that need a blob, as theirs or as a container
}

// Account counts the builds that are to be told apart.
func (inv *Inventory) Account(builds []*index.Brief) *Accounts {
	a := &Accounts{inv, make([]uint32, len(inv.blobs))}
	mark := make([]uint32, len(inv.blobs))
	for i, b := range builds {
		inv.eachPart(b, mark, uint32(i+1), func(at uint32) { a.need[at]++ })
	}
	return a
}

// Row is what one build takes: the bytes of its files, and on the disk what it needs alone, and what others need as well; of that, Once is what no
// build of its model in a row before has.
type Row struct {
	ID                         index.BuildID
	Logical, Own, Shared, Once int64
}

// Sum is what several builds take.
type Sum struct {
	Name      string
	Builds    uint64
	Logical   int64 // bytes; each build in full
	Own, Disk int64 // on disk: what nobody else's builds need, and every blob once
}

// ByModel lists builds by model, the largest first, and within one by size. Two models of one name are two.
func (a *Accounts) ByModel(list []*index.Brief) []Row {
	type row struct { // what is compared, side by side
		Row
		model int64 // bytes of all builds of the model
		of    *index.Brief
	}
	all := make([]row, len(list))
	models := make(map[cas.Digest]int64)
	mark := make([]uint32, len(a.need))
	for i, b := range list {
		one := &all[i]
		one.Row, one.of = Row{ID: b.ID, Logical: b.LogicalBytes}, b
		a.inv.eachPart(b, mark, uint32(i+1), func(at uint32) {
			if a.need[at] <= 1 {
				one.Own += a.inv.bytes(at)
			} else {
				one.Shared += a.inv.bytes(at)
			}
		})
		models[b.ModelDigest] += one.Own + one.Shared
	}
	for i := range all {
		all[i].model = models[all[i].of.ModelDigest]
	}
	slices.SortFunc(all, func(x, y row) int {
		if x.model != y.model {
			return cmp.Compare(y.model, x.model)
		}
		return cmp.Or(strings.Compare(x.of.ModelName, y.of.ModelName), bytes.Compare(x.of.ModelDigest[:], y.of.ModelDigest[:]),
			cmp.Compare(y.Own+y.Shared, x.Own+x.Shared), bytes.Compare(x.ID[:], y.ID[:]))
	})
	rows := make([]Row, len(all))
	had := make([]uint32, len(a.need)) // the model, by a number, that had the blob last
	model := uint32(0)
	clear(mark)
	for i := range all {
		one := &all[i]
		if i == 0 || one.of.ModelDigest != all[i-1].of.ModelDigest {
			model++
		}
		a.inv.eachPart(one.of, mark, uint32(i+1), func(at uint32) {
			if a.need[at] > 1 && had[at] != model {
				had[at] = model
				one.Once += a.inv.bytes(at)
			}
		})
		rows[i] = one.Row
	}
	return rows
}

// SumsBy adds up by a name of each build, what takes most first.
func (a *Accounts) SumsBy(list []*index.Brief, nameOf func(*index.Brief) string) []Sum {
	byName := make(map[string][]*index.Brief)
	for _, b := range list {
		byName[nameOf(b)] = append(byName[nameOf(b)], b)
	}
	mark, turn := make([]uint32, len(a.need)), uint32(0)
	seen := make([]uint32, len(a.need)) // builds of the present name that need the blob
	var out []Sum
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		sum := Sum{Name: name, Builds: uint64(len(byName[name]))}
		var touched []uint32
		for _, b := range byName[name] {
			sum.Logical += b.LogicalBytes
			turn++
			a.inv.eachPart(b, mark, turn, func(at uint32) {
				if seen[at]++; seen[at] == 1 {
					sum.Disk += a.inv.bytes(at)
					touched = append(touched, at)
				}
				if seen[at] == a.need[at] {
					sum.Own += a.inv.bytes(at)
				}
			})
		}
		for _, at := range touched {
			seen[at] = 0
		}
		out = append(out, sum)
	}
	slices.SortStableFunc(out, func(x, y Sum) int { return cmp.Compare(y.Disk, x.Disk) })
	return out
}

// eachPart calls fn with what a build takes space with, each once: its blobs, and the containers that they are packed with. mark
// has a place for each blob; turn is another number for each call.
func (inv *Inventory) eachPart(b *index.Brief, mark []uint32, turn uint32, fn func(at uint32)) {
	inv.parts(b, func(at uint32, _ bool) {
		if mark[at] != turn {
			mark[at] = turn
			fn(at)
		}
	})
}

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
