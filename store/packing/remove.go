package packing

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Removal removes blobs in a batch that shares syncs. Bases that only removed recipes needed are
// removed after the recipes' removal is durable, so that a crash leaves no recipe without its
// bases. It is for one goroutine, which must call End.
type Removal struct {
	s       *Store
	whole   *cas.Removal
	recipes *dedupe.Removal
	bases   []cas.Digest // of removed recipes
	done    []func()     // end the accounting of bases
}

// Removal returns an empty batch.
func (s *Store) Removal() *Removal {
	return &Removal{s: s, whole: s.whole.Removal(), recipes: s.recipeStore.Removal()}
}

// Remove removes a blob in all its representations, durably when End returns, unless it is needed
// or held. A base of recipes stays whole. freed counts bytes of files.
func (r *Removal) Remove(d cas.Digest) (freed int64, err error) {
	s := r.s
	s.account.changed()        // a base may count for recipes only from now on
	size, _ := s.whole.Size(d) // 0 if it is not whole
	removed, err := r.whole.RemoveUnless(d, func() (bool, error) {
		if !s.recipeStore.Complete() {
			return true, nil // an unreadable recipe may have it as a base
		}
		needed, err := s.owner.Needed(d)
		if err != nil || needed {
			return true, err
		}
		// Under the blob's lock, like the whole file, because packing removes that only if a recipe
		// exists.
		freed, err = r.removePacked(d)
		return len(s.recipeStore.Users(d)) > 0, err
	})
	s.account.changed() // it may have been a base, or a hold may protect it
	if removed {
		s.memory.dropSharing(d)
		freed += size
	}
	return freed, err
}

// End removes unneeded bases, and makes all removals durable. freed counts bytes of files.
func (r *Removal) End() (freed int64, err error) {
	// A base may have a recipe if its packing has begun; the loop then continues with its bases.
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

// RemoveRecipesOfWhole removes the recipes of whole blobs, which a crash may leave.
func (s *Store) RemoveRecipesOfWhole(ctx context.Context) error {
	return s.recipeStore.Walk(ctx, func(d cas.Digest, _ dedupe.Packed) error {
		if !s.whole.Has(d) {
			return nil // the usual case
		}
		leave, err := s.LockRepresentation(ctx) // because it may be being packed at this moment
		if err != nil {
			return err
		}
		defer leave()
		// Damage is ignored here, because check reports it.
		if err := s.removeRecipeOfWhole(ctx, d); !IsMissingOrDamaged(err) {
			return err
		}
		return nil
	})
}

// removeRecipeOfWhole removes the recipe of a whole blob if the whole file is intact, after making
// that durable, because a crash may have prevented it. The caller holds representationLock.
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
		return cas.Ignore(cas.ErrNotFound, s.removeRecipe(d))
	})
}

// removeUnneededAfter calls take, which removes a recipe, and then removes the recipe's bases that
// are not needed any more.
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

// Release ends a hold, and removes the blobs that are not needed: those that were stored in vain,
// and those that the removal of their last build left because of this hold.
func (s *Store) Release(hold *cas.Hold) {
	kept := hold.Kept()
	defer s.accountByForm(kept...)()
	hold.Release()
	for _, d := range kept {
		s.removeIfUnneeded(d)
		// after a failed put it is whole, but accounted for as packed or missing
		if err := s.remeasure(d); err != nil {
			s.log.Warn("cannot account for the space of a blob", "digest", d.String(), "error", err)
		}
	}
}

// remeasure corrects the account of a needed blob to the bytes of its whole file.
func (s *Store) remeasure(d cas.Digest) error {
	accounted, needed, err := s.memory.DiskBytes(d)
	// 0 for a missing file
	if disk, _ := cas.DiskBytesIn(s.dir, d); err != nil || !needed || disk == accounted {
		return err // the usual case
	}
	return s.memory.Remeasure(d)
}

// removeIfUnneeded removes a blob in all its representations if it is not needed any more.
func (s *Store) removeIfUnneeded(d cas.Digest) {
	needed, err := s.owner.Needed(d)
	switch {
	case err != nil || needed:
	case len(s.recipeStore.Users(d)) > 0: // it is removed with the last of these recipes
		s.account.changed() // it may have been missing before
	default:
		_, err = s.Remove(d)
	}
	if err != nil {
		s.log.Warn("an unneeded blob stays until the next "+
			"start", "digest", d.String(), "error", err)
	}
}

// removePacked removes the recipe and the unpacked copy of a blob, if there are any.
func (r *Removal) removePacked(d cas.Digest) (freed int64, err error) {
	s := r.s
	if p, ok := s.recipeStore.Has(d); ok {
		_ = s.memory.RecipeStamps().ForgetStamp(d) // best effort: the stamp fits no later file
		// The bases of the recipe that is removed now, because packing may have replaced it.
		bases, err := r.recipes.Remove(d)
		r.bases = append(r.bases, digestsOf(bases)...)
		r.done = append(r.done, s.accountByForm(digestsOf(bases)...))
		if cas.Ignore(cas.ErrNotFound, err) != nil {
			return 0, err
		}
		s.memory.dropSharing(d)
		freed += p.Stored
	}
	if open := s.Copies.Store(); open != nil {
		size, _ := open.Size(d) // 0 if there is none
		if err := open.Remove(d); err == nil {
			s.account.changed()
			freed += size
		}
	}
	return freed, nil
}

// recipe reads the recipe of a packed blob. proven reports that this very file was verified before
// to restore the blob. It fails if the size differs from that in the builds.
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

// markVerified records that the recipe in the file with this stamp restores its blob.
func (s *Store) markVerified(d cas.Digest, stamp cas.Stamp) {
	// best effort: without it the recipe is verified again
	_ = s.memory.RecipeStamps().SaveStamp(d, stamp)
}

// putRecipe verifies that a recipe restores its blob, stores it durably in place of an earlier one,
// and removes bases that only the earlier one needed.
func (s *Store) putRecipe(ctx context.Context, r *dedupe.Recipe) error {
	was, _ := s.recipeStore.Has(r.Blob)
	err := s.removeUnneededAfter(was, func() error {
		// The last build that needed the blob may have been removed just before the recipe was
		// stored.
		defer s.removeIfUnneeded(r.Blob)
		return s.recipeStore.Put(r, func(written *dedupe.Recipe) error {
			return s.verifyRecipe(ctx, written)
		})
	})
	if err != nil {
		return err
	}
	if written, stamp, _, err := s.recipe(r.Blob); err == nil && written.Equal(r) {
		s.markVerified(r.Blob, stamp) // otherwise it is verified again when it is used
	}
	return nil
}

// removeRecipe removes a recipe, and updates the account.
func (s *Store) removeRecipe(d cas.Digest) error {
	defer s.account.changed()
	_ = s.memory.RecipeStamps().ForgetStamp(d)
	return s.recipeStore.Remove(d)
}

// QuarantineRecipe quarantines a blob's recipe, durably, and removes its bases that are not needed.
// It fails with cas.ErrNotFound if there is none.
func (s *Store) QuarantineRecipe(d cas.Digest, why string) error {
	was, _ := s.recipeStore.Has(d)
	return s.removeUnneededAfter(was, func() error {
		defer s.account.changed()
		_ = s.memory.RecipeStamps().ForgetStamp(d)
		return s.recipeStore.Quarantine(d, why)
	})
}

// verifyStoredRecipe reads the blob's recipe, and verifies that it restores the blob.
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

// verifyRecipe assembles a packed blob in order to compare its digest.
func (s *Store) verifyRecipe(ctx context.Context, r *dedupe.Recipe) error {
	a, err := s.assemble(r)
	if err != nil {
		return err
	}
	got, err := cas.Sum(ctx, a, 0, a.Size())
	if err == nil && got != r.Blob {
		err = &cas.CorruptError{Digest: r.Blob, Got: got}
	}
	return errors.Join(err, a.Close())
}
