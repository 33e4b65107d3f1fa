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

// collectLoop keeps the store within its bounds: after each build that is stored, when the disk
// gets full, and from time to time because builds get too old.
func (c *Collector) collectLoop(ctx context.Context) {
	look := time.NewTicker(spaceCheckInterval)
	defer look.Stop()
	var aged time.Time // when the builds' ages were last looked at
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.st.ledger.wake:
		case <-look.C:
		}
		if end, err := c.st.ledger.beginRound(ctx); err == nil { // else the daemon stops
			c.evictToBounds(ctx, &aged)
			end()
		}
		c.keepReserve()
	}
}

const (
	spaceCheckInterval = 5 * time.Second // for low space, which other programs may cause
	ageCheckInterval   = 10 * time.Minute

	// maxRounds bounds the plans of one round: builds of one may be in use by now.
	maxRounds = 3
)

// evictToBounds is a round of the collector: it evicts until the store is within its bounds, or
// nothing more may be evicted. aged is when the builds' ages were last looked at; nil: it runs for
// a reservation, evicts no more than is needed, and packs nothing.
func (c *Collector) evictToBounds(ctx context.Context, aged *time.Time) {
	own := aged == nil
	hurry := own
	var last *Collection
	for range maxRounds {
		if !own && c.st.ledger.reservationWaits() {
			return // the reservation that waits runs the next round
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
			hurry = true // evict what could not be packed, and others than those in use by now
		}
	}
	if above, err := c.AboveBounds(ctx, own); err == nil && above {
		c.st.ledger.noteFutileRound(last.KeptText())
	}
}

// AboveBounds reports whether something has to be removed now, for another reason than its age.
// waits: a reservation waits for it, so that bytes that are about to be made smaller count in full.
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
	// afterwards, so that a build that is published counts once
	storing := c.st.ledger.Reserved().ByUser
	for uid, u := range users {
		if u.LogicalBytes+storing[uid] > b.User {
			return true, nil
		}
	}
	return false, err
}

// aboveBounds reports whether a bound other than a quota is exceeded. Missing space of reservations
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
		b.Free-(taken-s.reserved.Written)-(need-written) < b.Floor && now.Disk > 0 ||
		b.Entries > 0 && now.entries > b.Entries
}

// RunShrinkStep carries out a step that removes no build. An error ends the whole collection.
func (c *Collector) RunShrinkStep(ctx context.Context, plan *Collection, s *evict.Step) error {
	if ctx.Err() != nil {
		return apierr.New(apierr.Cancelled, ctx.Err(), "collect")
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
		return apierr.New(apierr.Cancelled, ctx.Err(), "collect")
	case freed > 0: // also where only a part was done
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

// ErrReservationWaits ends a collection of the daemon's own because a reservation needs space,
// and packing takes too long to free some.
var ErrReservationWaits = errors.New("a reservation needs space")

// UntilUsed returns a gate that closes for good when a request wants the build, which is served as
// it is then. It closes as well when a reservation needs space, if the plan yields to that.
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
