package cas

import (
	"context"
	"errors"
	"io/fs"

	"golang.org/x/sync/errgroup"
)

// Removal removes blobs that nobody needs, and makes that durable for all of them at once: a sync
// of each folder that some of them stood in, after all of them are unlinked, has a file system
// write one transaction instead of one for each blob. A crash before brings back blobs that nobody
// needs, each on its own. It is used by one goroutine, which calls Sync at the end.
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
	s := r.s
	unlock, err := s.locks.Lock(context.Background(), d)
	if err != nil {
		return false, err
	}
	// Unlocked before the sync, which may take long: a Put of the same blob
	// now links it again and syncs the folder too.
	defer unlock()
	s.heldMu.Lock()
	held := s.held[d] > 0
	s.heldMu.Unlock()
	if held {
		return false, nil
	}
	if is, err := needed(); is || err != nil {
		return false, err
	}
	s.stamps.forget(d)
	err = s.fs.Remove(s.path(d))
	absent := errors.Is(err, fs.ErrNotExist)
	if err != nil && !absent {
		return false, s.wrap(d, err)
	}
	r.folders[d[0]] = d // absent or not: an earlier call may have got no further than to unlink it
	return !absent, nil
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

// RemoveUnless removes the blob, durably, unless it is held or needed; see Removal.
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

const syncsAtOnce = 16

// SyncDirs is SyncDir of several folders, at the same time: where names have
// changed in all of them, the first has the file system write its transaction,
// and the disk is told to flush its cache once for those that come together,
// not once for each. The errors are in the order of the paths.
func SyncDirs(fsys FS, paths []string) []error {
	errs := make([]error, len(paths))
	var all errgroup.Group
	all.SetLimit(syncsAtOnce)
	for i, path := range paths {
		all.Go(func() error {
			errs[i] = fsys.SyncDir(path)
			return nil
		})
	}
	_ = all.Wait() // always nil: each error has its own place
	return errs
}
