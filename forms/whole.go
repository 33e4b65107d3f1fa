package forms

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// wholeForm is what there has to be room for.
const wholeForm = "the whole form of a packed file"

// MakeWhole stores the whole form of a packed blob again, durably, and then removes the recipe. Who took from its literals takes from the blob. Errors
// are ErrNoRoom, those that cas.Full knows, those of which Lost tells, and the system's.
func (s *Store) MakeWhole(ctx context.Context, d cas.Digest) error {
	leave, err := s.TakeTurn(ctx)
	if err != nil {
		return err
	}
	defer leave()
	was, ok := s.shelf.Has(d)
	if !ok {
		return nil
	}
	if err := s.owner.Fits(s.dir, wholeForm, was.Size, 0); err != nil {
		return err
	}
	release, err := s.owner.Reserve(ctx, cas.OnDisk(was.Size), 0, Wait)
	if err != nil {
		return err
	}
	defer release()
	defer s.account.changed() // before the room is given back: what was written counts by then
	hold, done := s.hold()    // until the recipe is gone: as long as there is one, the whole form might be packed
	defer done()
	defer s.changes(d)()
	if there, err := hold.Keep(ctx, d); err != nil {
		return err
	} else if !there { // else an earlier call got as far as that
		if err := s.putWhole(ctx, d, hold); err != nil {
			return err
		}
	}
	if err := s.memory.Remeasure(d); err != nil {
		return err
	}
	// Where that cannot be, the literals stay for who takes from them.
	if err := s.giveUpLiterals(ctx, d, nil); err != nil && !Lost(err) && !errors.Is(err, errLimits) {
		return err
	}
	return s.giveUpRecipe(d, was)
}

// putWhole stores what the recipe gives, and has the hold keep it.
func (s *Store) putWhole(ctx context.Context, d cas.Digest, hold *cas.Hold) error {
	r, err := s.shelf.Get(d)
	if err != nil {
		return err
	}
	open, _, err := s.openContainers(r)
	defer open.close()
	if err != nil {
		return err
	}
	a, err := dedupe.Assemble(r, open.take)
	if err != nil {
		return err
	}
	got, _, err := hold.Put(ctx, io.NewSectionReader(a, 0, a.Size()))
	if err = errors.Join(err, a.Close()); err != nil {
		return fmt.Errorf("blob %s: %w", d, err)
	}
	if got != d {
		s.Release(hold)
		return &cas.CorruptError{Digest: d, Got: got}
	}
	return nil
}

// becomeWhole stores the whole form of a packed blob; its recipe goes, and so do its literals, for whoever else takes from them
// takes from the blob now, and what else nobody needs any more. The caller has the turn.
func (s *Store) becomeWhole(ctx context.Context, d cas.Digest, hold *cas.Hold, gate Gate) error {
	was, packed := s.shelf.Has(d)
	if !packed {
		_, err := hold.Keep(ctx, d)
		return err
	}
	defer s.changes(d)()
	if !s.whole.Has(d) {
		if err := s.owner.Fits(s.dir, wholeForm, was.Size, 0); err != nil {
			return err
		}
		release, err := s.owner.Reserve(ctx, cas.OnDisk(was.Size), 0, AtOnce)
		if err != nil {
			return err
		}
		defer release()
		defer s.account.changed() // before the room is given back: what was written counts by then
		if err = s.putWhole(ctx, d, hold); err == nil {
			err = s.memory.Remeasure(d)
		}
		if err != nil {
			return err
		}
	}
	if err := s.giveUpLiterals(ctx, d, gate); ignoreNotFound(err) != nil && !errors.Is(err, errLimits) { // it may be gone, and not durably
		return err
	}
	return s.giveUpRecipe(d, was)
}
