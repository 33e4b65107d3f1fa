package store

import (
	"context"
	"errors"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store/views"
)

// RemoveLeftovers removes blobs that no manifest refers to, files of puts that were never
// acknowledged, and recipes of blobs that are whole. It brings the account of the other blobs to
// what they take, because a crash may have come between a change of form and its being accounted
// for. Each file is looked at once for both.
func (st *Store) RemoveLeftovers(ctx context.Context) error {
	if !st.index.Complete() {
		st.log.Warn("leftovers are kept, because this version cannot read all builds")
		return nil
	}
	l := leftovers{st: st, Pace: Pace{Last: time.Now()}}
	// Recipes first: their bases may be left over as well.
	err := errors.Join(st.forms.RemoveRecipesOfWhole(ctx), st.forms.Recipes.Walk(ctx, l.recipe))
	err = errors.Join(err, l.wholeBlobs(ctx))
	for _, d := range l.lost {
		if freed, err2 := st.forms.Remove(d); err2 != nil {
			err = errors.Join(err, err2)
		} else if freed > 0 {
			st.log.Info("leftover blob removed", "digest", d.String())
		}
	}
	return errors.Join(err, st.remeasure(ctx, l.wrong))
}

// leftovers is a look at all blobs, in order of digests.
type leftovers struct {
	st *Store
	Pace

	// that no build needs, and that are accounted for with other bytes than they take
	lost, wrong []cas.Digest
	// those that begin with the byte before next and were not seen yet, with what is accounted for
	needed map[cas.Digest]int64
	next   int // first byte of those that come after them
}

func (l *leftovers) recipe(d cas.Digest, _ dedupe.Packed) error {
	ids, err := l.st.index.Needs(d)
	if err == nil && len(ids) == 0 {
		l.lost = append(l.lost, d)
	}
	l.dropViewsWithout(d, ids)
	return err
}

// dropViewsWithout drops the views of a packed blob without its unpacked form, say after a reboot:
// they are not served again, and bytes that only they have would be in no account.
func (l *leftovers) dropViewsWithout(d cas.Digest, ids []index.BuildID) {
	if _, _, unpacked := l.st.forms.Bytes(d); unpacked > 0 || !l.st.forms.OnlyPacked(d) {
		return
	}
	for _, id := range ids {
		if _, there := l.st.index.Views.Get(id[:]); !there || l.st.buildGuard.inUse(id) {
			continue
		}
		if b, err := l.st.index.Get(id); err == nil { // else it has just been removed
			if v := l.st.views.ForBuild(&b); v != nil {
				l.st.views.Drop(id, v, views.PathGrace)
			}
		}
	}
}

func (l *leftovers) wholeBlobs(ctx context.Context) error {
	err := l.st.cas.Walk(ctx, func(d cas.Digest, _, disk int64) error {
		if err := l.advanceTo(ctx, d[0]); err != nil {
			return err
		}
		accounted, ok := l.needed[d]
		switch {
		case !ok: // it may have been published since: its removal checks again
			l.lost = append(l.lost, d)
		case accounted != disk:
			l.wrong = append(l.wrong, d)
		}
		delete(l.needed, d)
		return l.Pause(ctx)
	})
	if err == nil {
		err = l.advanceTo(ctx, 255)
	}
	if err == nil {
		l.skipUnseen()
	}
	return err
}

// advanceTo goes on to the blobs that begin with this byte.
func (l *leftovers) advanceTo(ctx context.Context, first byte) (err error) {
	for ; l.next <= int(first); l.next++ {
		l.skipUnseen()
		if l.needed, err = l.st.index.NeededIn(ctx, byte(l.next)); err != nil {
			return err
		}
	}
	return nil
}

// skipUnseen handles needed blobs that were not seen: they are packed or missing.
func (l *leftovers) skipUnseen() {
	for d, accounted := range l.needed {
		if accounted != 0 {
			l.wrong = append(l.wrong, d)
		}
	}
}

// Pace lets background work take at most half of a processor.
type Pace struct {
	Last  time.Time // when it went on
	steps int
}

// stepsPerPause are some milliseconds' work.
const stepsPerPause = 256

// Pause is called after each step of the work.
func (p *Pace) Pause(ctx context.Context) error {
	if p.steps++; p.steps%stepsPerPause != 0 {
		return nil
	}
	err := sleep(ctx, min(time.Since(p.Last), maxPause))
	p.Last = time.Now()
	return err
}
