package dedupe

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/epcached/epcached/cas"
)

// Removal removes recipes, and makes that durable for all of them at once: with one sync of each
// directory that some of them stood in. They are not found from then on, but Users returns them
// until Sync, because a crash before it could restore the recipes. It is used by one goroutine,
// which calls Sync at the end.
type Removal struct {
	s       *RecipeStore
	removed []cas.Digest // in no order; of some there was no recipe
}

// Removal begins to remove recipes.
func (s *RecipeStore) Removal() *Removal { return &Removal{s: s} }

// Remove deletes the recipe of a blob, durably when Sync returns, and returns the bases that it
// releases: the bases of that very recipe, and of those before that were not certain to be gone.
// One that is not there is cas.ErrNotFound, and then Sync makes that durable.
func (r *Removal) Remove(d cas.Digest) (bases []Base, err error) {
	return r.removeWith(d, func() error { return r.s.fs.Remove(r.s.path(d)) })
}

func (r *Removal) removeWith(d cas.Digest, take func() error) (bases []Base, err error) {
	s := r.s
	s.writing.Lock()
	defer s.writing.Unlock()
	err = take()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("recipe of blob %s: %w", d, err)
	}
	s.mu.Lock()
	bases = append(s.removing[d], s.packed[d].Bases...)
	s.removing[d] = slices.Clip(bases)
	delete(s.packed, d)
	s.mu.Unlock()
	r.removed = append(r.removed, d)
	if err != nil {
		err = fmt.Errorf("recipe of blob %s: %w", d, cas.ErrNotFound)
	}
	return bases, err
}

// Sync makes durable what was removed, and gives up its bases. A recipe whose removal could not be
// synced may come back after a crash, and keeps its bases until it is removed again.
func (r *Removal) Sync() (err error) {
	if len(r.removed) == 0 {
		return nil // most removed blobs have no recipe: no need to wait for the lock
	}
	s := r.s
	byDir := make(map[byte][]cas.Digest)
	for _, d := range r.removed {
		byDir[d[0]] = append(byDir[d[0]], d)
	}
	r.removed = nil
	var dirs [][]cas.Digest
	var paths []string
	for _, gone := range byDir {
		dirs, paths = append(dirs, gone), append(paths, s.directory(gone[0]))
	}
	s.writing.Lock()
	defer s.writing.Unlock()
	for i, err2 := range cas.SyncDirs(s.fs, paths) {
		if err2 != nil && !errors.Is(err2, fs.ErrNotExist) {
			err = errors.Join(err, fmt.Errorf("recipe of blob %s: %w", dirs[i][0], err2))
			continue
		}
		s.releaseBases(dirs[i])
	}
	return err
}

func (s *RecipeStore) releaseBases(gone []cas.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range gone {
		// else it was stored meanwhile, and what it had before was given up then
		if _, packed := s.packed[d]; !packed {
			s.forgetLocked(d)
		}
	}
}

// Remove deletes the recipe of a blob, durably. One that is not there is
// cas.ErrNotFound, and then that is durable.
func (s *RecipeStore) Remove(d cas.Digest) error {
	return s.removeWith(d, func() error { return s.fs.Remove(s.path(d)) })
}

// Quarantine moves a recipe out of the way, with a note why.
func (s *RecipeStore) Quarantine(d cas.Digest, why string) error {
	return s.removeWith(d, func() error { return cas.SetAside(s.fs, s.dir, s.path(d), why) })
}

func (s *RecipeStore) removeWith(d cas.Digest, take func() error) error {
	r := s.Removal()
	_, err := r.removeWith(d, take)
	if err != nil && !errors.Is(err, cas.ErrNotFound) {
		return err
	}
	if syncErr := r.Sync(); syncErr != nil {
		return syncErr
	}
	return err
}
