package cache

import (
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

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
