package cas

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// unsynced is the file system of a volatile store, without syncs.
type unsynced struct{ FS }

func (unsynced) Sync(*os.File) error  { return nil }
func (unsynced) SyncDir(string) error { return nil }

// Fill stores the bytes that write puts into an empty file as blob d, unless the blob exists. It
// trusts the caller that the bytes have the digest d, because they were copied from verified blobs
// or hashed on the way. Calls for the same blob are single-flight: one writes, the others wait, and
// each returns when its ctx is done. After an error of write no blob is left. Fill is for volatile
// stores only.
func (s *Store) Fill(ctx context.Context, d Digest, write func(f *os.File) error) error {
	if !s.volatile {
		return fmt.Errorf("fill blob %s: the store is not volatile", d)
	}
	unlock, err := s.locks.Lock(ctx, d)
	if err != nil {
		return err
	}
	defer unlock()
	there, _, err := s.openLocked(ctx, d)
	if err == nil {
		return there.Close()
	}
	if !errors.Is(err, ErrNotFound) && !IsUnsound(err) {
		return err
	}
	if err := s.dropStale(d); err != nil {
		return s.nameError(d, err)
	}
	f, path, err := s.stage()
	if os.IsNotExist(err) { // the whole store was deleted
		if err = s.makeDirs(); err == nil {
			f, path, err = s.stage()
		}
	}
	if err != nil {
		return fmt.Errorf("fill blob %s: %w", d, err)
	}
	if err = write(f); err == nil {
		err = s.fs.Chmod(f, 0o444)
	}
	if err == nil {
		err = s.name(path, d)
	}
	var stamp Stamp
	if err != nil {
		err = errors.Join(err, s.fs.Remove(path))
	} else if stamp, err = StampOf(f); err == nil {
		stamp.Boot = Boot()
		s.stamps.save(d, stamp)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("fill blob %s: %w", d, err)
	}
	return nil
}

// name moves the staged file to the blob's name, and makes its directory if it is the first there.
func (s *Store) name(path string, d Digest) error {
	err := s.fs.Rename(path, s.path(d))
	if os.IsNotExist(err) {
		if err = s.fs.Mkdir(s.directory(d)); err == nil {
			err = s.fs.Rename(path, s.path(d))
		}
	}
	return err
}

// dropStale removes the file with the blob's name. The caller holds its lock. Other links of the
// file stay.
func (s *Store) dropStale(d Digest) error {
	s.stamps.forget(d)
	return Ignore(os.ErrNotExist, s.fs.Remove(s.path(d)))
}

// removeStale removes blobs of an earlier boot, and other files without a valid stamp.
func (s *Store) removeStale() error {
	return s.each(context.Background(), func(path string, d Digest, _ os.FileInfo, ok bool) error {
		if !ok {
			return removeFile(s.fs, path)
		}
		f, err := s.openFile(d)
		if err != nil {
			return err
		}
		_, held := s.stampHolds(d, f)
		if err := f.Close(); err != nil || held {
			return err
		}
		return s.dropStale(d)
	})
}
