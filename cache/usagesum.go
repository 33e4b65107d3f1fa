package cache

import (
	"bytes"
	"cmp"
	"slices"
	"strings"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// eachPart calls fn with what a build takes space with, each once: its blobs, and the containers that they are packed with. mark
// has a place for each blob; turn is another number for each call.
func (inv *inventory) eachPart(b *index.Brief, mark []uint32, turn uint32, fn func(at uint32)) {
	once := func(at uint32) {
		if mark[at] != turn {
			mark[at] = turn
			fn(at)
		}
	}
	for _, at := range b.Blobs {
		once(at)
		if f := inv.forms[at]; f != nil {
			for _, container := range f.takes {
				once(container)
			}
		}
	}
}

// needers counts for each blob the builds among these that need it, as theirs or as a container.
func (inv *inventory) needers(builds []*index.Brief) []uint32 {
	need, mark := make([]uint32, len(inv.blobs)), make([]uint32, len(inv.blobs))
	for i, b := range builds {
		inv.eachPart(b, mark, uint32(i+1), func(at uint32) { need[at]++ })
	}
	return need
}

// byModel sorts by model, the largest first, and within one by size. Two models of one name are two.
func (inv *inventory) byModel(need []uint32, list []*index.Brief) []usageRow {
	type row struct { // what is compared, side by side
		usageRow
		model int64 // bytes of all builds of the model
		of    *index.Brief
	}
	all := make([]row, len(list))
	models := make(map[cas.Digest]int64)
	mark := make([]uint32, len(inv.blobs))
	for i, b := range list {
		one := &all[i]
		one.usageRow, one.of = usageRow{id: b.ID, logical: b.LogicalBytes}, b
		inv.eachPart(b, mark, uint32(i+1), func(at uint32) {
			if need[at] <= 1 {
				one.own += inv.bytes(at)
			} else {
				one.shared += inv.bytes(at)
			}
		})
		models[b.ModelDigest] += one.own + one.shared
	}
	for i := range all {
		all[i].model = models[all[i].of.ModelDigest]
	}
	slices.SortFunc(all, func(a, b row) int {
		if a.model != b.model {
			return cmp.Compare(b.model, a.model)
		}
		return cmp.Or(strings.Compare(a.of.ModelName, b.of.ModelName), bytes.Compare(a.of.ModelDigest[:], b.of.ModelDigest[:]),
			cmp.Compare(b.own+b.shared, a.own+a.shared), bytes.Compare(a.id[:], b.id[:]))
	})
	rows := make([]usageRow, len(all))
	for i := range all {
		rows[i] = all[i].usageRow
	}
	return rows
}

// sumsBy adds up by a name of each build.
func (inv *inventory) sumsBy(need []uint32, list []*index.Brief, nameOf func(*index.Brief) string) []UsageSum {
	byName := make(map[string][]*index.Brief)
	for _, b := range list {
		byName[nameOf(b)] = append(byName[nameOf(b)], b)
	}
	mark, turn := make([]uint32, len(inv.blobs)), uint32(0)
	seen := make([]uint32, len(inv.blobs)) // builds of the present name that need the blob
	var out []UsageSum
	for _, name := range sortedKeys(byName) {
		sum := UsageSum{Name: name, Builds: uint64(len(byName[name]))}
		var touched []uint32
		for _, b := range byName[name] {
			sum.Logical += b.LogicalBytes
			turn++
			inv.eachPart(b, mark, turn, func(at uint32) {
				if seen[at]++; seen[at] == 1 {
					sum.Stored += inv.bytes(at)
					touched = append(touched, at)
				}
				if seen[at] == need[at] {
					sum.Own += inv.bytes(at)
				}
			})
		}
		for _, at := range touched {
			seen[at] = 0
		}
		out = append(out, sum)
	}
	slices.SortStableFunc(out, func(a, b UsageSum) int { return cmp.Compare(b.Stored, a.Stored) })
	return out
}

// ownBytes is what the removal of each of these builds would free on the disk now; as far as the peer may know, for what builds share
// with those of other users is not the peer's to know.
func (c *Cache) ownBytes(p Peer, builds ...*index.Build) ([]int64, error) {
	parts := make([]map[cas.Digest]int64, len(builds))
	var alone []cas.Digest // what no recipe takes from
	for i, b := range builds {
		parts[i] = c.partsOf(b)
		for d := range parts[i] {
			if c.Administrator(p) && len(c.forms.Users(d)) == 0 {
				alone = append(alone, d)
			}
		}
	}
	// Of these it is enough to know whether there is a second build: all of them are read at once.
	needed, err := c.index.NeededBy(alone, 2)
	if err != nil {
		return nil, err
	}
	sums := make([]int64, len(builds))
	for i, b := range builds {
		for d, size := range parts[i] {
			others := false
			if ids, ok := needed[d]; ok {
				others = slices.ContainsFunc(ids, func(id index.BuildID) bool { return id != b.ID })
			} else if others, err = c.othersNeed(p, b, d); err != nil {
				return nil, err
			}
			if !others {
				sums[i] += c.takenBy(map[cas.Digest]int64{d: size})
			}
		}
	}
	return sums, nil
}

// othersNeed tells whether there is a build besides this one, of those that the peer may know, that needs a blob.
func (c *Cache) othersNeed(p Peer, b *index.Build, d cas.Digest) (bool, error) {
	needs, err := c.needs(d)
	return slices.ContainsFunc(needs, func(n needed) bool {
		return n.build != b.ID && (c.Administrator(p) || c.mayKnow(p, n.build))
	}), err
}

// mayKnow is maySee of a build of which there is but the id.
func (c *Cache) mayKnow(p Peer, id index.BuildID) bool {
	b, err := c.index.Get(id)
	return err == nil && c.maySee(p, &b)
}
