package cache

import (
	"context"
	"errors"
	"slices"

	"github.com/epcached/epcached/cache/event"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
)

// withhold takes a build that failed its check out of service, and says why.
func (c *Cache) withhold(ctx context.Context, b *index.Build, cause error) string {
	var found []packing.Damage
	if packing.Lost(cause) { // of a blob, or of the view's folders, which say nothing of the build
		found = c.damagedBlobs(ctx, b)
	}
	if len(found) == 0 && (!errors.Is(cause, cas.ErrNotFound) || c.allThere(ctx, b)) {
		c.log.Error("build cannot be served", "build", b.BuildKey.String(), "error", cause)
		return "the build cannot be served: " + cause.Error()
	}
	reason := cause.Error()
	c.log.Warn("build withheld", "build", b.BuildKey.String(), "why", reason)
	c.putAsideAll(found)
	if c.index.Journal.StateOf(b.ID).Name == index.Current {
		c.withholdBuild(b.ID, index.Damaged, reason)
	}
	return "the stored build was damaged: " + reason
}

// allThere tells whether nothing of the build is missing after all: something that can be made again went while its view was made.
func (c *Cache) allThere(ctx context.Context, b *index.Build) bool {
	return !slices.ContainsFunc(b.Files, func(f index.File) bool { return c.forms.Verify(ctx, f.Digest) != nil })
}

// damagedBlobs lists what is no good of that which the build is made of. What was verified a moment ago is not hashed again.
func (c *Cache) damagedBlobs(ctx context.Context, b *index.Build) (out []packing.Damage) {
	for _, f := range b.Files {
		for _, one := range c.forms.DamageOf(ctx, f.Digest) {
			if !slices.ContainsFunc(out, func(d packing.Damage) bool { return d.Digest == one.Digest && d.Recipe == one.Recipe }) {
				out = append(out, one)
			}
		}
	}
	return out
}

func (c *Cache) putAsideAll(all []packing.Damage) {
	for _, one := range all {
		if one.Recipe {
			c.putAsideRecipe(one.Digest, one.Why)
		} else {
			c.putAside(one.Digest, one.Why)
		}
	}
}

// withholdBuild sets the state, and takes the view out of use: what is repaired gets a new id. After
// an error the build is withheld until the daemon ends. It is logged already.
func (c *Cache) withholdBuild(id index.BuildID, state, reason string) error {
	failed := c.index.Journal.SetState(id, index.State{Name: state, Reason: reason, At: c.now()})
	if failed != nil {
		c.log.Error("state of build not kept", "build", id.String(), "error", failed)
	}
	c.views.DropCurrent(id, views.PathGrace)
	b, err := c.index.Get(id)
	if err != nil {
		return nil // retracted meanwhile: it has no history of its own
	}
	c.happened(event.Of(&b, state, "%s", reason))
	c.heal(&b)
	return failed
}
