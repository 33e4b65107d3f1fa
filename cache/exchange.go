package cache

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/forms"
	"github.com/epcached/epcached/index"
)

// idleFor is for how long a container must not have been used before another takes its place: who uses one build in the morning and
// another one in the afternoon shall not have them exchanged twice a day.
const idleFor = 24 * time.Hour

// exchangeAll exchanges what there is to exchange, and finishes what a crash interrupted.
func (c *Cache) exchangeAll(ctx context.Context, after time.Duration, gate forms.Gate) error {
	if err := c.finishExchanges(ctx, after, gate); err != nil {
		return err
	}
	pairs, err := c.forms.Exchangeable(ctx, func(p forms.Pair) bool { return c.mayExchange(p, after) })
	if err != nil {
		return err
	}
	for _, p := range pairs {
		if c.sharing.futile[p] || !c.mayExchange(p, after) || !c.forms.MayExchange(p) { // another one has taken its place just now
			continue
		}
		if err := c.forms.Exchange(ctx, p, gate); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if errors.Is(err, forms.ErrInUse) {
				continue // it is asked for just now
			}
			c.sharing.futile[p] = true // until the next start
			c.log.Warn("blobs not exchanged", "used", p.Used.String(), "container", p.Idle.String(), "error", err)
		}
	}
	return nil
}

// mayExchange tells whether the one is used and the other is not.
func (c *Cache) mayExchange(p forms.Pair, after time.Duration) bool {
	if !c.usedWithin(p.Used, after) {
		return false
	}
	cold, err := c.allCold(p.Idle, packWhen{when: PackCold, after: max(after, idleFor)})
	return err == nil && cold
}

// usedWithin tells whether some build that needs the blob was asked for in that time.
func (c *Cache) usedWithin(d cas.Digest, after time.Duration) bool {
	ids, err := c.index.Needs(d)
	if err != nil {
		return false // whoever needs it finds out
	}
	return slices.ContainsFunc(ids, func(id index.BuildID) bool {
		last, hits := c.index.LastUse(id)
		return hits > 0 && c.now().Sub(last) < after
	})
}

// finishExchanges goes on with what a crash has left, or somebody who had a view just then.
func (c *Cache) finishExchanges(ctx context.Context, after time.Duration, gate forms.Gate) error {
	left, err := c.forms.Unfinished(ctx)
	for _, d := range left {
		if cold, err2 := c.allCold(d, packWhen{when: PackCold, after: after}); err2 != nil || !cold {
			err = errors.Join(err, err2)
			continue
		}
		if err2 := c.forms.FinishExchange(ctx, d, gate); err2 != nil && !errors.Is(err2, forms.ErrInUse) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			c.log.Warn("exchange of containers not finished", "digest", d.String(), "error", err2)
		}
	}
	return err
}
