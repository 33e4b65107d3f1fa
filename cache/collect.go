package cache

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
)

// Collection is a plan of what is done to make room, and afterwards what became of it. What prints it and what carries it
// out look at the same value.
type Collection struct {
	Used, Goal int64 // bytes on disk, of what the peer may collect: before, and wished for; a goal below 0: there is none
	Freed      int64 // that the steps free
	Short      int64 // bytes by which the goal is missed
	Steps      []Step
	Kept       []Kept
	Considered uint64
	Took       time.Duration // to plan

	at     time.Time // of the survey
	yields bool      // packing stops when somebody waits for room: packing takes its time
	hurry  bool      // somebody waits: all goes that is in nobody's hands, used since the survey or not
}

// Action is what a step does.
type Action int

// The actions, the milder ones first: what a copy costs, what packing and unpacking costs, a compile.
const (
	DropCopy Action = iota // the unpacked copy of a packed build goes
	PackBuild
	Evict
)

// String names it: "drop copy", "pack", "remove".
func (a Action) String() string { return [...]string{"drop copy", "pack", "remove"}[a] }

// done is the outcome of a step that was carried out.
func (a Action) done() string { return [...]string{"dropped", "packed", "removed"}[a] }

// Step is what is done with one build; a weight-sharing group is one. A plan may have hundreds of thousands.
type Step struct {
	Action  Action
	ID      index.BuildID
	Build   *index.Build // its record, of those that are told, and while it is carried out; else nil
	Frees   int64        // bytes on disk, after those before it
	Outcome string       // "planned", "dropped", "packed", "removed", "kept: <why>"
	Last    time.Time
	Must    bool // whether there is room or not: it is too old, or its user has too much

	why   stepCause
	of    *candidate // while it is planned
	blobs []uint32   // whose form changes, by place in the inventory; while it is planned
}

// Reason says why it is this build.
func (s *Step) Reason() string { return s.why.said(s.Last) }

// Done counts the steps of one kind that were carried out, or are planned.
func (c *Collection) Done(a Action) (n uint64) {
	for i := range c.Steps {
		if s := &c.Steps[i]; s.Action == a && (s.Outcome == "planned" || s.Outcome == a.done()) {
			n++
		}
	}
	return n
}

// Kept counts the builds that may not go, by reason.
type Kept struct {
	Reason string
	Builds uint64
	Bytes  int64 // their files, on disk
}

// spared says why a build may not go now, "" if it may. own is what the daemon has open.
func (c *Cache) spared(id index.BuildID, own *ownFiles) string {
	if why := c.wantedNow(id); why != "" {
		return why
	}
	v, done := c.viewNow(id)
	if v == nil {
		return ""
	}
	defer done()
	if held, err := leased(v.path); held || err != nil {
		return keptInUse // one that cannot be looked at is left alone
	}
	if served := v.served.Load(); served != 0 && c.now().Sub(time.Unix(0, served)) < pathGrace {
		return "given out lately, perhaps by path"
	}
	by := byNobody
	for i := range v.files {
		by = max(by, openedBy(filepath.Join(v.path, v.id, filepath.FromSlash(v.files[i].name)), own))
	}
	switch by {
	case bySomebody:
		return keptInUse
	case byDaemon:
		return keptReading
	}
	return ""
}

// opener is who has a file open.
type opener int

const (
	byNobody opener = iota
	byDaemon        // and perhaps somebody else
	bySomebody
)

// wantedNow is the part of spared that is answered from memory.
func (c *Cache) wantedNow(id index.BuildID) string {
	if _, pinned := c.index.Pinned(id); pinned {
		return "pinned"
	}
	if c.attend.busy(id) {
		return keptInUse
	}
	return ""
}

const (
	keptInUse   = "in use"
	keptReading = "the daemon is just reading it" // which is no use: it may go when that is over
	keptGone    = "it is gone already"
	keptNoRoom  = "there is no room for what it does not share"
)

// hasView tells whether the build has a view that is in use in this run.
func (c *Cache) hasView(id index.BuildID) bool {
	c.views.mu.Lock()
	defer c.views.mu.Unlock()
	return c.views.live[id] != nil
}

// viewNow gives the build's view, nil if it has none that is in use or was in an earlier run. done ends the look at it.
func (c *Cache) viewNow(id index.BuildID) (v *view, done func()) {
	c.views.mu.Lock()
	v = c.views.live[id]
	c.views.mu.Unlock()
	if v != nil {
		return v, func() {}
	}
	if _, there := c.index.View(id); !there {
		return nil, nil
	}
	b, err := c.index.Get(id)
	if err != nil {
		return nil, nil
	}
	if v = c.earlierView(&b); v == nil {
		return nil, nil
	}
	return v, func() { _ = v.inner.Close() } // read-only: nothing can be lost
}

// ghostsAtOnce is how many removals share the sync that makes their ghosts durable.
const ghostsAtOnce = 16

// Collect carries a plan out, a build at a time, and looks again before each: what was used, pinned or taken since
// stays, and nothing goes beyond the goal. The plan says what became of it. It may be stopped between any two builds.
func (c *Cache) Collect(ctx context.Context, plan *Collection, progress func(done, total int64)) error {
	defer c.places.waits.Work()()
	total := plan.Freed
	plan.Freed = 0
	for next := 0; next < len(plan.Steps); {
		c.flushUses()
		if s := &plan.Steps[next]; s.Action != Evict {
			next++
			if err := c.shrink(ctx, plan, s); err != nil {
				return err
			}
			progress(plan.Freed, total)
			continue
		}
		var batch []*Step
		var expected int64
		for ; next < len(plan.Steps) && len(batch) < ghostsAtOnce && plan.Steps[next].Action == Evict; next++ {
			r := &plan.Steps[next]
			if why := c.still(plan, r, expected); why != "" {
				r.Outcome = "kept: " + why
				continue
			}
			expected += r.Frees
			batch = append(batch, r)
		}
		err := c.evictAll(ctx, plan, batch, progress, total)
		plan.forgetRecords(next)
		if err != nil {
			return err
		}
	}
	if err := c.evictRead(ctx, plan, progress, total); err != nil {
		return err
	}
	if plan.Goal >= 0 {
		plan.Short = max(plan.Used-plan.Freed-plan.Goal, 0)
	}
	return nil
}

// forgetRecords drops the records of steps before this one that are not told: a record takes some KiB.
func (c *Collection) forgetRecords(before int) {
	for i := max(maxShown, before-ghostsAtOnce); i < before; i++ {
		c.Steps[i].Build = nil
	}
}

// readingWait is how long a collection waits for the daemon to be done with reading what is to go.
const readingWait = 2 * time.Second

// evictRead removes what stayed because the daemon was just reading it.
func (c *Cache) evictRead(ctx context.Context, plan *Collection, progress func(done, total int64), total int64) error {
	for end := time.Now().Add(readingWait); ; {
		left := false
		for i := range plan.Steps {
			r := &plan.Steps[i]
			if r.Outcome != "kept: "+keptReading {
				continue
			}
			if why := c.still(plan, r, 0); why != "" {
				r.Outcome = "kept: " + why
				left = left || why == keptReading
			} else if err := c.evictAll(ctx, plan, []*Step{r}, progress, total); err != nil {
				return err
			}
		}
		if !left || time.Now().After(end) {
			return nil
		}
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			return fail(Cancelled, err, "collect")
		}
	}
}

// evictAll removes builds, after their ghosts are durable: nothing goes without one.
func (c *Cache) evictAll(ctx context.Context, plan *Collection, batch []*Step, progress func(done, total int64), total int64) error {
	c.evicting.Lock() // who collects by hand and the daemon by itself may have chosen the same, and one would take back the other's ghost
	defer c.evicting.Unlock()
	batch = slices.DeleteFunc(batch, func(r *Step) bool {
		_, err := c.index.Get(r.ID)
		if err != nil {
			r.Outcome = "kept: " + keptGone
		}
		return err != nil
	})
	if len(batch) == 0 {
		return nil
	}
	ghosts := make([]index.Ghost, len(batch))
	for i, r := range batch {
		b := r.Build
		ghosts[i] = index.Ghost{BuildID: b.ID, RequestKey: b.RequestKey, BuildKey: b.BuildKey, ModelName: b.ModelName, Scope: b.Scope, At: c.now(),
			Reason: evicted(c.now(), r), Bytes: r.Frees, CompileSeconds: b.CompileSeconds, LastUsed: r.Last}
	}
	if err := c.index.Haunt(ctx, ghosts); err != nil {
		for i := range ghosts {
			c.index.Exorcise(ghosts[i].BuildID)
		}
		return fail(Internal, err, "collect")
	}
	for i, r := range batch {
		if err := c.evict(ctx, plan, r); err != nil {
			for _, left := range batch[i:] {
				if _, err := c.index.Get(left.ID); err == nil {
					c.index.Exorcise(left.ID)
				}
			}
			return err
		}
		progress(plan.Freed, total)
	}
	return nil
}

func evicted(at time.Time, r *Step) string {
	return fmt.Sprintf("evicted on %s to make room: %s", at.Format(time.RFC3339), r.Reason())
}

// evict removes one build, unless a request was faster.
func (c *Cache) evict(ctx context.Context, plan *Collection, r *Step) error {
	c.flushUses()
	why := ""
	if ctx.Err() != nil {
		return fail(Cancelled, ctx.Err(), "collect")
	}
	done, ok := c.attend.collect(r.ID)
	if why = keptInUse; ok {
		defer done()
		why = c.still(plan, r, 0)
	}
	if why != "" {
		r.Outcome = "kept: " + why
		c.index.Exorcise(r.ID)
		return nil
	}
	parts := c.partsOf(r.Build)
	before := c.takenBy(parts)
	if _, err := c.retract(ctx, r.Build, evicted(c.now(), r), pathGrace); errors.Is(err, index.ErrNotFound) {
		r.Outcome = "kept: " + keptGone
		c.index.Exorcise(r.ID) // it was removed for another reason
		return nil
	} else if err != nil {
		return fail(Internal, err, "collect %s", r.Build.BuildKey)
	}
	freed := before - c.takenBy(parts)
	c.index.Count("evicted", 1)
	plan.freed(r, freed)
	c.places.tellFreed()
	return nil
}

// freed notes that a step was carried out.
func (c *Collection) freed(s *Step, bytes int64) {
	s.Outcome, s.Frees = s.Action.done(), bytes
	c.Freed += bytes
}

// partsOf lists the blobs of a build and the containers that it is packed with, each once: what its removal may free.
func (c *Cache) partsOf(b *index.Build) map[cas.Digest]int64 {
	parts := distinctBlobs(b)
	for d := range distinctBlobs(b) {
		if p, ok := c.forms.Packed(d); ok {
			for _, container := range p.Containers {
				parts[container.Digest] = container.Size
			}
		}
	}
	return parts
}

// takenBy sums what blobs take on the disk as they are, in all of their forms.
func (c *Cache) takenBy(parts map[cas.Digest]int64) (sum int64) {
	_, apart := c.forms.Folder()
	for d := range parts {
		whole, recipe, unpacked := c.forms.Bytes(d)
		sum += whole + recipe
		if !apart {
			sum += unpacked
		}
	}
	return sum
}

// wholeBytes sums what the blobs of a build take on the disk as they are, each once.
func (c *Cache) wholeBytes(b *index.Build) (sum int64) {
	for d := range distinctBlobs(b) {
		disk, _ := c.diskBytes(d) // of one that is not there, none
		sum += disk
	}
	return sum
}

// distinctBlobs gives the build's blobs, each once, with its size.
func distinctBlobs(b *index.Build) map[cas.Digest]int64 {
	out := make(map[cas.Digest]int64, len(b.Files))
	for _, f := range b.Blobs() {
		out[f.Digest] = f.Size
	}
	return out
}

// still says why a build that was to go stays after all, "" if it goes. freed is what is about to go before it.
func (c *Cache) still(plan *Collection, r *Step, freed int64) string {
	b, err := c.index.Get(r.ID)
	if err != nil {
		return keptGone
	}
	r.Build = &b
	if !r.Must && plan.Goal >= 0 && plan.Used-plan.Freed-freed <= plan.Goal {
		return "there is room by now"
	}
	if last, _ := c.index.LastUse(r.ID); last.After(r.Last) && !plan.hurry {
		return "used since it was planned"
	}
	return c.spared(r.ID, &ownFiles{})
}
