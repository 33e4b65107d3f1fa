package store

import (
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/packing"
)

// Collector plans evictions, packing and dropped copies that keep the store within its bounds.
type Collector struct {
	st *Store
}

// collectLoop keeps the store within its bounds. It runs after each stored build, when the disk
// gets full, and periodically because builds become too old.
func (c *Collector) collectLoop(ctx context.Context) {
	look := time.NewTicker(spaceCheckInterval)
	defer look.Stop()
	var aged time.Time // when the builds' ages were last checked
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.st.ledger.wake:
		case <-look.C:
		}
		if end, err := c.st.ledger.beginRound(ctx); err == nil { // otherwise the daemon is stopping
			c.evictToBounds(ctx, &aged)
			end()
		}
		c.keepReserve()
	}
}

const (
	spaceCheckInterval = 5 * time.Second // of the free space, which other programs use too
	ageCheckInterval   = 10 * time.Minute

	// maxRounds bounds the plans of one round. A plan may fail because its builds are in use by
	// now.
	maxRounds = 3
)

// evictToBounds is one round of the collector. It evicts until the store is within its bounds, or
// no more builds may be evicted. aged is when the builds' ages were last checked. If it is nil, the
// round runs for a reservation, evicts only as much as that needs, and packs no build.
func (c *Collector) evictToBounds(ctx context.Context, aged *time.Time) {
	own := aged == nil
	hurry := own
	var last *Collection
	for range maxRounds {
		if !own && c.st.ledger.reservationWaits() {
			return // the waiting reservation runs the next round
		}
		old := !own && (c.st.now().Sub(*aged) >= ageCheckInterval || aged.IsZero())
		above, err := c.AboveBounds(ctx, own)
		if err != nil {
			if ctx.Err() == nil {
				c.st.log.Warn("cannot determine the free space", "error", err)
			}
			return
		}
		if !above && (!old || c.st.settings.Load().Space.MaxUnused == 0) {
			return
		}
		if old {
			*aged = c.st.now()
		}
		need, written := c.st.ledger.lackedBytes()
		goal := Goal{Slack: above && !own, Need: need, Written: written, Urgent: hurry}
		plan, err := c.Plan(ctx, Owner{All: true}, goal)
		if err == nil && len(plan.Steps) > 0 {
			plan.Yields = !own
			err = c.Collect(ctx, plan, func(int64, int64) {})
		}
		if errors.Is(err, ErrReservationWaits) {
			return
		}
		if err != nil {
			if ctx.Err() == nil {
				c.st.log.Warn("cannot free space", "error", err)
			}
			return
		}
		last = plan
		removed, packed, dropped := plan.Count(evict.Evict), plan.Count(evict.PackBuild),
			plan.Count(evict.DropCopy)
		if len(plan.Steps) > 0 {
			c.st.log.Info("collected", "freed", plan.Freed, "builds", removed, "packed", packed,
				"copies", dropped, "of", plan.Considered, "plan_seconds", plan.Took.Seconds())
		}
		if removed+packed+dropped == 0 {
			if len(plan.Steps) == 0 {
				break
			}
			// evict builds that could not be packed, and others in place of those in use
			hurry = true
		}
	}
	if above, err := c.AboveBounds(ctx, own); err == nil && above {
		c.st.ledger.noteFutileRound(last.KeptText())
	}
}

// AboveBounds reports whether builds have to be evicted now, for another reason than their age.
// waits says that a reservation waits, so that bytes which are about to be replaced by fewer count
// in full.
func (c *Collector) AboveBounds(ctx context.Context, waits bool) (bool, error) {
	b, err := c.st.Bounds()
	if err != nil {
		return false, err
	}
	now, err := c.st.Account()
	if err != nil {
		return false, err
	}
	if c.st.ledger.aboveBounds(&b, &now, waits) {
		return true, nil
	}
	if b.User == 0 {
		return false, nil
	}
	users, err := c.st.index.Users(ctx)
	// read afterwards, so that a build that is being published counts once
	storing := c.st.ledger.Reserved().ByUser
	for uid, u := range users {
		if u.LogicalBytes+storing[uid] > b.User {
			return true, nil
		}
	}
	return false, err
}

// aboveBounds reports whether a bound other than a quota is exceeded. Space that reservations lack
// counts for the floor, which is strict, but not for the budget, which one build may exceed.
func (s *Ledger) aboveBounds(b *Bounds, now *Account, waits bool) bool {
	need, written := s.lackedBytes()
	s.mu.Lock()
	defer s.mu.Unlock()
	taken := s.reserved.Disk
	if !waits {
		taken -= s.reserved.Transient
	}
	return b.Budget > 0 && now.Counted()+taken > b.Budget || b.Floor > 0 &&
		b.Free-(taken-s.reserved.Written)-(need-written) < b.Floor && now.Disk > 0
}

// RunShrinkStep carries out a step that removes no build. An error ends the whole collection.
func (c *Collector) RunShrinkStep(ctx context.Context, plan *Collection, s *evict.Step) error {
	if ctx.Err() != nil {
		return apierr.FromContext(ctx, "collect")
	}
	b, err := c.st.index.Get(s.ID)
	why := KeptRemoved
	if err == nil {
		why = c.whyKept(plan, s, 0)
	}
	if why != "" {
		s.NoteKept(why)
		return nil
	}
	var freed int64
	if s.Action == evict.DropCopy {
		freed, err = c.st.packer.DropCopies(s.ID)
	} else {
		freed, err = c.st.packer.PackBuildWith(ctx, s.ID, Packing{When: PackAlways},
			c.UntilUsed(plan, s))
	}
	switch {
	case ctx.Err() != nil:
		return apierr.FromContext(ctx, "collect")
	case freed > 0: // perhaps only a part of the step
		plan.NoteDone(s, freed)
	case errors.Is(err, packing.ErrInUse):
		s.NoteKept(KeptInUse)
	case errors.Is(err, ErrReservationWaits):
		return err
	case cas.IsDiskFull(err) || errors.Is(err, packing.ErrNoSpace):
		s.NoteKept(KeptNoSpace)
	case packing.IsMissingOrDamaged(err):
		s.NoteKept(c.st.WithholdDamaged(ctx, &b, err))
	case err == nil:
		s.NoteKept("it no longer frees any space")
	default:
		s.NoteKept("see the log")
	}
	if err != nil && !errors.Is(err, packing.ErrInUse) && !errors.Is(err, packing.ErrNoSpace) {
		c.st.log.Warn("cannot shrink a "+
			"build", "build", b.BuildKey.String(), "action", s.Action.String(), "error", err)
	}
	return nil
}

// ErrReservationWaits ends a collection of the daemon's own because a reservation needs space, and
// packing would take too long.
var ErrReservationWaits = errors.New("a reservation needs space")

// UntilUsed returns a gate for packing a build. It fails from the moment on when a request uses the
// build, or when a reservation needs space and the plan yields to it.
func (c *Collector) UntilUsed(plan *Collection, s *evict.Step) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		if c.st.buildGuard.inUse(s.ID) {
			return packing.ErrInUse
		}
		if plan.Yields && c.st.ledger.reservationWaits() {
			return ErrReservationWaits
		}
		if last, _ := c.st.index.Uses.LastUse(s.ID); last.After(s.Last) {
			return packing.ErrInUse
		}
		return nil
	}
}
