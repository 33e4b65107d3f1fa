package dedupe

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/epcached/epcached/cas"
)

// Removal removes recipes in a batch, with one sync for each directory. A removed recipe is not
// found any more, but Users returns its blob until Sync, because a crash before that could bring
// the recipe back. A Removal is for one goroutine, which must call Sync at the end.
type Removal struct {
	s       *RecipeStore
	removed []cas.Digest // perhaps without a recipe
}

// Removal returns an empty batch.
func (s *RecipeStore) Removal() *Removal { return &Removal{s: s} }

// Remove deletes the recipe of a blob, durably when Sync returns, and returns the bases that this
// will release: those of the recipe, and of earlier removals that were not durable. It fails with
// cas.ErrNotFound if there is none, and Sync makes that durable too.
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

// Sync makes the removals durable, and releases the bases. If a sync fails, the recipe may come
// back after a crash, and its bases count as needed until it is removed again.
func (r *Removal) Sync() (err error) {
	if len(r.removed) == 0 {
		return nil // the usual case, because most removed blobs have no recipe
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
		// otherwise it was stored again in the meantime, which released the earlier bases
		if _, packed := s.packed[d]; !packed {
			s.forgetLocked(d)
		}
	}
}

// Remove deletes the recipe of a blob, durably. It fails with cas.ErrNotFound if there is none,
// which is durable then too.
func (s *RecipeStore) Remove(d cas.Digest) error {
	return s.removeWith(d, func() error { return s.fs.Remove(s.path(d)) })
}

// Quarantine moves a recipe to quarantine, with a note of the reason.
func (s *RecipeStore) Quarantine(d cas.Digest, why string) error {
	return s.removeWith(d, func() error { return cas.SetAside(s.fs, s.dir, s.path(d), why) })
}

func (s *RecipeStore) removeWith(d cas.Digest, take func() error) error {
	r := s.Removal()
	_, err := r.removeWith(d, take)
	if err != nil && !errors.Is(err, cas.ErrNotFound) {
		return err
	}
	return cmp.Or(r.Sync(), err)
}
