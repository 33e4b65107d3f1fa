package cache

import (
	"context"
	"errors"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// withhold takes a build that failed its check out of service, and says why.
func (c *Cache) withhold(ctx context.Context, b *index.Build, cause error) string {
	var damaged []cas.Digest
	if cas.Unsound(cause) { // of a blob, or of the view's folders, which say nothing of the build
		damaged = c.damagedBlobs(ctx, b)
	}
	if len(damaged) == 0 && !errors.Is(cause, cas.ErrNotFound) {
		c.log.Error("build cannot be served", "build", b.BuildKey.String(), "error", cause)
		return "the build cannot be served: " + cause.Error()
	}
	reason := cause.Error()
	c.log.Warn("build withheld", "build", b.BuildKey.String(), "why", reason)
	for _, d := range damaged {
		c.putAside(d, reason)
	}
	if len(damaged) == 0 {
		c.withholdBuild(b.ID, index.Damaged, reason)
	}
	return "the stored build was damaged: " + reason
}

// damagedBlobs lists those of the build's blobs that are no good. What was verified a moment ago is not hashed again.
func (c *Cache) damagedBlobs(ctx context.Context, b *index.Build) (out []cas.Digest) {
	for _, f := range b.Files {
		if err := c.cas.Verify(ctx, f.Digest, nil); cas.Unsound(err) && !slices.Contains(out, f.Digest) {
			out = append(out, f.Digest)
		}
	}
	return out
}

// withholdBuild sets the state, and takes the view out of use: what is repaired gets a new id.
func (c *Cache) withholdBuild(id index.BuildID, state, reason string) {
	if err := c.index.SetState(id, index.State{Name: state, Reason: reason, At: c.now()}); err != nil {
		c.log.Error("state of build not kept", "build", id.String(), "error", err)
	}
	c.views.mu.Lock()
	v := c.views.live[id]
	c.views.mu.Unlock()
	if v != nil {
		c.dropView(id, v, pathGrace)
	}
	b, err := c.index.Get(id)
	if err != nil {
		return // retracted meanwhile: it has no history of its own
	}
	c.happened(eventOf(&b, state, "%s", reason))
	c.heal(&b)
}
