package packing

import (
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// recipe reads the recipe of a packed blob. proven tells that it is the very file of which it was proven before that it gives the blob. One
// of another size than the builds say is refused here, before anybody writes or reads all that it promises.
func (s *Store) recipe(d cas.Digest) (r *dedupe.Recipe, stamp cas.Stamp, proven bool, err error) {
	r, stamp, err = s.shelf.GetStamped(d)
	if err != nil {
		return nil, stamp, false, err
	}
	size, needed, err := s.memory.BlobBytes(d)
	if err != nil {
		return nil, stamp, false, err
	}
	if needed {
		if err := sizeIs(r, size); err != nil {
			return nil, stamp, false, err
		}
	}
	was, ok := s.memory.RecipeStamps().LoadStamp(d)
	return r, stamp, ok && was.Holds(stamp), nil
}

// sizeIs says of a recipe that its blob has another size, if so: a *dedupe.FormatError.
func sizeIs(r *dedupe.Recipe, size int64) error {
	if r.Size == size {
		return nil
	}
	return fmt.Errorf("recipe of blob %s: %w", r.Blob,
		&dedupe.FormatError{Offset: -1, Field: "size", Reason: fmt.Sprintf("%d bytes, and the blob has %d", r.Size, size)})
}

// provenAs notes that the recipe in the file of the stamp gives its blob.
func (s *Store) provenAs(d cas.Digest, stamp cas.Stamp) {
	_ = s.memory.RecipeStamps().SaveStamp(d, stamp) // what is forgotten is hashed again
}

// putRecipe makes a recipe durable that takes the place of the one that the blob may have, after
// it was proven to give the blob, and removes what only that one took from. literals are as
// for Shelf.Put.
func (s *Store) putRecipe(ctx context.Context, r *dedupe.Recipe, literals dedupe.Source) error {
	was, _ := s.shelf.Has(r.Blob)
	err := s.giveUp(was, func() error {
		// The last build that needed the blob may have been removed before the recipe was there,
		// and has not removed that.
		defer s.settle(r.Blob)
		return s.shelf.Put(ctx, r, literals, func(written *dedupe.Recipe) error {
			return s.prove(ctx, written)
		})
	})
	if err != nil {
		return err
	}
	if written, stamp, _, err := s.recipe(r.Blob); err == nil && written.Same(r) {
		s.provenAs(r.Blob, stamp) // else it is proven again when it is used
	}
	return nil
}

// removeRecipe is Shelf.Remove. A stamp that stayed would fit no later file.
func (s *Store) removeRecipe(d cas.Digest) error {
	defer s.account.changed()
	_ = s.memory.RecipeStamps().ForgetStamp(d)
	return s.shelf.Remove(d)
}

// QuarantineRecipe puts the recipe of a blob where Problems tells of it, durably, and removes what it took from, unless somebody needs it. Errors are
// cas.ErrNotFound and the system's.
func (s *Store) QuarantineRecipe(d cas.Digest, why string) error {
	was, _ := s.shelf.Has(d)
	return s.giveUp(was, func() error {
		defer s.account.changed()
		_ = s.memory.RecipeStamps().ForgetStamp(d)
		return s.shelf.Quarantine(d, why)
	})
}

// proveRecipe reads the blob's recipe, and proves that it gives the blob.
func (s *Store) proveRecipe(ctx context.Context, d cas.Digest) error {
	r, stamp, _, err := s.recipe(d)
	if err != nil {
		return err
	}
	if err := s.prove(ctx, r); err != nil {
		return err
	}
	s.provenAs(d, stamp)
	return nil
}

// prove rebuilds a packed blob, for nobody, and compares its digest.
func (s *Store) prove(ctx context.Context, r *dedupe.Recipe) error {
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
