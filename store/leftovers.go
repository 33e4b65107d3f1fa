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
// acknowledged, and recipes of whole blobs. In the same pass it corrects the accounted sizes of the
// other blobs, because a crash may have interrupted packing before the account was updated.
func (st *Store) RemoveLeftovers(ctx context.Context) error {
	if !st.index.Complete() {
		st.log.Warn("leftovers are kept, because this version cannot read all builds")
		return nil
	}
	l := leftovers{st: st, Pace: Pace{Last: time.Now()}}
	// Recipes first, because their bases may be leftovers as well.
	err := errors.Join(st.packing.RemoveRecipesOfWhole(ctx), st.packing.Recipes.Walk(ctx, l.recipe))
	err = errors.Join(err, l.wholeBlobs(ctx))
	for _, d := range l.lost {
		if freed, err2 := st.packing.Remove(d); err2 != nil {
			err = errors.Join(err, err2)
		} else if freed > 0 {
			st.log.Info("leftover blob removed", "digest", d.String())
		}
	}
	return errors.Join(err, st.remeasure(ctx, l.wrong))
}

// leftovers is a walk through all blobs, in order of digests.
type leftovers struct {
	st *Store
	Pace

	// lost are blobs that no build needs, and wrong those whose accounted size is not their size on
	// disk.
	lost, wrong []cas.Digest
	// needed has the accounted sizes of needed blobs whose digest begins with the byte before next,
	// and that the walk has not met.
	needed map[cas.Digest]int64
	next   int // first byte of the digests that follow
}

func (l *leftovers) recipe(d cas.Digest, _ dedupe.Packed) error {
	ids, err := l.st.index.Needs(d)
	if err == nil && len(ids) == 0 {
		l.lost = append(l.lost, d)
	}
	l.dropViewsWithout(d, ids)
	return err
}

// dropViewsWithout drops the views of a packed blob that has no unpacked copy any more, for example
// after a reboot. They cannot be served again, and no account has the bytes that only they keep.
func (l *leftovers) dropViewsWithout(d cas.Digest, ids []index.BuildID) {
	if _, _, unpacked := l.st.packing.Bytes(d); unpacked > 0 || !l.st.packing.OnlyPacked(d) {
		return
	}
	for _, id := range ids {
		if _, there := l.st.index.Views.Get(id[:]); !there || l.st.buildGuard.inUse(id) {
			continue
		}
		if b, err := l.st.index.Get(id); err == nil { // otherwise it was just removed
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
		case !ok: // perhaps published since; the removal checks again
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

// advanceTo advances to the blobs that begin with this byte.
func (l *leftovers) advanceTo(ctx context.Context, first byte) (err error) {
	for ; l.next <= int(first); l.next++ {
		l.skipUnseen()
		if l.needed, err = l.st.index.NeededIn(ctx, byte(l.next)); err != nil {
			return err
		}
	}
	return nil
}

// skipUnseen handles needed blobs that the walk has not met, because they are packed or missing.
func (l *leftovers) skipUnseen() {
	for d, accounted := range l.needed {
		if accounted != 0 {
			l.wrong = append(l.wrong, d)
		}
	}
}

// Pace lets background work take at most half of a processor.
type Pace struct {
	Last  time.Time // end of the last pause
	steps int
}

// stepsPerPause steps take some milliseconds.
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
