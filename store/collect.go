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

// Collection is a plan of what is done to make room, and afterwards what became of it. What prints
// it and what carries it out look at the same value.
type Collection struct {
	evict.Plan
	Took time.Duration // to plan

	forBudget bool // what goes for room goes to keep to the budget

	Told   []*index.Build // the records of its first steps
	Yields bool           // it ends when a reservation waits for space
	hurry  bool           // a reservation waits: a use since the survey keeps no build
}

// Protected says why a build may not be removed now, "" if it may. own are the files that the
// daemon itself has open.
func (c *Collector) Protected(id index.BuildID, own *views.OwnFiles) string {
	if why := c.wantedNow(id); why != "" {
		return why
	}
	v, done := c.st.views.Look(id)
	if v == nil {
		return ""
	}
	defer done()
	if held, err := v.Held(); held || err != nil {
		return KeptInUse // one that cannot be looked at is left alone
	}
	if c.st.now().Before(v.ToldUntil()) {
		return "given out lately, perhaps by path"
	}
	switch v.OpenedBy(own) {
	case views.BySomebody:
		return KeptInUse
	case views.ByDaemon:
		return KeptReading
	}
	return ""
}

// wantedNow is the part of Protected that is answered from memory.
func (c *Collector) wantedNow(id index.BuildID) string {
	if _, pinned := c.st.index.Journal.Pinned(id); pinned {
		return "pinned"
	}
	if c.st.inHand.busy(id) {
		return KeptInUse
	}
	return ""
}

// nothingGoes says why no build may go for room, whichever it is; "" if some may: as long as nobody knows all that is needed, no blob is removed.
func (c *Collector) nothingGoes() string {
	if c.st.index.Complete() && c.st.forms.Recipes.Complete() {
		return ""
	}
	return KeptUnread
}

const (
	KeptInUse   = "in use"
	KeptUnread  = "there are records that cannot be read, so its going would free nothing"
	KeptReading = "the daemon is just reading it" // which is no use: it may go when that is over
	KeptGone    = "it is gone already"
	keptRoom    = "there is room by now"
	KeptNoRoom  = "there is no room for what it does not share"
)

// hasView tells whether the build has a view that is in use in this run.
func (st *Store) hasView(id index.BuildID) bool { return st.views.Current(id) != nil }

// Builds that are evicted together share their syncs. The batch is bounded because publishers block
// behind it, and so do reservations that wait for space.
const (
	AtOnce      = 16
	bytesAtOnce = 1 << 30
)

// Collect carries a plan out, some builds at a time, and checks again before each: a build that
// was used, pinned or leased since stays, and nothing is removed beyond the goal. The plan says
// what became of each step. ctx may stop it between two builds.
func (c *Collector) Collect(ctx context.Context, plan *Collection, progress func(done, total int64)) error {
	total := plan.Freed
	plan.Freed = 0
	for next := 0; next < len(plan.Steps); {
		if plan.Yields && c.st.ledger.hurry() {
			return ErrHurry
		}
		if s := &plan.Steps[next]; s.Action != evict.Evict {
			next++
			if err := c.Shrink(ctx, plan, s); err != nil {
				return err
			}
			progress(plan.Freed, total)
			continue
		}
		batch, n := c.batch(plan, next)
		next += n
		if err := c.EvictAll(ctx, plan, batch, progress, total); err != nil {
			return err
		}
	}
	if err := c.evictRead(ctx, plan, progress, total); err != nil {
		return err
	}
	plan.End()
	return nil
}

// batch gives what goes together, of the steps from first on, and how many steps it has looked at.
func (c *Collector) batch(plan *Collection, first int) (batch []*evict.Step, n int) {
	var expected int64
	steps := plan.Steps[first:min(first+AtOnce, len(plan.Steps))]
	for ; n < len(steps) && expected < bytesAtOnce; n++ {
		s := &steps[n]
		if s.Action != evict.Evict {
			break
		}
		why := c.Stays(plan, s, expected)
		if why == keptRoom && len(batch) > 0 {
			break // unless one of those stays after all
		}
		if why != "" {
			s.Keep(why)
			continue
		}
		expected += s.Frees
		batch = append(batch, s)
	}
	return batch, n
}

// eviction is a step that removes a build, with its record, which takes some KiB and is not kept
// for longer.
type eviction struct {
	*evict.Step
	build index.Build
}

// readingWait is how long a collection waits for the daemon to be done with reading what is to go.
const readingWait = 2 * time.Second

// evictRead removes what stayed because the daemon was just reading it. What is compared with
// others is let go for that: it would wait for the request that this may be for.
func (c *Collector) evictRead(ctx context.Context, plan *Collection, progress func(done, total int64), total int64) error {
	reading := func(s evict.Step) bool { return s.KeptFor() == KeptReading }
	if !slices.ContainsFunc(plan.Steps, reading) {
		return nil
	}
	defer c.st.packer.collecting()()
	for end := time.Now().Add(readingWait); ; {
		left := false
		for i := range plan.Steps {
			r := &plan.Steps[i]
			if r.KeptFor() != KeptReading {
				continue
			}
			if why := c.Stays(plan, r, 0); why != "" {
				r.Keep(why)
				left = left || why == KeptReading
			} else if err := c.EvictAll(ctx, plan, []*evict.Step{r}, progress, total); err != nil {
				return err
			}
		}
		if !left || time.Now().After(end) || plan.Yields && c.st.ledger.hurry() {
			return nil
		}
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			return apierr.New(apierr.Cancelled, err, "collect")
		}
	}
}

// EvictAll removes the builds of some steps after their tombstones are durable.
func (c *Collector) EvictAll(ctx context.Context, plan *Collection, steps []*evict.Step, progress func(done, total int64), total int64) error {
	// The administrator's collection may have chosen the same, and one would remove the other's tombstone.
	leave, err := c.evicting.Take(ctx)
	if err != nil {
		return apierr.New(apierr.Cancelled, err, "collect")
	}
	defer leave()
	var batch []eviction
	var tombstones []index.Tombstone
	for _, s := range steps {
		b, err := c.st.index.Get(s.ID)
		if err != nil { // one that cannot be read counts as gone
			s.Keep(KeptGone)
			continue
		}
		batch = append(batch, eviction{s, b})
		tombstones = append(tombstones, index.Tombstone{BuildID: b.ID, RequestKey: b.RequestKey, BuildKey: b.BuildKey, ModelName: b.ModelName, Scope: b.Scope,
			At: c.st.now(), Reason: evicted(c.st.now(), s), Bytes: s.Frees, CompileSeconds: b.CompileSeconds, LastUsed: s.Last,
			ForBudget: plan.forBudget && !s.Must})
	}
	if len(batch) == 0 {
		return nil
	}
	if err := c.st.index.Journal.AddTombstones(ctx, tombstones); err != nil {
		for i := range tombstones {
			c.st.index.Journal.DropTombstone(tombstones[i].BuildID)
		}
		return apierr.New(apierr.Internal, err, "collect")
	}
	err = c.evict(ctx, plan, batch)
	progress(plan.Freed, total)
	return err
}

// EvictedOn is how the reason of each eviction begins.
const EvictedOn = "evicted on "

func evicted(at time.Time, r *evict.Step) string {
	return fmt.Sprintf(EvictedOn+"%s to make room: %s", at.Format(time.RFC3339), r.Reason())
}

// evict removes builds whose tombstones are durable, but for those where a request was faster.
func (c *Collector) evict(ctx context.Context, plan *Collection, batch []eviction) error {
	list := make([]Removal, len(batch))
	var going int64 // what those free that go
	parts := make([]map[cas.Digest]int64, len(batch))
	before := make(map[cas.Digest]int64) // what they took
	taken := make([]func(), len(batch))  // end the collector's having them in hand
	for i, r := range batch {
		list[i] = Removal{Build: &r.build, Why: evicted(c.st.now(), r.Step), grace: views.PathGrace, may: func() bool {
			if ctx.Err() != nil {
				return false
			}
			done, ok := c.st.inHand.evict(r.ID)
			why := KeptInUse
			if ok {
				if why = c.Stays(plan, r.Step, going); why != "" {
					done()
				}
			}
			if why != "" {
				r.Keep(why)
				return false
			}
			taken[i] = done
			going += r.Frees
			parts[i] = c.st.PartsOf(&r.build)
			for d := range parts[i] {
				if _, ok := before[d]; !ok {
					before[d] = c.st.DiskBytesOf(d)
				}
			}
			return true
		}}
	}
	err := c.st.RemoveAll(list, func(*Removal) {})
	for i := len(list) - 1; i >= 0; i-- { // what several had goes with the last of them, as it was planned
		r, d := &batch[i], &list[i]
		if taken[i] != nil {
			taken[i]()
		}
		switch {
		case d.gone:
			c.st.index.Counters.Add("evicted", 1)
			plan.Carried(r.Step, c.st.FreedOf(parts[i], before))
		case errors.Is(d.Err, index.ErrNotFound):
			r.Keep(KeptGone) // it was removed for another reason
		}
		if !d.gone {
			c.st.index.Journal.DropTombstone(r.ID)
		}
		if d.Err != nil && !errors.Is(d.Err, index.ErrNotFound) && err == nil {
			err = fmt.Errorf("%s: %w", r.build.BuildKey, d.Err)
		}
	}
	if err == nil && ctx.Err() != nil {
		return apierr.New(apierr.Cancelled, ctx.Err(), "collect")
	}
	if err != nil {
		return apierr.New(apierr.Internal, err, "collect")
	}
	return nil
}

// FreedOf sums what some blobs take less on the disk than before, and updates before.
func (st *Store) FreedOf(parts map[cas.Digest]int64, before map[cas.Digest]int64) (sum int64) {
	for d := range parts {
		now := st.DiskBytesOf(d)
		sum += before[d] - now
		before[d] = now
	}
	return sum
}

// PartsOf lists the blobs of a build and the bases that it is packed with, each once, with their
// sizes: what its removal may free.
func (st *Store) PartsOf(b *index.Build) map[cas.Digest]int64 {
	parts := DistinctBlobs(b)
	for d := range DistinctBlobs(b) {
		if p, ok := st.forms.Recipes.Has(d); ok {
			for _, container := range p.Containers {
				parts[container.Digest] = container.Size
			}
		}
	}
	return parts
}

// DiskBytesOf returns what a blob takes on the disk now, in all of its forms.
func (st *Store) DiskBytesOf(d cas.Digest) int64 {
	whole, recipe, unpacked := st.forms.Bytes(d)
	if _, apart := st.forms.Copies.Folder(); apart {
		return whole + recipe
	}
	return whole + recipe + unpacked
}

// wholeBytesOf sums what the whole forms of the blobs of a build take on the disk now, each once.
func (st *Store) wholeBytesOf(b *index.Build) (sum int64) {
	for d := range DistinctBlobs(b) {
		disk, _ := st.WholeBytes(d) // of one that is not there, none
		sum += disk
	}
	return sum
}

// DistinctBlobs returns the blobs of a build, each once, with their sizes.
func DistinctBlobs(b *index.Build) map[cas.Digest]int64 {
	out := make(map[cas.Digest]int64, len(b.Files))
	for _, f := range b.Blobs() {
		out[f.Digest] = f.Size
	}
	return out
}

// Stays says why a build that was to be removed stays, "" if it is removed. freed is what earlier
// steps of the batch free.
func (c *Collector) Stays(plan *Collection, s *evict.Step, freed int64) (why string) {
	if !s.Must && plan.Goal >= 0 && plan.Enough(freed) {
		return keptRoom
	}
	if last, _ := c.st.index.Uses.Last(s.ID); last.After(s.Last) && !plan.hurry {
		return "used since it was planned"
	}
	return cmp.Or(c.nothingGoes(), c.Protected(s.ID, &views.OwnFiles{}))
}
