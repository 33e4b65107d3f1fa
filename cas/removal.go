package cas

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// Removal removes unreferenced blobs and makes that durable for all of them at once: each directory
// is synced once, after all blobs are unlinked, so that the file system writes one transaction
// instead of one for each blob. A crash before the sync may restore any of the blobs. A Removal is
// used by one goroutine, which calls Sync at the end.
type Removal struct {
	s    *Store
	dirs map[byte]Digest // directories to sync, with one of the blobs in each
}

// Removal returns an empty batch.
func (s *Store) Removal() *Removal { return &Removal{s: s, dirs: make(map[byte]Digest)} }

// RemoveUnless removes the blob, durably when Sync returns, unless it is held or needed reports a
// reference to it. needed is called while no caller can begin to hold the blob. A missing blob is
// no error.
func (r *Removal) RemoveUnless(d Digest, needed func() (bool, error)) (removed bool, err error) {
	s := r.s
	unlock, err := s.locks.Lock(context.Background(), d)
	if err != nil {
		return false, err
	}
	// Unlocked before the sync, which may take long: a Put of the same blob
	// now links it again and syncs the directory too.
	defer unlock()
	s.holdsMu.Lock()
	held := s.holds[d] > 0
	s.holdsMu.Unlock()
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
		return false, s.nameError(d, err)
	}
	// also for a missing one, because an earlier call may have unlinked it without a sync
	r.dirs[d[0]] = d
	return !absent, nil
}

// Sync makes the removals durable. After an error some blobs may come back after a crash; the next
// Sync retries.
func (r *Removal) Sync() (err error) {
	var blobs []Digest
	var paths []string
	for _, d := range r.dirs {
		blobs, paths = append(blobs, d), append(paths, r.s.directory(d))
	}
	for i, err2 := range SyncDirs(r.s.fs, paths) {
		if err2 != nil && !errors.Is(err2, fs.ErrNotExist) {
			err = errors.Join(err, r.s.nameError(blobs[i], err2))
			continue
		}
		delete(r.dirs, blobs[i][0])
	}
	return err
}

// RemoveUnless removes the blob, durably, unless it is held or needed; see Removal.
func (s *Store) RemoveUnless(d Digest, needed func() (bool, error)) (removed bool, err error) {
	r := s.Removal()
	if removed, err = r.RemoveUnless(d, needed); err == nil {
		err = r.Sync()
	}
	return removed && err == nil, err
}

const parallelSyncs = 16

// SyncDirs syncs several directories at the same time, which is faster: the first sync writes the
// file system's transaction for all, and concurrent syncs share one flush of the disk's cache. The
// errors are in the order of the paths.
func SyncDirs(fsys FS, paths []string) []error {
	errs := make([]error, len(paths))
	var all errgroup.Group
	all.SetLimit(parallelSyncs)
	for i, path := range paths {
		all.Go(func() error {
			errs[i] = fsys.SyncDir(path)
			return nil
		})
	}
	_ = all.Wait() // always nil: errors are in errs
	return errs
}

// Bounds of the quarantine, because files that are kept for examination must not fill the disk. The
// newest entry is always kept.
const (
	maxQuarantined     = 64      // entries, each with a note
	maxQuarantineBytes = 1 << 30 // of all entries
)

// asideTime begins the names of quarantined files.
const asideTime = "20060102T150405.000000000Z"

// SetAside moves a damaged file of the state directory dir to quarantine, with a note of the reason
// beside it. It removes the oldest entries if there are too many. The caller syncs the directory
// that the file was in.
func SetAside(fsys FS, dir, path, why string) error {
	quarantine := filepath.Join(dir, quarantineName)
	if err := fsys.Mkdir(quarantine); err != nil {
		return err
	}
	now := time.Now().UTC()
	name := now.Format(asideTime) + "-" + filepath.Base(path) // sorts by age
	to := filepath.Join(quarantine, name)
	if err := fsys.Rename(path, to); err != nil {
		return err
	}
	note := fmt.Sprintf("%s\nmoved here on %s: %s\n", path, now.Format(time.RFC3339), why)
	return errors.Join(WriteFile(fsys, to+".txt", []byte(note)), trimQuarantine(fsys, quarantine))
}

func trimQuarantine(fsys FS, quarantine string) error {
	names, err := fsys.ReadDir(quarantine)
	if err != nil {
		return err
	}
	things, bytes := 0, int64(0)
	for i := len(names) - 1; i >= 0; i-- { // newest first
		moved, _, _ := strings.Cut(names[i], "-")
		if _, err := time.Parse(asideTime, moved); err != nil ||
			strings.HasSuffix(names[i], ".txt") {
			continue // a note, or a foreign file
		}
		path := filepath.Join(quarantine, names[i])
		info, err := os.Lstat(path)
		if err != nil || info.IsDir() {
			continue // the quarantine was emptied in the meantime; directories are never removed
		}
		things++
		bytes += info.Size()
		if things == 1 || things <= maxQuarantined && bytes <= maxQuarantineBytes {
			continue
		}
		bytes -= info.Size()
		for _, p := range []string{path, path + ".txt"} {
			if err := Ignore(fs.ErrNotExist, fsys.Remove(p)); err != nil {
				return err
			}
		}
	}
	return nil
}
