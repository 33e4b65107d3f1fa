package packing

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// MakeWhole stores the whole form of a packed blob again, durably, and then removes the recipe.
// Blobs that took from its literals take from the blob. Errors are ErrNoRoom, those that
// cas.Full knows, those of which Lost tells, and the system's.
func (s *Store) MakeWhole(ctx context.Context, d cas.Digest) error {
	leave, err := s.TakeTurn(ctx)
	if err != nil {
		return err
	}
	defer leave()
	hold, done := s.hold()
	defer done()
	return s.makeWhole(ctx, d, hold, nil)
}

// makeWhole is MakeWhole; the hold keeps the whole form. The caller has the turn.
func (s *Store) makeWhole(ctx context.Context, d cas.Digest, hold *cas.Hold, gate Gate) error {
	was, packed := s.shelf.Has(d)
	there, err := hold.Keep(ctx, d)
	if !packed || err != nil {
		return err
	}
	defer s.moves(d)()
	if there { // a crash came before the recipe was removed
		err = s.removeDouble(ctx, d)
	} else {
		err = s.replaceRecipe(ctx, d, was, hold)
	}
	if err != nil || was.Literals == dedupe.NoLiterals {
		return err
	}
	literals := was.Containers[was.Literals].Digest
	err = s.packAgain(ctx, literals, search{also: []cas.Digest{d}, gate: gate})
	if Lost(err) || errors.Is(anotherTime(err), ErrInUse) {
		return nil // they take from literals that no blob calls its own: Compact tries again
	}
	return err
}

// replaceRecipe stores the whole form of a blob, which the hold keeps, and removes its recipe.
func (s *Store) replaceRecipe(
	ctx context.Context, d cas.Digest, was dedupe.Packed, hold *cas.Hold,
) error {
	if err := s.owner.Fits(s.dir, "the whole form of a packed file", was.Size, 0); err != nil {
		return err
	}
	release, err := s.owner.Reserve(ctx, cas.OnDisk(was.Size), s.takes([]cas.Digest{d}))
	if err != nil {
		return err
	}
	defer release()
	defer s.account.changed() // before the room is given back: what was written counts by then
	if err := s.putWhole(ctx, d, hold); err != nil {
		return err
	}
	if err := s.memory.Remeasure(d); err != nil {
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
	a, err := s.assemble(r)
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
