package cache

import (
	"context"
	"maps"
	"time"

	"github.com/epcached/epcached/space"
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
		c.makeRoom(ctx, &aged)
		c.keepReserve()
	}
}

const (
	lookEvery = 5 * time.Second // for low space, which others may cause
	ageEvery  = 10 * time.Minute

	// collectRounds bounds how often a plan is made anew in one go, since what it was to remove is in use by now.
	collectRounds = 3
)

// makeRoom collects until the store is within its bounds, or nothing more may go.
func (c *Cache) makeRoom(ctx context.Context, aged *time.Time) {
	defer c.places.waits.Work()()
	round, hurry := c.places.begin()
	left := ""
	for range collectRounds {
		old := c.now().Sub(*aged) >= ageEvery || aged.IsZero()
		above, err := c.aboveBounds(ctx)
		if err != nil {
			if ctx.Err() == nil {
				c.log.Warn("space not looked at", "error", err)
			}
			return
		}
		if !above && (!old || c.settings.Load().space.MaxUnused == 0) {
			c.places.end(round, false, c.now(), "")
			c.places.tellFreed()
			return
		}
		if old {
			*aged = c.now()
		}
		need, written, any := c.places.waitedFor()
		hurry = hurry || any
		plan, err := c.PlanCollection(ctx, Peer{UID: c.uid}, Goal{slack: above, need: need, written: written, hurry: hurry})
		if err == nil && len(plan.Steps) > 0 {
			plan.yields = true
			err = c.Collect(ctx, plan, func(int64, int64) {})
		}
		if err != nil {
			if ctx.Err() == nil {
				c.log.Warn("no room made", "error", err)
			}
			return
		}
		removed, packed, dropped := plan.Done(space.Evict), plan.Done(space.PackBuild), plan.Done(space.DropCopy)
		if len(plan.Steps) > 0 {
			c.log.Info("collected", "freed", plan.Freed, "builds", removed, "packed", packed, "copies", dropped, "of", plan.Considered, "plan_seconds", plan.Took.Seconds())
		}
		if removed+packed+dropped == 0 {
			if left = plan.WhatStays(); hurry || len(plan.Steps) == 0 {
				break
			}
			hurry = true // what could not be packed may go
		}
	}
	above, err := c.aboveBounds(ctx)
	c.places.end(round, err == nil && above, c.now(), left)
	c.places.tellFreed() // who waits for room is told that there is none
}

// aboveBounds tells whether something has to go now, but for its age.
func (c *Cache) aboveBounds(ctx context.Context) (bool, error) {
	b, err := c.bounds()
	if err != nil {
		return false, err
	}
	now, err := c.account()
	if err != nil {
		return false, err
	}
	above, byUser := c.places.above(&b, &now)
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

// above tells whether something has to go, but for users' quotas: what their users store is byUser. What waits for room counts with the floor, which
// nothing may go below; within its budget the store takes one more without anything going.
func (s *places) above(b *bounds, now *account) (above bool, byUser map[uint32]int64) {
	need, written, _ := s.waitedFor()
	s.mu.Lock()
	defer s.mu.Unlock()
	taken := s.reserved - s.passing
	return b.budget > 0 && now.counted()+taken > b.budget || b.floor > 0 && b.free-(taken-s.written)-(need-written) < b.floor && now.disk > 0 ||
		b.entries > 0 && now.entries > b.entries, maps.Clone(s.byUser)
}
