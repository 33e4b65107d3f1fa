package cache

import (
	"context"
	"errors"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/forms"
	"github.com/epcached/epcached/refusal"
	"github.com/epcached/epcached/space"
)

// shrink carries out a step that removes no build. An error is the end of the whole collection.
func (c *Cache) shrink(ctx context.Context, plan *Collection, s *space.Step) error {
	if ctx.Err() != nil {
		return refusal.New(refusal.Cancelled, ctx.Err(), "collect")
	}
	b, why := c.still(plan, s, 0)
	if why != "" {
		s.Keep(why)
		return nil
	}
	var freed int64
	var err error
	if s.Action == space.DropCopy {
		freed, err = c.dropUnpacked(s.ID)
	} else {
		freed, err = c.packBuildWith(ctx, s.ID, packWhen{when: PackAlways}, c.untilUsed(plan, s))
	}
	switch {
	case ctx.Err() != nil:
		return refusal.New(refusal.Cancelled, ctx.Err(), "collect")
	case freed > 0: // perhaps not all of it was done; what was, counts
		plan.Carried(s, freed)
	case errors.Is(err, forms.ErrInUse):
		s.Keep(keptInUse)
	case errors.Is(err, errHurry):
		return err
	case cas.Full(err) || errors.Is(err, forms.ErrNoRoom):
		s.Keep(keptNoRoom)
	case forms.Lost(err):
		s.Keep(c.withhold(ctx, b, err))
	case err == nil:
		s.Keep("it frees nothing by now")
	default:
		s.Keep("see the log")
	}
	if err != nil && !errors.Is(err, forms.ErrInUse) && !errors.Is(err, forms.ErrNoRoom) {
		c.log.Warn("build not made smaller", "build", b.BuildKey.String(), "action", s.Action.String(), "error", err)
	}
	return nil
}

// errHurry ends a collection of the daemon's own because a reservation waits for space, and packing
// takes too long to make some.
var errHurry = errors.New("a reservation waits for space")

// untilUsed is a gate that closes for good when a request wants the build: then the request has it as
// it is. It closes as well when a reservation waits for space, if the plan yields to that.
func (c *Cache) untilUsed(plan *Collection, s *space.Step) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		if c.attend.busy(s.ID) {
			return forms.ErrInUse
		}
		if plan.yields && c.places.hurry() {
			return errHurry
		}
		if last, _ := c.index.LastUse(s.ID); last.After(s.Last) {
			return forms.ErrInUse
		}
		return nil
	}
}
