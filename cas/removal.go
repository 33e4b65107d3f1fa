package cas

import (
	"context"
	"errors"
	"io/fs"
)

// Removal removes blobs that nobody needs, and makes that durable for all of
// them at once: a sync of each folder that some of them stood in, after all of
// them are unlinked, has a file system write one transaction instead of one for
// each blob. A crash before brings back blobs that nobody needs, each on its own.
// It is used by one goroutine, which calls Sync at the end.
type Removal struct {
	s       *Store
	folders map[byte]Digest // that are to be synced, with one of the blobs in each
}

// Removal begins to remove blobs.
func (s *Store) Removal() *Removal { return &Removal{s: s, folders: make(map[byte]Digest)} }

// RemoveUnless removes the blob, durably when Sync returns, unless it is held or
// needed says that somebody refers to it. needed is asked while nobody can begin
// to hold the blob. A blob that is not there is no error.
func (r *Removal) RemoveUnless(d Digest, needed func() (bool, error)) (removed bool, err error) {
	unlock, err := r.s.locks.Lock(context.Background(), d)
	if err != nil {
		return false, err
	}
	// Unlocked before the sync, which may take long: whoever stores the same
	// blob now links it anew and syncs the folder too.
	defer unlock()
	removed, absent, err := r.s.unlinkUnless(d, needed)
	if removed || absent { // also one that was not there: an earlier call may have got no further than to unlink it
		r.folders[d[0]] = d
	}
	return removed, err
}

// Sync makes durable what was removed. After an error some of it may come back
// after a crash; the next one tries that again.
func (r *Removal) Sync() (err error) {
	var blobs []Digest
	var paths []string
	for _, d := range r.folders {
		blobs, paths = append(blobs, d), append(paths, r.s.folder(d))
	}
	for i, err2 := range SyncDirs(r.s.fs, paths) {
		if err2 != nil && !errors.Is(err2, fs.ErrNotExist) {
			err = errors.Join(err, r.s.wrap(blobs[i], err2))
			continue
		}
		delete(r.folders, blobs[i][0])
	}
	return err
}

// RemoveUnless removes the blob, durably, unless it is held or needed says that
// somebody refers to it; see Removal.
func (s *Store) RemoveUnless(d Digest, needed func() (bool, error)) (removed bool, err error) {
	r := s.Removal()
	if removed, err = r.RemoveUnless(d, needed); err != nil {
		return false, err
	}
	if err := r.Sync(); err != nil {
		return false, err
	}
	return removed, nil
}

func (s *Store) unlinkUnless(d Digest, needed func() (bool, error)) (removed, absent bool, err error) {
	s.heldMu.Lock()
	held := s.held[d] > 0
	s.heldMu.Unlock()
	if held {
		return false, false, nil
	}
	if is, err := needed(); is || err != nil {
		return false, false, err
	}
	s.stamps.forget(d)
	err = s.fs.Remove(s.path(d))
	if errors.Is(err, fs.ErrNotExist) {
		return false, true, nil
	}
	if err != nil {
		return false, false, s.wrap(d, err)
	}
	return true, false, nil
}
