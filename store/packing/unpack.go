package packing

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Unpack makes the unpacked form of a packed blob, unless it is there. Equal calls at the same time write it once, and the others wait for that.
// begins, which may be nil, is called before anything is written; progress, which may be nil, a hundred times at most while bytes are. Errors
// that Lost knows say that a container or the recipe is no good; those that cas.Full knows and ErrNoRoom, that there is no room.
func (s *Store) Unpack(ctx context.Context, d cas.Digest, begins func(), progress func(done, total int64)) error {
	store, err := s.Copies.open()
	if err != nil {
		return err
	}
	if err := store.Verify(ctx, d); err == nil {
		return nil
	} else if !Lost(err) {
		return err
	}
	if begins != nil {
		begins()
	}
	err = s.fillCopy(ctx, store, d, progress)
	if (cas.Full(err) || errors.Is(err, ErrNoRoom)) && s.dropIdleCopies(ctx, store) > 0 {
		err = s.fillCopy(ctx, store, d, progress)
	}
	if errors.Is(err, cas.ErrNotFound) && s.whole.Has(d) {
		return nil // it has become whole meanwhile, and its recipe is gone
	}
	return err
}

// fillCopy writes the unpacked form, which has its place within what may be taken as everything else has.
func (s *Store) fillCopy(
	ctx context.Context, store *cas.Store, d cas.Digest, progress func(done, total int64),
) error {
	release := func() {}
	defer func() { release() }() // when what was written is in the account
	defer s.account.changed()
	return store.Fill(ctx, d, func(f *os.File) error {
		r, _, _, err := s.recipe(d)
		if err != nil {
			return err
		}
		if err := s.owner.Fits(s.Copies.dir, "the unpacked copy", r.Size, 0); err != nil {
			return fmt.Errorf("%w in %s", err, s.Copies.dir)
		}
		if !s.Copies.apart {
			place, err := s.owner.Reserve(ctx, cas.OnDisk(r.Size), 0)
			if err != nil {
				return err
			}
			release = place
		}
		return s.rebuildInto(ctx, d, f, seldom(progress))
	})
}

// seldom passes on at most a hundred of what it is told.
func seldom(progress func(done, total int64)) func(done, total int64) {
	if progress == nil {
		return nil
	}
	told := int64(0)
	return func(done, total int64) {
		if done == total || done-told >= total/100 {
			told = done
			progress(done, total)
		}
	}
}

// dropIdleCopies makes room by removing every unpacked form that nobody holds, and tells how many bytes that were: unpacking
// one again costs a copy, and having no room for this one a compile.
func (s *Store) dropIdleCopies(ctx context.Context, store *cas.Store) (freed int64) {
	err := store.Walk(ctx, func(d cas.Digest, size, _ int64) error {
		if err := s.DropCopy(d); err != nil {
			return ignore(ErrInUse, err)
		}
		freed += cas.OnDisk(size)
		return nil
	})
	if err != nil && ctx.Err() == nil {
		s.log.Warn("unpacked blobs not removed to make room", "error", err)
	}
	return freed
}

// DropCopy removes the unpacked form of a blob, if there is one, and whatever leads to the blob. ErrInUse: somebody has it.
func (s *Store) DropCopy(d cas.Digest) error {
	open := s.Copies.Store()
	if open == nil {
		return nil
	}
	if err := s.owner.LetGo(d); err != nil {
		return err
	}
	inHand := false
	_, err := open.RemoveUnless(d, func() (bool, error) { // what has the bytes then, and they have no name here, would be in no account
		inHand = s.owner.InHand(d)
		return inHand, nil
	})
	s.account.changed()
	if inHand {
		return ErrInUse
	}
	return err
}

// rebuildInto rebuilds a packed blob into an empty file. Where the recipe is as it was when it was proven, and all containers are as they
// were when they were verified, it is copied; else what comes out is hashed.
func (s *Store) rebuildInto(ctx context.Context, d cas.Digest, f *os.File, progress func(done, total int64)) error {
	for attempt := 1; ; attempt++ {
		r, stamp, proven, err := s.recipe(d)
		if err != nil {
			return err
		}
		err = s.apply(ctx, r, f, proven, progress)
		if err == nil && !proven {
			s.provenAs(d, stamp)
		}
		if !errors.Is(err, cas.ErrNotFound) || attempt == attempts {
			return err
		}
		// A container may just have been rewritten: then the recipe is another by now.
		if err := f.Truncate(0); err != nil {
			return err
		}
	}
}

// apply opens all containers before anything is copied: what is open stays, whoever removes its name.
func (s *Store) apply(ctx context.Context, r *dedupe.Recipe, f *os.File, proven bool, progress func(done, total int64)) error {
	open := make(map[cas.Digest]*dedupe.File, len(r.Containers))
	defer func() {
		for _, one := range open {
			_ = one.Close() // read-only: nothing can be lost
		}
	}()
	for _, one := range r.Containers {
		container, verified, err := s.unverified(one.Digest)
		if err != nil {
			return &dedupe.ContainerError{Digest: one.Digest, Err: err}
		}
		open[one.Digest] = container
		proven = proven && verified
	}
	take := func(d cas.Digest) (dedupe.Source, error) {
		container := open[d]
		delete(open, d) // closed by whoever took it
		return container, nil
	}
	return dedupe.Apply(ctx, r, take, f, dedupe.ApplyOptions{Trusted: proven, Progress: progress})
}

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
