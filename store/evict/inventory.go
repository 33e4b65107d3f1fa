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

// Inventory has the disk space of a store's blobs, in all representations, and the builds that need
// them. A plan simulates on it: it removes builds, packs blobs and drops copies, and learns how
// many bytes that frees.
type Inventory struct {
	// blobs has those of the survey, then bases that no build needs. Needs counts builds.
	blobs []index.Blob
	// packing has, by index in blobs, the blobs that are not just a whole file which only builds
	// need.
	packing map[uint32]*blobPacking
	at      map[cas.Digest]uint32
	disk    func(cas.Digest) int64
	before  []int64 // by index: bytes of whole files that the plan has removed; nil: none
}

// blobPacking has the other representations of a blob, besides its whole file.
type blobPacking struct {
	recipe, unpacked int64    // bytes on disk; 0: none
	bases            []uint32 // the bases of the recipe
	users            int      // number of recipes of which it is a base
	// saving is how many bytes on disk packing it would free; 0: too few or unknown.
	saving int64
	from   []uint32 // bases that its recipe would have

	// wholeDropped is a copy from when the last build that needed it was removed, for undoing that;
	// nil: none was.
	wholeDropped *blobPacking
}

// NewInventory makes an inventory of the survey's blobs, as whole files. It takes over s.Blobs.
// disk returns the bytes on disk of a blob that no build needs; it is called for bases.
func NewInventory(s *index.Survey, disk func(cas.Digest) int64) *Inventory {
	return &Inventory{blobs: s.Blobs, packing: make(map[uint32]*blobPacking), at: s.At, disk: disk}
}

// AddRecipe records that a blob is packed: the bytes on disk of its recipe, and its bases.
func (inv *Inventory) AddRecipe(d cas.Digest, disk int64, bases ...cas.Digest) {
	f := inv.packingOf(d)
	f.recipe = disk
	for _, base := range bases {
		inv.packingOf(base).users++
		f.bases = append(f.bases, inv.at[base])
	}
}

// AddCopy records the unpacked copy of a packed blob, with its bytes on disk.
func (inv *Inventory) AddCopy(d cas.Digest, disk int64) { inv.packingOf(d).unpacked = disk }

// AddSaving records how many bytes packing a blob would free, and the bases that it would have.
func (inv *Inventory) AddSaving(d cas.Digest, saving int64, from ...cas.Digest) {
	f := inv.packingOf(d)
	f.saving = saving
	for _, other := range from {
		inv.packingOf(other)
		f.from = append(f.from, inv.at[other])
	}
}

// Needed reports whether a build needs a blob.
func (inv *Inventory) Needed(d cas.Digest) bool {
	at, ok := inv.at[d]
	return ok && inv.blobs[at].Needs > 0
}

// packingOf returns the blobPacking of a blob. It adds a blob that no build needs to the inventory.
func (inv *Inventory) packingOf(d cas.Digest) *blobPacking {
	at, ok := inv.at[d]
	if !ok {
		at = uint32(len(inv.blobs))
		inv.blobs = append(inv.blobs, index.Blob{Disk: inv.disk(d)})
		inv.at[d] = at
	}
	if inv.packing[at] == nil {
		inv.packing[at] = &blobPacking{}
	}
	return inv.packing[at]
}

// bytes returns the disk bytes of a blob in all representations, without its bases.
func (inv *Inventory) bytes(at uint32) int64 {
	sum := inv.blobs[at].Disk
	if f := inv.packing[at]; f != nil {
		sum += f.recipe + f.unpacked
	}
	return sum
}

func (inv *Inventory) sum() (sum int64) {
	for at := range inv.blobs {
		sum += inv.bytes(uint32(at))
	}
	return sum
}

// sumOf returns the disk bytes of the builds' blobs and of their bases, each once.
func (inv *Inventory) sumOf(builds []candidate) (sum int64) {
	counted := make([]bool, len(inv.blobs))
	for i := range builds {
		inv.parts(builds[i].Brief, func(at uint32, base bool) {
			if !counted[at] && !(base && inv.blobs[at].Needs > 0) {
				counted[at] = true
				sum += inv.bytes(at)
			}
		})
	}
	return sum
}

// parts calls fn with the blobs of a build and their bases. It may report a base several times.
func (inv *Inventory) parts(b *index.Brief, fn func(at uint32, base bool)) {
	for _, at := range b.Blobs {
		fn(at, false)
		if f := inv.packing[at]; f != nil {
			for _, base := range f.bases {
				fn(base, true)
			}
		}
	}
}

// release removes one build from those that need a blob, and returns the bytes that this frees:
// after the last build the blob, unless it is a base, and its bases that are not needed any more.
func (inv *Inventory) release(at uint32) (freed int64) {
	b := &inv.blobs[at]
	if b.Needs--; b.Needs > 0 {
		return 0
	}
	f := inv.packing[at]
	if f == nil {
		return inv.dropWhole(at)
	}
	f.wholeDropped = &blobPacking{recipe: f.recipe, unpacked: f.unpacked, bases: f.bases,
		saving: f.saving}
	freed = f.recipe + f.unpacked
	f.recipe, f.unpacked, f.saving = 0, 0, 0
	for _, base := range f.bases {
		other := inv.packing[base]
		if other.users--; other.users == 0 && inv.blobs[base].Needs == 0 {
			freed += inv.dropWhole(base)
		}
	}
	f.bases = nil
	if f.users == 0 {
		freed += inv.dropWhole(at)
	}
	return freed
}

// dropWhole removes the whole file of a blob.
func (inv *Inventory) dropWhole(at uint32) (freed int64) {
	if len(inv.before) < len(inv.blobs) {
		inv.before = append(inv.before, make([]int64, len(inv.blobs)-len(inv.before))...)
	}
	b := &inv.blobs[at]
	freed, inv.before[at], b.Disk = b.Disk, b.Disk, 0
	return freed
}

// retain undoes release, if no blob was packed since, and returns the bytes that this takes.
func (inv *Inventory) retain(at uint32) (takes int64) {
	b := &inv.blobs[at]
	if b.Needs++; b.Needs > 1 {
		return 0
	}
	f := inv.packing[at]
	if f == nil {
		return inv.restoreWhole(at)
	}
	f.recipe, f.unpacked, f.bases, f.saving, f.wholeDropped = f.wholeDropped.recipe,
		f.wholeDropped.unpacked, f.wholeDropped.bases, f.wholeDropped.saving, nil
	takes = f.recipe + f.unpacked
	for _, base := range f.bases {
		other := inv.packing[base]
		if other.users++; other.users == 1 && inv.blobs[base].Needs == 0 {
			takes += inv.restoreWhole(base)
		}
	}
	if f.users == 0 {
		takes += inv.restoreWhole(at)
	}
	return takes
}

// restoreWhole undoes dropWhole.
func (inv *Inventory) restoreWhole(at uint32) (takes int64) {
	inv.blobs[at].Disk = inv.before[at]
	return inv.before[at]
}

// neededBytes returns the bytes of all that the builds need, each part once: blobs in all
// representations, and their bases.
func (inv *Inventory) neededBytes(builds ...*candidate) (sum int64) {
	if len(builds) == 1 && !slices.ContainsFunc(builds[0].Blobs, func(at uint32) bool {
		return inv.packing[at] != nil
	}) {
		// The usual case: each blob occurs once, and none is packed.
		for _, at := range builds[0].Blobs {
			sum += inv.blobs[at].Disk
		}
		return sum
	}
	counted := make(map[uint32]bool)
	for _, one := range builds {
		inv.parts(one.Brief, func(at uint32, _ bool) {
			if !counted[at] {
				counted[at] = true
				sum += inv.bytes(at)
			}
		})
	}
	return sum
}

// pack replaces the whole file of a blob by a recipe, and returns the bytes that this frees, 0 if
// it is not possible or saves too few.
func (inv *Inventory) pack(at uint32) (freed int64) {
	b, f := &inv.blobs[at], inv.packing[at]
	if f == nil || f.saving <= 0 || f.users > 0 || b.Disk < f.saving {
		return 0
	}
	for _, from := range f.from {
		if inv.blobs[from].Disk == 0 {
			return 0 // it was removed or packed already
		}
	}
	freed, f.saving = f.saving, 0
	f.recipe, b.Disk = f.recipe+b.Disk-freed, 0
	for _, from := range f.from {
		inv.packing[from].users++
	}
	f.bases = append(f.bases, f.from...)
	return freed
}

func (inv *Inventory) dropCopy(at uint32) (freed int64) {
	f := inv.packing[at]
	if f == nil {
		return 0
	}
	freed, f.unpacked = f.unpacked, 0
	return freed
}

// perBuild returns the part of a blob's bytes, and of its bases', that counts for each build: they
// are divided equally among the builds and recipes that need them.
func (inv *Inventory) perBuild(at uint32) float64 {
	b, f := &inv.blobs[at], inv.packing[at]
	if f == nil {
		return float64(b.Disk) / float64(max(b.Needs, 1))
	}
	bytes := inv.part(at)*float64(b.Needs) + float64(f.recipe+f.unpacked)
	for _, base := range f.bases {
		bytes += inv.part(base)
	}
	return bytes / float64(max(b.Needs, 1))
}

// part returns the part of a blob's whole file that counts for each build or recipe that needs it.
func (inv *Inventory) part(at uint32) float64 {
	b := &inv.blobs[at]
	return float64(b.Disk) / float64(max(int(b.Needs)+inv.packing[at].users, 1))
}

// Accounts divide an inventory among some builds, without the needs of others.
type Accounts struct {
	inv  *Inventory
	need []uint32 // by index in the inventory: builds that need a blob, as a file or as a base
}

// NewAccounts returns accounts of these builds.
func (inv *Inventory) NewAccounts(builds []*index.Brief) *Accounts {
	a := &Accounts{inv, make([]uint32, len(inv.blobs))}
	mark := make([]uint32, len(inv.blobs))
	for i, b := range builds {
		inv.eachPart(b, mark, uint32(i+1), func(at uint32) { a.need[at]++ })
	}
	return a
}

// Row has the bytes of one build: those of its files, and on the disk those that only it needs, and
// those that others need as well. Once is the part of these that no build of its model in an
// earlier row has.
type Row struct {
	ID                         index.BuildID
	Logical, Own, Shared, Once int64
}

// Sum has the bytes of several builds.
type Sum struct {
	Name      string
	Builds    uint64
	Logical   int64 // bytes; each build in full
	Own, Disk int64 // on disk: needed by no other builds; and all, every blob once
}

// ByModel lists builds by model, the largest first, and within one by size. It distinguishes models
// of the same name.
func (a *Accounts) ByModel(list []*index.Brief) []Row {
	type row struct { // a Row with the values to sort by
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
		return cmp.Or(cmp.Compare(y.model, x.model),
			strings.Compare(x.of.ModelName, y.of.ModelName),
			bytes.Compare(x.of.ModelDigest[:], y.of.ModelDigest[:]),
			cmp.Compare(y.Own+y.Shared, x.Own+x.Shared), bytes.Compare(x.ID[:], y.ID[:]))
	})
	rows := make([]Row, len(all))
	had := make([]uint32, len(a.need)) // by blob: number of the last model that had it
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

// SumsBy sums builds by a name of each, the largest sum first.
func (a *Accounts) SumsBy(list []*index.Brief, nameOf func(*index.Brief) string) []Sum {
	byName := make(map[string][]*index.Brief)
	for _, b := range list {
		byName[nameOf(b)] = append(byName[nameOf(b)], b)
	}
	mark, round := make([]uint32, len(a.need)), uint32(0)
	seen := make([]uint32, len(a.need)) // by blob: builds of the current name that need it
	var out []Sum
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		sum := Sum{Name: name, Builds: uint64(len(byName[name]))}
		var touched []uint32
		for _, b := range byName[name] {
			sum.Logical += b.LogicalBytes
			round++
			a.inv.eachPart(b, mark, round, func(at uint32) {
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

// eachPart calls fn with the blobs of a build and their bases, each once. mark has an element for
// each blob, and round must differ for each call.
func (inv *Inventory) eachPart(b *index.Brief, mark []uint32, round uint32, fn func(at uint32)) {
	inv.parts(b, func(at uint32, _ bool) {
		if mark[at] != round {
			mark[at] = round
			fn(at)
		}
	})
}

// Thrashing counts builds that were evicted and soon compiled again, which shows that the budget is
// too small.
type Thrashing struct {
	Evicted, Back int     // numbers of builds: evicted, and compiled again
	Seconds       float64 // of recompiling
	Bytes         int64   // of the recompiled builds
}

// minReturned is how many entries have to come back before it is reported.
const minReturned = 3

// IsSignificant reports whether enough entries came back: minReturned, and a quarter of all.
func (t Thrashing) IsSignificant() bool { return t.Back >= minReturned && 4*t.Back >= t.Evicted }

// FindThrashing counts in tombstones, which are sorted by time. An entry has come back if it has a
// build, or a later tombstone of one, that was made after the removal. madeSince reports whether a
// tombstone's entry has such a build.
func FindThrashing(tombstones []index.Tombstone,
	madeSince func(*index.Tombstone) bool) (t Thrashing) {
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
