package cache

import (
	"slices"
	"time"

	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/space"
)

// thrashSpan is how far back the doctor looks.
const thrashSpan = 7 * 24 * time.Hour

// thrashes looks at the ghosts of late: of what went for the budget, for no other one keeps what went as somebody asked, or for another bound.
func (c *Cache) thrashes() space.Thrashing {
	since := c.now().Add(-thrashSpan)
	return space.Thrashes(c.index.Ghosts(func(g *index.Ghost) bool { return g.ForBudget && g.At.After(since) }), c.madeSince)
}

// madeSince tells whether there is a build of the ghost's entry from after it went.
func (c *Cache) madeSince(g *index.Ghost) bool {
	builds, err := c.index.Lookup(g.RequestKey, g.Scope)
	return err == nil && slices.ContainsFunc(builds, func(b index.Build) bool { return b.Created.After(g.At) })
}

// adviseSpace tells of a budget that is too small, and of results that were not kept.
func (c *Cache) adviseSpace() []Advice {
	const subject = "space"
	r, err := c.Space()
	if err != nil {
		return []Advice{warning(subject, "%v", err)}
	}
	var out []Advice
	if t := c.thrashes(); t.Counts() {
		out = append(out, warning(subject, "of %d entries that were evicted in the last 7 days %d were compiled again, for %.1f s", t.Evicted, t.Back, t.Seconds).
			hint("the budget is too small: with %s it would have kept them; see budget in [space]", bytesText(r.Budget+t.Bytes)))
	}
	used := r.DiskBytes + r.ManifestBytes + r.Held + r.Reserved
	switch {
	case r.Budget > 0 && used > r.Budget:
		out = append(out, warning(subject, "%s are used of a budget of %s, and nothing more may go", bytesText(used), bytesText(r.Budget)).
			hint("epcachectl gc -n says what may not go, and why"))
	case r.Floor > 0 && r.Free < r.Floor:
		out = append(out, warning(subject, "%s are free, and %s are to stay free: nothing more is kept", bytesText(r.Free), bytesText(r.Floor)).
			hint("make room on the disk, or lower free_floor in [space]"))
	}
	if len(out) == 0 && r.Budget > 0 {
		out = append(out, fine(subject, "%s are used of a budget of %s", bytesText(used), bytesText(r.Budget)))
	}
	return out
}
