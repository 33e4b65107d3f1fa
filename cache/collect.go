package cache

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// Collection is a plan of what goes to make room, and afterwards what became of it. What prints it and what carries it
// out look at the same value.
type Collection struct {
	Used, Goal int64 // bytes on disk, of what the peer may collect: before, and wished for
	Freed      int64 // that the removals free
	Short      int64 // bytes by which the goal is missed
	Removals   []Removal
	Kept       []Kept
	Considered uint64
	Took       time.Duration // to plan

	at time.Time // of the snapshot
}

// Removal is one build that goes; a weight-sharing group is one.
type Removal struct {
	Build   index.Build
	Frees   int64 // bytes on disk, after those before it
	Reason  string
	Outcome string // "planned", "removed", "kept: <why>"
	Last    time.Time
}

// Kept counts the builds that may not go, by reason.
type Kept struct {
	Reason string
	Builds uint64
	Bytes  int64 // their files
}

// block is what a file's size is rounded up to on disk.
const block = 4096

func onDisk(size int64) int64 { return (size + block - 1) / block * block }

// recent is how long it takes for a build's use to count half.
const recent = 7 * 24 * time.Hour

// candidate is a build of the snapshot.
type candidate struct {
	build index.Build
	last  time.Time
	class int // lower ones go first
	why   string
	worth float64
}

// PlanCollection plans to bring what the peer may collect down to so many bytes: everything for administrators, else
// the peer's own builds. First go builds that are not served, then those that a newer one has taken the place of, then
// those whose compile seconds and recent use pay least for their bytes.
func (c *Cache) PlanCollection(ctx context.Context, p Peer, to int64) (*Collection, error) {
	began := time.Now()
	c.flushUses()
	plan := &Collection{Goal: to, at: c.now()}
	var all []*candidate
	refs := make(map[cas.Digest]int)
	newest := make(map[string]*candidate) // by request key and scope
	err := c.index.Each(ctx, func(b index.Build) error {
		for d := range distinctBlobs(&b) {
			refs[d]++
		}
		if !c.mayChange(p, &b) {
			return nil
		}
		one := &candidate{build: b}
		one.last, _ = c.index.LastUse(b.ID)
		if one.last.Before(b.Created) {
			one.last = b.Created
		}
		all = append(all, one)
		entry := b.RequestKey.String() + b.Scope
		if before := newest[entry]; c.index.StateOf(b.ID).Name == index.Current && (before == nil || before.build.Created.Before(b.Created)) {
			newest[entry] = one
		}
		return nil
	})
	if err != nil {
		return nil, fail(Internal, err, "collect")
	}
	c.measure(plan, all, refs, newest)
	c.choose(plan, all, refs)
	plan.Took = time.Since(began)
	return plan, nil
}

// measure sums what is used, and finds out what each candidate is worth.
func (c *Cache) measure(plan *Collection, all []*candidate, refs map[cas.Digest]int, newest map[string]*candidate) {
	counted := make(map[cas.Digest]bool)
	for _, one := range all {
		b := &one.build
		share := 0.0
		for d, size := range distinctBlobs(b) {
			share += float64(onDisk(size)) / float64(refs[d])
			if !counted[d] {
				counted[d] = true
				plan.Used += onDisk(size)
			}
		}
		_, hits := c.index.LastUse(b.ID)
		idle := max(plan.at.Sub(one.last), 0)
		one.worth = b.CompileSeconds * float64(1+hits) * math.Exp2(-float64(idle)/float64(recent)) / max(share, 1)
		state := c.index.StateOf(b.ID)
		first := newest[b.RequestKey.String()+b.Scope]
		switch {
		case state.Name != index.Current:
			one.class, one.why = 0, "not served: it is "+state.Name
		case first != one && !one.last.After(first.build.Created):
			one.class, one.why = 1, "superseded by the build of "+first.build.Created.Format(time.RFC3339)
		default:
			one.class = 2
			one.why = fmt.Sprintf("pays least for its bytes: %.1f s of compiling, %d hits, last used %s", b.CompileSeconds, hits, one.last.Format(time.RFC3339))
		}
	}
	plan.Considered = uint64(len(all))
}

// choose puts down what goes until the goal is reached. What frees nothing since others share it stays, unless those go too.
func (c *Cache) choose(plan *Collection, all []*candidate, refs map[cas.Digest]int) {
	slices.SortStableFunc(all, func(a, b *candidate) int {
		return cmp.Or(a.class-b.class, cmp.Compare(a.worth, b.worth), a.last.Compare(b.last))
	})
	kept := make(map[string]*Kept)
	for _, one := range all {
		why := c.spared(one.build.ID, &one.build)
		if why == "" && plan.Used-plan.Freed <= plan.Goal {
			why = "pays most"
		}
		if why != "" {
			k := kept[why]
			if k == nil {
				k = &Kept{Reason: why}
				kept[why] = k
			}
			k.Builds++
			for _, size := range distinctBlobs(&one.build) {
				k.Bytes += onDisk(size)
			}
			continue
		}
		frees := int64(0)
		for d, size := range distinctBlobs(&one.build) {
			if refs[d]--; refs[d] == 0 {
				frees += onDisk(size)
			}
		}
		plan.Freed += frees
		plan.Removals = append(plan.Removals, Removal{Build: one.build, Frees: frees, Reason: one.why, Outcome: "planned", Last: one.last})
	}
	plan.Short = max(plan.Used-plan.Freed-plan.Goal, 0)
	for _, why := range sortedKeys(kept) {
		plan.Kept = append(plan.Kept, *kept[why])
	}
}

// distinctBlobs gives the build's blobs, each once, with its size.
func distinctBlobs(b *index.Build) map[cas.Digest]int64 {
	out := make(map[cas.Digest]int64, len(b.Files))
	for _, f := range b.Blobs() {
		out[f.Digest] = f.Size
	}
	return out
}

// spared says why a build may not go now, "" if it may.
func (c *Cache) spared(id index.BuildID, b *index.Build) string {
	if _, pinned := c.index.Pinned(id); pinned {
		return "pinned"
	}
	c.views.mu.Lock()
	v := c.views.live[id]
	c.views.mu.Unlock()
	if v == nil {
		if v = c.earlierView(b); v == nil {
			return ""
		}
		defer v.inner.Close() // read-only: nothing can be lost
	}
	if held, err := leased(v.path); held || err != nil {
		return "in use" // one that cannot be looked at is left alone
	}
	if served := v.served.Load(); served != 0 && c.now().Sub(time.Unix(0, served)) < pathGrace {
		return "given out lately, perhaps by path"
	}
	return ""
}

// Collect carries a plan out, a build at a time, and looks again before each: what was used, pinned or taken since
// stays, and nothing goes beyond the goal. The plan says what became of it. It may be stopped between any two builds.
func (c *Cache) Collect(ctx context.Context, plan *Collection, progress func(done, total int64)) error {
	total := plan.Freed
	plan.Freed = 0
	for i := range plan.Removals {
		r := &plan.Removals[i]
		if ctx.Err() != nil {
			return fail(Cancelled, ctx.Err(), "collect")
		}
		if why := c.still(plan, r); why != "" {
			r.Outcome = "kept: " + why
			continue
		}
		freed, err := c.evict(ctx, r)
		if err != nil {
			return fail(Internal, err, "collect %s", r.Build.BuildKey)
		}
		r.Outcome, r.Frees = "removed", freed
		plan.Freed += freed
		progress(plan.Freed, total)
	}
	plan.Short = max(plan.Used-plan.Freed-plan.Goal, 0)
	return nil
}

// still says why a build that was to go stays after all, "" if it goes.
func (c *Cache) still(plan *Collection, r *Removal) string {
	if _, err := c.index.Get(r.Build.ID); err != nil {
		return "it is gone already"
	}
	if plan.Used-plan.Freed <= plan.Goal {
		return "there is room by now"
	}
	c.flushUses()
	if last, _ := c.index.LastUse(r.Build.ID); last.After(r.Last) {
		return "used since it was planned"
	}
	return c.spared(r.Build.ID, &r.Build)
}

// evict removes a build, after its ghost is durable: nothing goes without one.
func (c *Cache) evict(ctx context.Context, r *Removal) (int64, error) {
	reason := fmt.Sprintf("evicted on %s to make room: %s", c.now().Format(time.RFC3339), r.Reason)
	ghost := index.Ghost{BuildID: r.Build.ID, RequestKey: r.Build.RequestKey, BuildKey: r.Build.BuildKey, ModelName: r.Build.ModelName,
		Scope: r.Build.Scope, At: c.now(), Reason: reason, Bytes: r.Frees, CompileSeconds: r.Build.CompileSeconds, LastUsed: r.Last}
	if err := c.index.Haunt(ctx, []index.Ghost{ghost}); err != nil {
		c.index.Exorcise(r.Build.ID)
		return 0, err
	}
	before := distinctBlobs(&r.Build)
	if _, err := c.retract(ctx, &r.Build, reason, pathGrace); err != nil {
		if _, err := c.index.Get(r.Build.ID); err == nil {
			c.index.Exorcise(r.Build.ID)
		}
		return 0, err
	}
	c.index.Count("evicted", 1)
	freed := int64(0)
	for d, size := range before {
		if !c.cas.Has(d) {
			freed += onDisk(size)
		}
	}
	return freed, nil
}
