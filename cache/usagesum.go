package cache

import (
	"context"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// ownBytes is what the removal of a build would free on the disk now; as far as the peer may know, for what builds share
// with those of other users is not the peer's to know.
func (c *Cache) ownBytes(p Peer, b *index.Build) (sum int64, err error) {
	for d := range c.partsOf(b) {
		others, err := c.othersNeed(p, b, d)
		if err != nil {
			return 0, err
		}
		if !others {
			sum += c.takenBy(d)
		}
	}
	return sum, nil
}

// freedBy is what the removal of all of these builds together would free on the disk now: more than each of them has of its own, where they share
// something or one is packed with what another has. As far as the peer may know, likewise.
func (c *Cache) freedBy(ctx context.Context, p Peer, ids []index.BuildID) (sum int64, err error) {
	going := make(map[index.BuildID]bool, len(ids))
	for _, id := range ids {
		going[id] = true
	}
	counted := make(map[cas.Digest]bool)
	err = c.eachOf(ctx, ids, func(b *index.Build) error {
		for d := range c.partsOf(b) {
			if counted[d] {
				continue
			}
			counted[d] = true
			needs, err := c.needs(d)
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(needs, func(n needed) bool {
				return !going[n.build] && c.rights.MayKnow(p, n.build)
			}) {
				sum += c.takenBy(d)
			}
		}
		return nil
	})
	return sum, err
}

// othersNeed tells whether there is a build besides this one, of those that the peer may know, that needs a blob.
func (c *Cache) othersNeed(p Peer, b *index.Build, d cas.Digest) (bool, error) {
	if c.rights.Administrator(p) && len(c.forms.Recipes.Users(d)) == 0 { // no recipe takes from it
		ids, err := c.index.Needs(d)
		return slices.ContainsFunc(ids, func(id index.BuildID) bool { return id != b.ID }), err
	}
	needs, err := c.needs(d)
	return slices.ContainsFunc(needs, func(n needed) bool {
		return n.build != b.ID && c.rights.MayKnow(p, n.build)
	}), err
}
