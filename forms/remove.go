package forms

import (
	"errors"

	"github.com/epcached/epcached/cas"
)

// Remove removes a blob in all its forms unless somebody needs it, or is about to, and then the
// containers that only its recipe needed. A blob that recipes take bytes from stays whole. freed counts bytes of files.
func (s *Store) Remove(d cas.Digest) (freed int64, err error) {
	s.account.changed() // what recipes take from may count there from now on
	was, _ := s.shelf.Has(d)
	freed, err = s.removeAlone(d)
	if err != nil {
		return freed, err
	}
	if _, still := s.shelf.Has(d); still {
		return freed, nil
	}
	for _, container := range was.Containers {
		more, err := s.removeAlone(container.Digest)
		freed += more
		if err != nil {
			return freed, err
		}
	}
	return freed, nil
}

// Release ends a hold. What it kept and nobody needs goes at once, and not at the next start: it was stored for nothing, or who needed it
// was removed meanwhile, which had to leave it because of this very hold.
func (s *Store) Release(hold *cas.Hold) {
	kept := hold.Kept()
	hold.Release()
	for _, d := range kept {
		needed, err := s.owner.Needed(d)
		if err == nil && (needed || len(s.shelf.Users(d)) > 0) {
			continue
		}
		if err == nil {
			_, err = s.Remove(d)
		}
		if err != nil {
			s.log.Warn("blob that nobody needs stays until the next start", "digest", d.String(), "error", err)
		}
	}
}

func (s *Store) removeAlone(d cas.Digest) (freed int64, err error) {
	size, _ := s.whole.Size(d) // 0 where it is not whole
	removed, err := s.whole.RemoveUnless(d, func() (bool, error) {
		if !s.shelf.Complete() {
			return true, nil // there are recipes that cannot be read, and nobody knows what they need
		}
		needed, err := s.owner.Needed(d)
		if err != nil || needed {
			return true, err
		}
		// Under the blob's lock, as the whole form is: who packs it removes that only while there is a recipe.
		freed, err = s.removePacked(d)
		return len(s.shelf.Users(d)) > 0, err
	})
	if removed {
		s.account.changed() // it may have been a container
		s.memory.DropSharing(d)
		freed += size
	}
	return freed, err
}

// removePacked removes the recipe and the unpacked form of a blob, where there are any.
func (s *Store) removePacked(d cas.Digest) (freed int64, err error) {
	if p, ok := s.shelf.Has(d); ok {
		if err := s.removeRecipe(d); err != nil && !errors.Is(err, cas.ErrNotFound) {
			return 0, err
		}
		s.memory.DropSharing(d)
		freed += p.Stored
	}
	if open := s.open.Load(); open != nil {
		size, _ := open.Size(d) // 0 where there is none
		if err := open.Remove(d); err == nil {
			s.account.changed()
			freed += size
		}
	}
	return freed, nil
}
