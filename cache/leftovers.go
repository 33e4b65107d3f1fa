package cache

import (
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/views"
)

// removeLeftovers removes blobs that no manifest refers to, what a put left that was never
// acknowledged, and recipes of blobs that are whole, and brings the account of the others to what
// they take: a crash may have come between a change of form and its being accounted for. Each file
// is looked at once for both.
func (c *Cache) removeLeftovers(ctx context.Context) error {
	if !c.index.Complete() {
		c.log.Warn("leftovers stay: there are builds that this version cannot read")
		return nil
	}
	l := leftovers{c: c, pace: pace{last: time.Now()}}
	// Recipes first: their containers may be left over as well.
	err := errors.Join(c.forms.RemoveDoubles(ctx), c.forms.Recipes.Walk(ctx, l.recipe))
	err = errors.Join(err, l.wholeBlobs(ctx))
	for _, d := range l.lost {
		if freed, err2 := c.forms.Remove(d); err2 != nil {
			err = errors.Join(err, err2)
		} else if freed > 0 {
			c.log.Info("leftover blob removed", "digest", d.String())
		}
	}
	return errors.Join(err, c.remeasure(ctx, l.wrong))
}

// leftovers is a look at all blobs, in order of digests.
type leftovers struct {
	c *Cache
	pace

	lost, wrong []cas.Digest         // that no build needs, and that are accounted for with other bytes than they take
	needed      map[cas.Digest]int64 // those that begin with the byte before next and were not seen yet, with what is accounted for
	next        int                  // first byte of those that come after them
}

func (l *leftovers) recipe(d cas.Digest, _ dedupe.Packed) error {
	ids, err := l.c.index.Needs(d)
	if err == nil && len(ids) == 0 {
		l.lost = append(l.lost, d)
	}
	l.c.dropViewsWithout(d, ids)
	return err
}

// dropViewsWithout takes views out of use that lead to the unpacked form of a packed blob when that has gone, with an earlier boot say: nobody is given
// them again, and what only they have would be in no account.
func (c *Cache) dropViewsWithout(d cas.Digest, ids []index.BuildID) {
	if _, _, unpacked := c.forms.Bytes(d); unpacked > 0 || !c.forms.OnlyPacked(d) {
		return
	}
	for _, id := range ids {
		if _, there := c.index.Views.Get(id[:]); !there || c.attend.busy(id) {
			continue
		}
		if b, err := c.index.Get(id); err == nil { // else it has just gone
			if v := c.views.Of(&b); v != nil {
				c.views.Drop(id, v, views.PathGrace)
			}
		}
	}
}

func (l *leftovers) wholeBlobs(ctx context.Context) error {
	err := l.c.cas.Walk(ctx, func(d cas.Digest, _, disk int64) error {
		if err := l.upTo(ctx, d[0]); err != nil {
			return err
		}
		accounted, ok := l.needed[d]
		switch {
		case !ok: // since then it may have been published: who removes it asks once more
			l.lost = append(l.lost, d)
		case accounted != disk:
			l.wrong = append(l.wrong, d)
		}
		delete(l.needed, d)
		return l.rest(ctx)
	})
	if err == nil {
		err = l.upTo(ctx, 255)
	}
	if err == nil {
		l.unseen()
	}
	return err
}

// upTo goes on to the blobs that begin with this byte.
func (l *leftovers) upTo(ctx context.Context, first byte) (err error) {
	for ; l.next <= int(first); l.next++ {
		l.unseen()
		if l.needed, err = l.c.index.NeededIn(ctx, byte(l.next)); err != nil {
			return err
		}
	}
	return nil
}

// unseen are those that are needed and were not seen: they are packed or missing, and take nothing.
func (l *leftovers) unseen() {
	for d, accounted := range l.needed {
		if accounted != 0 {
			l.wrong = append(l.wrong, d)
		}
	}
}

// pace lets work that nobody waits for take half of a processor at most.
type pace struct {
	last  time.Time // when it went on
	steps int
}

// stepsAtOnce are some milliseconds' work.
const stepsAtOnce = 256

// rest is called after each step.
func (p *pace) rest(ctx context.Context) error {
	if p.steps++; p.steps%stepsAtOnce != 0 {
		return nil
	}
	err := sleep(ctx, min(time.Since(p.last), mostPause))
	p.last = time.Now()
	return err
}
