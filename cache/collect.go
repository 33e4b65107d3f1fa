package cache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/views"
	"github.com/epcached/epcached/unixsock/wire"
)

// Collection is a plan of what is done to make room, and afterwards what became of it. What prints it and what carries it
// out look at the same value.
type Collection struct {
	evict.Plan
	Took time.Duration // to plan

	forBudget bool // what goes for room goes to keep to the budget

	told   []*index.Build // the records of its first steps
	yields bool           // it ends when a reservation waits for space
	hurry  bool           // a reservation waits: a use since the survey keeps no build
}

// CollectReply tells what a plan does, or what became of it.
func (c *Cache) CollectReply(plan *Collection) *wire.CollectReply {
	reply := &wire.CollectReply{FreedBytes: plan.Freed, UsedBytes: plan.Used,
		BudgetBytes: max(plan.Goal, 0), ShortBytes: plan.Short,
		PlanSeconds: plan.Took.Seconds(), Considered: plan.Considered,
		Removed: plan.Done(evict.Evict), Packed: plan.Done(evict.PackBuild),
		Copies: plan.Done(evict.DropCopy), More: uint32(len(plan.Steps) - len(plan.told))}
	for i, b := range plan.told {
		r := &plan.Steps[i]
		reply.Steps = append(reply.Steps, &wire.CollectStep{Build: b.BuildKey.String(),
			ModelName: wire.Clip(b.ModelName), Ep: wire.Clip(query.FirstEP(b)), Scope: b.Scope, FreesBytes: r.Frees,
			Reason: wire.Clip(r.Reason()), Outcome: wire.Clip(r.Outcome), CompileSeconds: b.CompileSeconds,
			LastUsedMs: wire.Milliseconds(r.Last), Models: uint32(max(1, len(b.Members))),
			Action: r.Action.String()})
	}
	for _, k := range plan.Kept {
		kept := &wire.Kept{Reason: k.Reason, Builds: k.Builds, Bytes: k.Bytes}
		for _, id := range k.First {
			if b, err := c.index.Get(id); err == nil { // else it has gone
				kept.Keys = append(kept.Keys, b.BuildKey.String())
			}
		}
		reply.Kept = append(reply.Kept, kept)
	}
	return reply
}

// spared says why a build may not go now, "" if it may. own is what the daemon has open.
func (c *Cache) spared(id index.BuildID, own *views.OwnFiles) string {
	if why := c.wantedNow(id); why != "" {
		return why
	}
	v, done := c.views.Look(id)
	if v == nil {
		return ""
	}
	defer done()
	if held, err := v.Held(); held || err != nil {
		return keptInUse // one that cannot be looked at is left alone
	}
	if c.now().Before(v.ToldUntil()) {
		return "given out lately, perhaps by path"
	}
	switch v.OpenedBy(own) {
	case views.BySomebody:
		return keptInUse
	case views.ByDaemon:
		return keptReading
	}
	return ""
}

// wantedNow is the part of spared that is answered from memory.
func (c *Cache) wantedNow(id index.BuildID) string {
	if _, pinned := c.index.Journal.Pinned(id); pinned {
		return "pinned"
	}
	if c.attend.busy(id) {
		return keptInUse
	}
	return ""
}

// nothingGoes says why no build may go for room, whichever it is; "" if some may: as long as nobody knows all that is needed, no blob is removed.
func (c *Cache) nothingGoes() string {
	if c.index.Complete() && c.forms.Recipes.Complete() {
		return ""
	}
	return keptUnread
}

const (
	keptInUse   = "in use"
	keptUnread  = "there are records that cannot be read, so its going would free nothing"
	keptReading = "the daemon is just reading it" // which is no use: it may go when that is over
	keptGone    = "it is gone already"
	keptRoom    = "there is room by now"
	keptNoRoom  = "there is no room for what it does not share"
)

// hasView tells whether the build has a view that is in use in this run.
func (c *Cache) hasView(id index.BuildID) bool {
	return c.views.Current(id) != nil
}

// Builds that are evicted together share their syncs. The batch is bounded because publishers block
// behind it, and so do reservations that wait for space.
const (
	atOnce      = 16
	bytesAtOnce = 1 << 30
)

// Collect carries a plan out, some builds at a time, and looks again before each: what was used, pinned or taken since
// stays, and nothing goes beyond the goal. The plan says what became of it. It may be stopped between any two builds.
func (c *Cache) Collect(ctx context.Context, plan *Collection, progress func(done, total int64)) error {
	total := plan.Freed
	plan.Freed = 0
	for next := 0; next < len(plan.Steps); {
		if plan.yields && c.places.hurry() {
			return errHurry
		}
		if s := &plan.Steps[next]; s.Action != evict.Evict {
			next++
			if err := c.shrink(ctx, plan, s); err != nil {
				return err
			}
			progress(plan.Freed, total)
			continue
		}
		batch, n := c.batch(plan, next)
		next += n
		if err := c.evictAll(ctx, plan, batch, progress, total); err != nil {
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
func (c *Cache) batch(plan *Collection, first int) (batch []*evict.Step, n int) {
	var expected int64
	steps := plan.Steps[first:min(first+atOnce, len(plan.Steps))]
	for ; n < len(steps) && expected < bytesAtOnce; n++ {
		s := &steps[n]
		if s.Action != evict.Evict {
			break
		}
		why := c.stays(plan, s, expected)
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

// removal is a step that removes a build, and its record, which takes some KiB and is not kept for longer.
type removal struct {
	*evict.Step
	build index.Build
}

// readingWait is how long a collection waits for the daemon to be done with reading what is to go.
const readingWait = 2 * time.Second

// evictRead removes what stayed because the daemon was just reading it. What is compared with
// others is let go for that: it would wait for the request that this may be for.
func (c *Cache) evictRead(ctx context.Context, plan *Collection, progress func(done, total int64), total int64) error {
	reading := func(s evict.Step) bool { return s.KeptFor() == keptReading }
	if !slices.ContainsFunc(plan.Steps, reading) {
		return nil
	}
	defer c.sharing.collecting()()
	for end := time.Now().Add(readingWait); ; {
		left := false
		for i := range plan.Steps {
			r := &plan.Steps[i]
			if r.KeptFor() != keptReading {
				continue
			}
			if why := c.stays(plan, r, 0); why != "" {
				r.Keep(why)
				left = left || why == keptReading
			} else if err := c.evictAll(ctx, plan, []*evict.Step{r}, progress, total); err != nil {
				return err
			}
		}
		if !left || time.Now().After(end) || plan.yields && c.places.hurry() {
			return nil
		}
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			return apierr.New(apierr.Cancelled, err, "collect")
		}
	}
}

// evictAll removes builds, after their ghosts are durable: nothing goes without one.
func (c *Cache) evictAll(ctx context.Context, plan *Collection, steps []*evict.Step, progress func(done, total int64), total int64) error {
	c.evicting.Lock() // who collects by hand and the daemon by itself may have chosen the same, and one would take back the other's ghost
	defer c.evicting.Unlock()
	var batch []removal
	var ghosts []index.Tombstone
	for _, s := range steps {
		b, err := c.index.Get(s.ID)
		if err != nil { // one that cannot be read counts as gone
			s.Keep(keptGone)
			continue
		}
		batch = append(batch, removal{s, b})
		ghosts = append(ghosts, index.Tombstone{BuildID: b.ID, RequestKey: b.RequestKey, BuildKey: b.BuildKey, ModelName: b.ModelName, Scope: b.Scope,
			At: c.now(), Reason: evicted(c.now(), s), Bytes: s.Frees, CompileSeconds: b.CompileSeconds, LastUsed: s.Last,
			ForBudget: plan.forBudget && !s.Must})
	}
	if len(batch) == 0 {
		return nil
	}
	if err := c.index.Journal.AddTombstones(ctx, ghosts); err != nil {
		for i := range ghosts {
			c.index.Journal.DropTombstone(ghosts[i].BuildID)
		}
		return apierr.New(apierr.Internal, err, "collect")
	}
	err := c.evict(ctx, plan, batch)
	progress(plan.Freed, total)
	return err
}

// evictedOn is how the reason of each eviction begins.
const evictedOn = "evicted on "

func evicted(at time.Time, r *evict.Step) string {
	return fmt.Sprintf(evictedOn+"%s to make room: %s", at.Format(time.RFC3339), r.Reason())
}

// evict removes builds whose ghosts are durable, but for those where a request was faster.
func (c *Cache) evict(ctx context.Context, plan *Collection, batch []removal) error {
	list := make([]departure, len(batch))
	var going int64 // what those free that go
	parts := make([]map[cas.Digest]int64, len(batch))
	before := make(map[cas.Digest]int64) // what they took
	taken := make([]func(), len(batch))  // end the collector's having them in hand
	for i, r := range batch {
		list[i] = departure{build: &r.build, why: evicted(c.now(), r.Step), grace: views.PathGrace, may: func() bool {
			if ctx.Err() != nil {
				return false
			}
			done, ok := c.attend.collect(r.ID)
			why := keptInUse
			if ok {
				if why = c.stays(plan, r.Step, going); why != "" {
					done()
				}
			}
			if why != "" {
				r.Keep(why)
				return false
			}
			taken[i] = done
			going += r.Frees
			parts[i] = c.partsOf(&r.build)
			for d := range parts[i] {
				if _, ok := before[d]; !ok {
					before[d] = c.takenBy(d)
				}
			}
			return true
		}}
	}
	err := c.retractAll(list, func(*departure) {})
	for i := len(list) - 1; i >= 0; i-- { // what several had goes with the last of them, as it was planned
		r, d := &batch[i], &list[i]
		if taken[i] != nil {
			taken[i]()
		}
		switch {
		case d.gone:
			c.index.Counters.Add("evicted", 1)
			plan.Carried(r.Step, c.freedOf(parts[i], before))
		case errors.Is(d.err, index.ErrNotFound):
			r.Keep(keptGone) // it was removed for another reason
		}
		if !d.gone {
			c.index.Journal.DropTombstone(r.ID)
		}
		if d.err != nil && !errors.Is(d.err, index.ErrNotFound) && err == nil {
			err = fmt.Errorf("%s: %w", r.build.BuildKey, d.err)
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

// freedOf sums what some blobs take less on the disk than before, and takes note of it in before.
func (c *Cache) freedOf(parts map[cas.Digest]int64, before map[cas.Digest]int64) (sum int64) {
	for d := range parts {
		now := c.takenBy(d)
		sum += before[d] - now
		before[d] = now
	}
	return sum
}

// partsOf lists the blobs of a build and the containers that it is packed with, each once: what its removal may free.
func (c *Cache) partsOf(b *index.Build) map[cas.Digest]int64 {
	parts := distinctBlobs(b)
	for d := range distinctBlobs(b) {
		if p, ok := c.forms.Recipes.Has(d); ok {
			for _, container := range p.Containers {
				parts[container.Digest] = container.Size
			}
		}
	}
	return parts
}

// takenBy is what a blob takes on the disk as it is, in all of its forms.
func (c *Cache) takenBy(d cas.Digest) int64 {
	whole, recipe, unpacked := c.forms.Bytes(d)
	if _, apart := c.forms.Copies.Folder(); apart {
		return whole + recipe
	}
	return whole + recipe + unpacked
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

// stays says why a build that was to go stays after all, "" if it goes. freed is what is about to go before it.
func (c *Cache) stays(plan *Collection, s *evict.Step, freed int64) (why string) {
	if !s.Must && plan.Goal >= 0 && plan.Enough(freed) {
		return keptRoom
	}
	if last, _ := c.index.Uses.Last(s.ID); last.After(s.Last) && !plan.hurry {
		return "used since it was planned"
	}
	return cmp.Or(c.nothingGoes(), c.spared(s.ID, &views.OwnFiles{}))
}
