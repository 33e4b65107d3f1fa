package forms

import (
	"context"
	"errors"
	"io"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// RewriteDead rewrites the containers that nobody but recipes needs any more and of which these need less than half. What cannot be
// rewritten is in the log; the error is the context's.
func (s *Store) RewriteDead(ctx context.Context, gate Gate) error {
	for _, d := range s.shelf.Containers() {
		if needed, err := s.owner.Needed(d); err != nil || needed {
			continue // what cannot be read says so elsewhere
		}
		if err := s.rewrite(ctx, d, gate); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if !errors.Is(err, cas.ErrNotFound) { // else it went meanwhile, or a recipe of it, which keeps it until that is durable: another time
				s.log.Warn("container not rewritten", "digest", d.String(), "error", err)
			}
		}
	}
	return nil
}

// rewrite puts what recipes need of a container into a smaller one, then each recipe in the place of its former self, proven before, and
// then removes the container. A crash in between leaves recipes that need the one or the other, and both are there.
func (s *Store) rewrite(ctx context.Context, d cas.Digest, gate Gate) error {
	leave, err := s.TakeTurn(ctx)
	if err != nil {
		return err
	}
	defer leave()
	size, err := s.whole.Size(d)
	if err != nil {
		return ignoreNotFound(err) // who unpacks will find out
	}
	var recipes []*dedupe.Recipe
	for _, user := range s.shelf.Users(d) {
		r, err := s.shelf.Get(user)
		if err != nil {
			return err
		}
		recipes = append(recipes, r)
	}
	ranges := dedupe.Needed(d, recipes)
	live := int64(0)
	for _, r := range ranges {
		live += r.Length
	}
	if 2*live > size || cas.OnDisk(size)-cas.OnDisk(live) < minSaving {
		return nil
	}
	s.shrinks(cas.OnDisk(size))
	release, err := s.owner.Reserve(ctx, cas.OnDisk(live), cas.OnDisk(size), AtOnce)
	if errors.Is(err, ErrNoRoom) {
		return nil // another time
	}
	if err != nil {
		return err
	}
	defer release()
	defer s.account.changed() // before the room is given back: what was written counts by then
	defer s.departs(d)()
	hold, done := s.hold()
	defer done()
	to, err := s.putKept(ctx, d, ranges, hold, gate)
	if err != nil {
		return err
	}
	err = s.moveAll(ctx, recipes, d, to, ranges)
	hold.Release()
	for _, one := range []cas.Digest{d, to.Digest} { // whichever no recipe needs: the new one, if nothing came of it
		if _, err2 := s.Remove(one); err2 != nil {
			err = errors.Join(err, err2)
		}
	}
	if err == nil {
		s.log.Info("container rewritten", "digest", d.String(), "bytes", size, "needed", live)
	}
	return err
}

// moveAll has recipes take from another container what they took from one.
func (s *Store) moveAll(ctx context.Context, recipes []*dedupe.Recipe, from cas.Digest, to dedupe.Container, ranges []dedupe.Range) error {
	becomesWhole := false
	for _, r := range recipes {
		if r.Blob == to.Digest { // it is all that is needed, and whole by now
			becomesWhole = true
			continue
		}
		moved, err := r.Moved(from, to, ranges)
		if err == nil {
			err = s.prove(ctx, moved)
		}
		if err == nil {
			err = s.putRecipe(moved)
		}
		if err != nil {
			return err
		}
	}
	if !becomesWhole {
		return nil
	}
	s.account.changed()
	return errors.Join(ignoreNotFound(s.removeRecipe(to.Digest)), s.memory.Remeasure(to.Digest))
}

// putKept stores ranges of a container as a blob that is held.
func (s *Store) putKept(ctx context.Context, d cas.Digest, ranges []dedupe.Range, hold *cas.Hold, gate Gate) (dedupe.Container, error) {
	f, err := s.openWhole(ctx, d)
	if err != nil {
		return dedupe.Container{}, err
	}
	defer f.Close() // read-only: nothing can be lost
	kept := dedupe.Kept(behind(ctx, f, gate), ranges)
	to, n, err := hold.Put(ctx, io.NewSectionReader(kept, 0, kept.Size()))
	if err == nil {
		_, err = s.sketchOf(ctx, to, gate)
	}
	return dedupe.Container{Digest: to, Size: n}, err
}
