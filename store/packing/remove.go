package packing

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Removal removes blobs, durably and all at once. Bases that only removed recipes needed
// follow once that is durable: a crash leaves only unneeded blobs and recipes, each with its
// bases. One goroutine uses it, and calls End.
type Removal struct {
	s       *Store
	whole   *cas.Removal
	recipes *dedupe.Removal
	bases   []cas.Digest // of recipes that were removed
	done    []func()     // of moves, for each of them
}

// Removal begins to remove blobs.
func (s *Store) Removal() *Removal {
	return &Removal{s: s, whole: s.whole.Removal(), recipes: s.recipeStore.Removal()}
}

// Remove removes a blob in all its forms, durably when End returns, unless it is needed or about to
// be. A blob that recipes take bytes from stays whole. freed counts bytes of files.
func (r *Removal) Remove(d cas.Digest) (freed int64, err error) {
	s := r.s
	s.account.changed()        // what recipes take from may count there from now on
	size, _ := s.whole.Size(d) // 0 where it is not whole
	removed, err := r.whole.RemoveUnless(d, func() (bool, error) {
		if !s.recipeStore.Complete() {
			return true, nil // the needs of recipes that cannot be read are unknown
		}
		needed, err := s.owner.Needed(d)
		if err != nil || needed {
			return true, err
		}
		// Under the blob's lock, as the whole form: packing removes that only if there is a recipe.
		freed, err = r.removePacked(d)
		return len(s.recipeStore.Users(d)) > 0, err
	})
	s.account.changed() // it may have been a base, or be held by now
	if removed {
		s.memory.dropSharing(d)
		freed += size
	}
	return freed, err
}

// End removes unneeded bases, and makes all removals durable. freed counts bytes of files.
func (r *Removal) End() (freed int64, err error) {
	// a base may have a recipe, if its packing was begun: its bases are next
	for err == nil && len(r.bases) > 0 {
		if err = r.recipes.Sync(); err != nil {
			break // a crash could bring recipes back
		}
		all := r.bases
		r.bases = nil
		for _, d := range all {
			more, err2 := r.Remove(d)
			freed += more
			err = errors.Join(err, err2)
		}
	}
	err = errors.Join(err, r.recipes.Sync())
	r.bases = nil
	for _, done := range r.done {
		done()
	}
	r.done = nil
	return freed, errors.Join(err, r.whole.Sync())
}

// Remove removes one blob, and the bases that only its recipe needed, durably; see Removal.
func (s *Store) Remove(d cas.Digest) (freed int64, err error) {
	r := s.Removal()
	freed, err = r.Remove(d)
	more, err2 := r.End()
	return freed + more, errors.Join(err, err2)
}

// RemoveRecipesOfWhole removes the recipes of blobs that are whole: a crash leaves them.
func (s *Store) RemoveRecipesOfWhole(ctx context.Context) error {
	return s.recipeStore.Walk(ctx, func(d cas.Digest, _ dedupe.Packed) error {
		if !s.whole.Has(d) {
			return nil // mostly
		}
		leave, err := s.LockForm(ctx) // it may just be changing its form
		if err != nil {
			return err
		}
		defer leave()
		// otherwise check reports it
		if err := s.removeRecipeOfWhole(ctx, d); !IsMissingOrDamaged(err) {
			return err
		}
		return nil
	})
}

// removeRecipeOfWhole removes the recipe of a blob that is whole, if its whole form is sound, and
// after that is durable: a crash may have come before it was. The caller holds formLock.
func (s *Store) removeRecipeOfWhole(ctx context.Context, d cas.Digest) error {
	was, packed := s.recipeStore.Has(d)
	if !packed || !s.whole.Has(d) {
		return nil
	}
	if err := s.whole.Verify(ctx, d); err != nil {
		return err
	}
	if err := s.whole.SyncName(d); err != nil {
		return err
	}
	return s.giveUpRecipe(d, was)
}

// giveUpRecipe removes a recipe, durably, and then its bases that are not needed.
func (s *Store) giveUpRecipe(d cas.Digest, was dedupe.Packed) error {
	return s.removeUnneededAfter(was, func() error {
		return ignore(cas.ErrNotFound, s.removeRecipe(d))
	})
}

// removeUnneededAfter removes a recipe's unneeded bases when take has removed the recipe.
func (s *Store) removeUnneededAfter(was dedupe.Packed, take func() error) error {
	defer s.accountByForm(digestsOf(was.Bases)...)()
	err := take()
	if err != nil {
		return err
	}
	r := s.Removal()
	for _, one := range was.Bases {
		_, err2 := r.Remove(one.Digest)
		err = errors.Join(err, err2)
	}
	_, err2 := r.End()
	return errors.Join(err, err2)
}

// Release ends a hold, and removes unneeded blobs at once, not at the next start: stored for
// nothing, or left by the removal of their last build because of this hold.
func (s *Store) Release(hold *cas.Hold) {
	kept := hold.Kept()
	defer s.accountByForm(kept...)()
	hold.Release()
	for _, d := range kept {
		s.removeIfUnneeded(d)
		// a failed put leaves it whole, and accounted for as packed or missing
		if err := s.remeasure(d); err != nil {
			s.log.Warn("cannot account for the space of a blob", "digest", d.String(), "error", err)
		}
	}
}

// remeasure brings the account of a blob that a build needs to what its whole form takes.
func (s *Store) remeasure(d cas.Digest) error {
	accounted, needed, err := s.memory.DiskBytes(d)
	// of one that is not there, none
	if disk, _ := cas.DiskBytesIn(s.dir, d); err != nil || !needed || disk == accounted {
		return err // mostly
	}
	return s.memory.Remeasure(d)
}

// removeIfUnneeded removes a blob in all its forms if it is not needed any more.
func (s *Store) removeIfUnneeded(d cas.Digest) {
	needed, err := s.owner.Needed(d)
	switch {
	case err != nil || needed:
	case len(s.recipeStore.Users(d)) > 0: // the last one that takes from it removes it
		s.account.changed() // it may have been missing
	default:
		_, err = s.Remove(d)
	}
	if err != nil {
		s.log.Warn("an unneeded blob stays until the next "+
			"start", "digest", d.String(), "error", err)
	}
}

// removePacked removes the recipe and the unpacked form of a blob, where there are any.
func (r *Removal) removePacked(d cas.Digest) (freed int64, err error) {
	s := r.s
	if p, ok := s.recipeStore.Has(d); ok {
		_ = s.memory.RecipeStamps().ForgetStamp(d) // one that stayed would fit no later file
		// of what is there now: packing may have written another one since
		bases, err := r.recipes.Remove(d)
		r.bases = append(r.bases, digestsOf(bases)...)
		r.done = append(r.done, s.accountByForm(digestsOf(bases)...))
		if ignore(cas.ErrNotFound, err) != nil {
			return 0, err
		}
		s.memory.dropSharing(d)
		freed += p.Stored
	}
	if open := s.Copies.Store(); open != nil {
		size, _ := open.Size(d) // 0 where there is none
		if err := open.Remove(d); err == nil {
			s.account.changed()
			freed += size
		}
	}
	return freed, nil
}

// recipe reads the recipe of a packed blob. proven: this very file was proven before to give the
// blob. It refuses a size other than that of the builds before any caller acts on it.
func (s *Store) recipe(d cas.Digest) (r *dedupe.Recipe, stamp cas.Stamp, proven bool, err error) {
	r, stamp, err = s.recipeStore.GetStamped(d)
	if err != nil {
		return nil, stamp, false, err
	}
	size, needed, err := s.memory.BlobBytes(d)
	if err != nil {
		return nil, stamp, false, err
	}
	if needed && r.Size != size {
		return nil, stamp, false, fmt.Errorf("recipe of blob %s: %w", r.Blob, &dedupe.FormatError{
			Offset: -1, Field: "size",
			Reason: fmt.Sprintf("%d bytes, and the blob has %d", r.Size, size)})
	}
	was, ok := s.memory.RecipeStamps().LoadStamp(d)
	return r, stamp, ok && was.Holds(stamp), nil
}

// markVerified records that the recipe in the file of the stamp gives its blob.
func (s *Store) markVerified(d cas.Digest, stamp cas.Stamp) {
	_ = s.memory.RecipeStamps().SaveStamp(d, stamp) // what is forgotten is hashed again
}

// putRecipe makes a recipe durable that takes the place of the one that the blob may have, after
// it was proven to give the blob, and removes what only that one took from. literals are as
// for RecipeStore.Put.
func (s *Store) putRecipe(ctx context.Context, r *dedupe.Recipe, literals dedupe.Source) error {
	was, _ := s.recipeStore.Has(r.Blob)
	err := s.removeUnneededAfter(was, func() error {
		// The last build that needed the blob may have been removed before the recipe was there,
		// and has not removed that.
		defer s.removeIfUnneeded(r.Blob)
		return s.recipeStore.Put(ctx, r, literals, func(written *dedupe.Recipe) error {
			return s.verifyRecipe(ctx, written)
		})
	})
	if err != nil {
		return err
	}
	if written, stamp, _, err := s.recipe(r.Blob); err == nil && written.Equal(r) {
		s.markVerified(r.Blob, stamp) // else it is proven again when it is used
	}
	return nil
}

// removeRecipe is RecipeStore.Remove. A stamp that stayed would fit no later file.
func (s *Store) removeRecipe(d cas.Digest) error {
	defer s.account.changed()
	_ = s.memory.RecipeStamps().ForgetStamp(d)
	return s.recipeStore.Remove(d)
}

// QuarantineRecipe quarantines a blob's recipe, durably, and removes its bases that are not
// needed. Errors are cas.ErrNotFound and the system's.
func (s *Store) QuarantineRecipe(d cas.Digest, why string) error {
	was, _ := s.recipeStore.Has(d)
	return s.removeUnneededAfter(was, func() error {
		defer s.account.changed()
		_ = s.memory.RecipeStamps().ForgetStamp(d)
		return s.recipeStore.Quarantine(d, why)
	})
}

// verifyStoredRecipe reads the blob's recipe, and proves that it gives the blob.
func (s *Store) verifyStoredRecipe(ctx context.Context, d cas.Digest) error {
	r, stamp, _, err := s.recipe(d)
	if err != nil {
		return err
	}
	if err := s.verifyRecipe(ctx, r); err != nil {
		return err
	}
	s.markVerified(d, stamp)
	return nil
}

// verifyRecipe rebuilds a packed blob only to compare its digest.
func (s *Store) verifyRecipe(ctx context.Context, r *dedupe.Recipe) error {
	a, err := s.assemble(r)
	if err != nil {
		return err
	}
	got, err := cas.Sum(ctx, a, 0, a.Size())
	if err = errors.Join(err, a.Close()); err != nil {
		return err
	}
	if got != r.Blob {
		return &cas.CorruptError{Digest: r.Blob, Got: got}
	}
	return nil
}
