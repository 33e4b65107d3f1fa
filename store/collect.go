package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/views"
)

// Collection is a plan of evictions, and after Collect its outcome.
type Collection struct {
	evict.Plan
	Took time.Duration // time of planning

	bound string // why space is freed: forBudget, forFloor or forGoal

	Records []*index.Build // the records of its first steps
	Yields  bool           // it stops when a reservation needs space
	urgent  bool           // for a waiting reservation, so use since the survey protects no build
}

// WhyProtected returns why a build may not be removed now, "" if it may. own has the files that the
// daemon itself has open.
func (c *Collector) WhyProtected(id index.BuildID, own *views.OwnFiles) string {
	if why := c.pinnedOrInUse(id); why != "" {
		return why
	}
	v, done := c.st.views.Borrow(id)
	if v == nil {
		return ""
	}
	defer done()
	if held, err := v.Leased(); held || err != nil {
		return KeptInUse // if it cannot be checked, it is kept
	}
	if c.st.now().Before(v.PathGraceEnd()) {
		return "served recently, perhaps by path"
	}
	switch v.OpenedBy(own) {
	case views.ByOther:
		return KeptInUse
	case views.ByDaemon:
		return KeptReading
	}
	return ""
}

// pinnedOrInUse is the part of WhyProtected that needs no file.
func (c *Collector) pinnedOrInUse(id index.BuildID) string {
	if _, pinned := c.st.index.Journal.Pinned(id); pinned {
		return "pinned"
	}
	if c.st.buildGuard.inUse(id) {
		return KeptInUse
	}
	return ""
}

// whyNoEviction returns why no build may be evicted, because some needs are unknown; "" if builds
// may be.
func (c *Collector) whyNoEviction() string {
	if c.st.index.Complete() && c.st.packing.Recipes.Complete() {
		return ""
	}
	return KeptUnreadable
}

const (
	KeptInUse      = "in use"
	KeptUnreadable = "unreadable records may need its files, so its removal would free no space"
	KeptReading    = "the daemon is reading it" // no use by a client; it may be evicted afterwards
	KeptRemoved    = "it was removed already"
	keptEnough     = "enough space is free by now"
	KeptNoSpace    = "there is no space for its own bytes"
)

// BatchSize is how many evictions share their syncs. It is bounded because a reservation may wait
// for the space of the first one.
const BatchSize = 16

// Collect carries out a plan in batches. It checks each build again: it skips those that were used,
// pinned or leased since, and stops at the goal. The plan's steps have the outcomes. ctx may stop
// it between two builds.
func (c *Collector) Collect(ctx context.Context, plan *Collection,
	progress func(done, total int64)) error {
	total := plan.Freed
	plan.Freed = 0
	for next := 0; next < len(plan.Steps); {
		if plan.Yields && c.st.ledger.reservationWaits() {
			return ErrReservationWaits
		}
		n, err := 1, error(nil)
		if s := &plan.Steps[next]; s.Action != evict.Evict {
			err = c.RunShrinkStep(ctx, plan, s)
		} else {
			for n < BatchSize && next+n < len(plan.Steps) &&
				plan.Steps[next+n].Action == evict.Evict {
				n++
			}
			err = c.EvictAll(ctx, plan, plan.Steps[next:next+n])
		}
		if err != nil {
			return err
		}
		next += n
		progress(plan.Freed, total)
	}
	if err := c.evictRead(ctx, plan); err != nil {
		return err
	}
	progress(plan.Freed, total)
	plan.Finish()
	return nil
}

// readingWait is how long a collection waits for the daemon to finish reading a build.
const readingWait = 2 * time.Second

// evictRead evicts builds that were skipped because the daemon was reading them. It interrupts
// background comparisons, because they pause while the request runs that waits for this space.
func (c *Collector) evictRead(ctx context.Context, plan *Collection) error {
	reading := func(s evict.Step) bool { return s.KeptReason() == KeptReading }
	if !slices.ContainsFunc(plan.Steps, reading) {
		return nil
	}
	defer c.st.packer.interruptReads()()
	for end := time.Now().Add(readingWait); ; {
		left := false
		for i := range plan.Steps {
			r := &plan.Steps[i]
			if r.KeptReason() != KeptReading {
				continue
			}
			if err := c.EvictAll(ctx, plan, plan.Steps[i:i+1]); err != nil {
				return err
			}
			left = left || r.KeptReason() == KeptReading
		}
		if !left || time.Now().After(end) || plan.Yields && c.st.ledger.reservationWaits() {
			return nil
		}
		if sleep(ctx, 5*time.Millisecond) != nil {
			return apierr.FromContext(ctx, "collect")
		}
	}
}

// EvictAll evicts the builds of the steps, except those that are protected by now. It makes their
// tombstones durable first.
func (c *Collector) EvictAll(ctx context.Context, plan *Collection, steps []evict.Step) error {
	list := make([]Removal, 0, len(steps))
	before := make(map[cas.Digest]int64) // bytes that their parts take
	var going int64                      // bytes that this batch frees
	for i := range steps {
		s := &steps[i]
		b, err := c.st.index.Get(s.ID)
		if err != nil { // an unreadable build counts as removed
			s.NoteKept(KeptRemoved)
			continue
		}
		why := "evicted on " + c.st.now().Format(time.RFC3339)
		if !s.Must {
			why += " to free space (" + plan.bound + ")"
		}
		why += ": " + s.Reason()
		list = append(list, Removal{Build: &b, Why: why, grace: views.PathGrace, step: s,
			parts: c.st.PartsOf(&b),
			tombstone: &index.Tombstone{BuildID: b.ID, RequestKey: b.RequestKey,
				BuildKey: b.BuildKey, ModelName: b.ModelName, Scope: b.Scope,
				ModelDigest: b.ModelDigest, At: c.st.now(), Reason: why, Bytes: s.Frees,
				CompileSeconds: b.CompileSeconds, LastUsed: s.Last,
				ForBudget: plan.bound == forBudget && !s.Must,
				ForFloor:  plan.bound == forFloor && !s.Must}})
		d := &list[len(list)-1]
		c.st.FreedOf(d.parts, before)
		d.may = func() bool { return ctx.Err() == nil && c.mayEvict(plan, d, &going) }
	}
	err := c.st.RemoveAll(list)
	// Backwards, because the plan counts a shared part for the last build that has it.
	for _, d := range slices.Backward(list) {
		if d.guarded != nil {
			d.guarded()
		}
		switch {
		case d.Removed:
			c.st.index.Counters.Add("evicted", 1)
			plan.NoteDone(d.step, c.st.FreedOf(d.parts, before))
		case errors.Is(d.Err, index.ErrNotFound):
			d.step.NoteKept(KeptRemoved) // it was removed by another caller
			continue
		}
		if d.Err != nil && err == nil {
			err = fmt.Errorf("%s: %w", d.Build.BuildKey, d.Err)
		}
	}
	if err != nil {
		return apierr.New(apierr.Internal, err, "collect")
	} else if ctx.Err() != nil {
		return apierr.FromContext(ctx, "collect")
	}
	return nil
}

// mayEvict guards a build, so that no request can use it any more, and checks it for the last time.
// freed is the sum that the batch frees.
func (c *Collector) mayEvict(plan *Collection, d *Removal, freed *int64) bool {
	done, why := c.st.buildGuard.beginEviction(d.step.ID)
	if why == "" {
		if why = c.whyKept(plan, d.step, *freed); why != "" {
			done()
		}
	}
	if why != "" {
		d.step.NoteKept(why)
		return false
	}
	d.guarded, *freed = done, *freed+d.step.Frees
	return true
}

// FreedOf returns how many bytes less the blobs take on the disk than before, and updates before.
func (st *Store) FreedOf(parts map[cas.Digest]int64, before map[cas.Digest]int64) (sum int64) {
	for d := range parts {
		now := st.DiskBytesOf(d)
		sum += before[d] - now
		before[d] = now
	}
	return sum
}

// PartsOf lists the blobs of a build and the bases that it is packed with, each once, with their
// sizes. Removing the build may free them.
func (st *Store) PartsOf(b *index.Build) map[cas.Digest]int64 {
	parts := b.DistinctBlobs()
	for d := range b.DistinctBlobs() {
		if p, ok := st.packing.Recipes.Has(d); ok {
			for _, base := range p.Bases {
				parts[base.Digest] = base.Size
			}
		}
	}
	return parts
}

// DiskBytesOf returns how many bytes a blob takes on the disk now, in all its representations.
func (st *Store) DiskBytesOf(d cas.Digest) int64 {
	whole, recipe, unpacked := st.packing.Bytes(d)
	return whole + recipe + unpacked
}

// whyKept returns why a planned eviction is skipped, "" if it is not. freed is the sum of the
// batch's earlier steps.
func (c *Collector) whyKept(plan *Collection, s *evict.Step, freed int64) (why string) {
	if !s.Must && plan.Goal >= 0 && plan.GoalReached(freed) {
		return keptEnough
	}
	if last, _ := c.st.index.Uses.LastUse(s.ID); last.After(s.Last) && !plan.urgent {
		return "used after the plan was made"
	}
	return cmp.Or(c.whyNoEviction(), c.WhyProtected(s.ID, &views.OwnFiles{}))
}
