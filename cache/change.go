package cache

import (
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// Invalidate withholds the builds that the names mean: they are not served again, and the next request compiles.
// With dryRun it tells what it would do.
func (c *Cache) Invalidate(ctx context.Context, p Peer, names []string, reason string, dryRun bool) ([]Listing, error) {
	builds, err := c.changeable(ctx, p, names)
	if err != nil {
		return nil, err
	}
	if reason == "" {
		reason = "invalidated by hand"
	}
	var out []Listing
	for i := range builds {
		if !dryRun {
			c.withholdBuild(builds[i].ID, index.Withheld, reason)
		}
		out = append(out, c.listing(builds[i]))
	}
	return out, nil
}

// Remove deletes the builds that the names mean, or all that the peer may change. Files that somebody has loaded
// stay until they are let go. freed counts the bytes that nothing else needs.
func (c *Cache) Remove(ctx context.Context, p Peer, names []string, all, dryRun bool) (removed []Listing, freed int64, err error) {
	var builds []index.Build
	if all {
		err = c.index.Each(ctx, func(b index.Build) error {
			if c.mayChange(p, &b) {
				builds = append(builds, b)
			}
			return nil
		})
		if err != nil {
			return nil, 0, fail(Internal, err, "remove")
		}
	} else if builds, err = c.changeable(ctx, p, names); err != nil {
		return nil, 0, err
	}
	going := make(map[index.BuildID]bool, len(builds))
	for i := range builds {
		going[builds[i].ID] = true
	}
	if freed, err = c.onlyNeededBy(builds, going); err != nil {
		return nil, 0, fail(Internal, err, "remove")
	}
	for i := range builds {
		removed = append(removed, c.listing(builds[i]))
		if dryRun {
			continue
		}
		if _, err := c.retract(ctx, &builds[i], "removed by hand", 0); err != nil {
			return removed, freed, fail(Internal, err, "remove %s", builds[i].BuildKey)
		}
	}
	if all && !dryRun && c.Administrator(p) {
		rest, err := c.removeRest(ctx)
		freed += rest
		if err != nil {
			return removed, freed, fail(Internal, err, "remove all")
		}
	}
	return removed, freed, nil
}

// onlyNeededBy sums the sizes of the blobs that no build but these refers to.
func (c *Cache) onlyNeededBy(builds []index.Build, going map[index.BuildID]bool) (int64, error) {
	var sum int64
	counted := make(map[cas.Digest]bool)
	for _, b := range builds {
		for _, f := range b.Blobs() {
			if counted[f.Digest] {
				continue
			}
			counted[f.Digest] = true
			ids, err := c.index.Needs(f.Digest)
			if err != nil {
				return 0, err
			}
			stays := false
			for _, id := range ids {
				stays = stays || !going[id]
			}
			if !stays {
				sum += f.Size
			}
		}
	}
	return sum, nil
}

// retract removes a build: first its manifest, which is the commit, then its view, then the blobs that nothing
// else needs. A crash in between leaves leftovers, which the next start removes.
func (c *Cache) retract(ctx context.Context, b *index.Build, why string, grace time.Duration) (freed int64, err error) {
	c.views.mu.Lock()
	v := c.views.live[b.ID]
	c.views.mu.Unlock()
	if v == nil {
		v = c.earlierView(b)
	}
	if err := c.index.Retract(ctx, b.ID, why); err != nil {
		return 0, err
	}
	if v != nil {
		c.dropView(b.ID, v, grace)
	}
	for _, f := range b.Blobs() {
		removed, err2 := c.removeUnneeded(f.Digest)
		if err2 != nil {
			err = errors.Join(err, err2)
		}
		if removed {
			freed += f.Size
		}
	}
	c.sweepViews()
	return freed, err
}

func (c *Cache) mayChange(p Peer, b *index.Build) bool {
	return c.Administrator(p) || b.Scope == OwnScope(p)
}

// changeable is find for somebody who wants to change what is found.
func (c *Cache) changeable(ctx context.Context, p Peer, names []string) ([]index.Build, error) {
	builds, err := c.find(ctx, p, names)
	if err != nil {
		return nil, err
	}
	for i := range builds {
		if !c.mayChange(p, &builds[i]) {
			return nil, fail(NotAllowed, nil, "build %s is shared: changing it is for administrators", builds[i].BuildKey)
		}
	}
	return builds, nil
}
