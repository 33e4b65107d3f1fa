package cache

import (
	"slices"
	"time"

	"github.com/epcached/epcached/index"
)

// thrashing is what says that the budget is too small: builds that were evicted and soon compiled again.
type thrashing struct {
	evicted, back int     // entries
	seconds       float64 // of compiling what was there before
	bytes         int64   // that they take
}

// thrashSpan is how far back the doctor looks.
const thrashSpan = 7 * 24 * time.Hour

// thrashes looks at the ghosts of late: an entry has come back where there is a build of it, or a later ghost, from after it went.
func (c *Cache) thrashes() (t thrashing) {
	type entry struct {
		key   index.RequestKey
		scope string
	}
	since := c.now().Add(-thrashSpan)
	ghosts := c.index.Ghosts(func(g *index.Ghost) bool { return g.At.After(since) })
	times := make(map[entry]int)
	for i := range ghosts {
		times[entry{ghosts[i].RequestKey, ghosts[i].Scope}]++
	}
	counted, back := make(map[entry]bool), make(map[entry]bool)
	for i := range ghosts {
		g := &ghosts[i]
		e := entry{g.RequestKey, g.Scope}
		if !counted[e] {
			counted[e] = true
			t.evicted++
		}
		times[e]--
		if times[e] == 0 && !c.madeSince(g) {
			continue
		}
		t.seconds += g.CompileSeconds
		if !back[e] {
			back[e] = true
			t.back++
			t.bytes += g.Bytes
		}
	}
	return t
}

// madeSince tells whether there is a build of the ghost's entry from after it went.
func (c *Cache) madeSince(g *index.Ghost) bool {
	builds, err := c.index.Lookup(g.RequestKey, g.Scope)
	return err == nil && slices.ContainsFunc(builds, func(b index.Build) bool { return b.Created.After(g.At) })
}

// thrashAt is how many entries have to come back before the doctor speaks of it.
const thrashAt = 3

// adviseSpace tells of a budget that is too small, and of results that were not kept.
func (c *Cache) adviseSpace() []Advice {
	const subject = "space"
	r, err := c.Space()
	if err != nil {
		return []Advice{warning(subject, "%v", err)}
	}
	var out []Advice
	if t := c.thrashes(); t.back >= thrashAt && 4*t.back >= t.evicted {
		out = append(out, warning(subject, "of %d entries that were evicted in the last 7 days %d were compiled again, for %.1f s", t.evicted, t.back, t.seconds).
			hint("the budget is too small: with %s it would have kept them; see budget in [space]", bytesText(r.Budget+t.bytes)))
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
