package cache

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store/evict"
	"github.com/epcached/epcached/store/packing"
)

// collectByItself keeps the store within its bounds: after each build that is stored, when the disk gets full, and now and
// then, for what is too old.
func (c *Cache) collectByItself(ctx context.Context) {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	var aged time.Time // when the builds' ages were last looked at
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.places.wake:
		case <-look.C:
		}
		if end, err := c.places.begin(ctx); err == nil { // else the daemon stops
			c.makeRoom(ctx, &aged)
			end()
		}
		c.keepReserve()
	}
}

const (
	lookEvery = 5 * time.Second // for low space, which others may cause
	ageEvery  = 10 * time.Minute

	// collectRounds bounds how often a plan is made anew in one go, since what it was to remove is in use by now.
	collectRounds = 3
)

// makeRoom is a round of the collector: it evicts until the store is within its bounds, or nothing
// more may be evicted. aged is when the builds' ages were last looked at; nil: it runs for a
// reservation, evicts no more than is needed, and packs nothing.
func (c *Cache) makeRoom(ctx context.Context, aged *time.Time) {
	own := aged == nil
	hurry := own
	var last *Collection
	for range collectRounds {
		if !own && c.places.hurry() {
			return // the reservation that waits runs the next round
		}
		old := !own && (c.now().Sub(*aged) >= ageEvery || aged.IsZero())
		above, err := c.aboveBounds(ctx, own)
		if err != nil {
			if ctx.Err() == nil {
				c.log.Warn("space not looked at", "error", err)
			}
			return
		}
		if !above && (!old || c.settings.Load().space.MaxUnused == 0) {
			return
		}
		if old {
			*aged = c.now()
		}
		need, written := c.places.waitedFor()
		goal := Goal{slack: above && !own, need: need, written: written, hurry: hurry}
		plan, err := c.PlanCollection(ctx, Peer{UID: c.uid}, goal)
		if err == nil && len(plan.Steps) > 0 {
			plan.yields = !own
			err = c.Collect(ctx, plan, func(int64, int64) {})
		}
		if errors.Is(err, errHurry) {
			return
		}
		if err != nil {
			if ctx.Err() == nil {
				c.log.Warn("no room made", "error", err)
			}
			return
		}
		last = plan
		removed, packed, dropped := plan.Done(evict.Evict), plan.Done(evict.PackBuild), plan.Done(evict.DropCopy)
		if len(plan.Steps) > 0 {
			c.log.Info("collected", "freed", plan.Freed, "builds", removed, "packed", packed, "copies", dropped, "of", plan.Considered, "plan_seconds", plan.Took.Seconds())
		}
		if removed+packed+dropped == 0 {
			if len(plan.Steps) == 0 {
				break
			}
			hurry = true // evict what could not be packed, and others than those in use by now
		}
	}
	if above, err := c.aboveBounds(ctx, own); err == nil && above {
		c.places.giveUp(last.WhatStays())
	}
}

// aboveBounds tells whether something has to go now, but for its age. waits: a reservation waits for
// it, so that what is just being made smaller counts with all its bytes.
func (c *Cache) aboveBounds(ctx context.Context, waits bool) (bool, error) {
	b, err := c.bounds()
	if err != nil {
		return false, err
	}
	now, err := c.account()
	if err != nil {
		return false, err
	}
	above, byUser := c.places.above(&b, &now, waits)
	if above {
		return true, nil
	}
	if b.user == 0 {
		return false, nil
	}
	users, err := c.index.Users(ctx)
	for uid, u := range users {
		if u.LogicalBytes+byUser[uid] > b.user {
			return true, nil
		}
	}
	return false, err
}

// above tells whether something has to go, but for users' quotas: what their users store is byUser. What reservations lack counts with the floor, which
// nothing may go below; within its budget the store takes one more without anything going.
func (s *places) above(
	b *bounds, now *account, waits bool,
) (above bool, byUser map[uint32]int64) {
	need, written := s.waitedFor()
	s.mu.Lock()
	defer s.mu.Unlock()
	taken := s.reserved
	if !waits {
		taken -= s.passing
	}
	return b.budget > 0 && now.counted()+taken > b.budget || b.floor > 0 && b.free-(taken-s.written)-(need-written) < b.floor && now.disk > 0 ||
		b.entries > 0 && now.entries > b.entries, maps.Clone(s.byUser)
}

// shrink carries out a step that removes no build. An error is the end of the whole collection.
func (c *Cache) shrink(ctx context.Context, plan *Collection, s *evict.Step) error {
	if ctx.Err() != nil {
		return apierr.New(apierr.Cancelled, ctx.Err(), "collect")
	}
	b, err := c.index.Get(s.ID)
	why := keptGone
	if err == nil {
		why = c.stays(plan, s, 0)
	}
	if why != "" {
		s.Keep(why)
		return nil
	}
	var freed int64
	if s.Action == evict.DropCopy {
		freed, err = c.dropUnpacked(s.ID)
	} else {
		freed, err = c.packBuildWith(ctx, s.ID, packWhen{when: PackAlways}, c.untilUsed(plan, s))
	}
	switch {
	case ctx.Err() != nil:
		return apierr.New(apierr.Cancelled, ctx.Err(), "collect")
	case freed > 0: // perhaps not all of it was done; what was, counts
		plan.Carried(s, freed)
	case errors.Is(err, packing.ErrInUse):
		s.Keep(keptInUse)
	case errors.Is(err, errHurry):
		return err
	case cas.Full(err) || errors.Is(err, packing.ErrNoRoom):
		s.Keep(keptNoRoom)
	case packing.Lost(err):
		s.Keep(c.withhold(ctx, &b, err))
	case err == nil:
		s.Keep("it frees nothing by now")
	default:
		s.Keep("see the log")
	}
	if err != nil && !errors.Is(err, packing.ErrInUse) && !errors.Is(err, packing.ErrNoRoom) {
		c.log.Warn("build not made smaller", "build", b.BuildKey.String(), "action", s.Action.String(), "error", err)
	}
	return nil
}

// errHurry ends a collection of the daemon's own because a reservation waits for space, and packing
// takes too long to make some.
var errHurry = errors.New("a reservation waits for space")

// untilUsed is a gate that closes for good when a request wants the build: then the request has it as
// it is. It closes as well when a reservation waits for space, if the plan yields to that.
func (c *Cache) untilUsed(plan *Collection, s *evict.Step) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		if c.attend.busy(s.ID) {
			return packing.ErrInUse
		}
		if plan.yields && c.places.hurry() {
			return errHurry
		}
		if last, _ := c.index.Uses.Last(s.ID); last.After(s.Last) {
			return packing.ErrInUse
		}
		return nil
	}
}
