package cas

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// ErrChanged says that a file did not stay the same while it was read.
var ErrChanged = errors.New("file changed while it was read")

var errNotRegular = errors.New("not a regular file")

func (s *Store) openFile(d Digest) (*os.File, error) {
	f, err := s.fs.Open(s.path(d))
	if err != nil {
		return nil, s.nameError(d, err)
	}
	if err := checkRegular(f); err != nil {
		return nil, errors.Join(s.nameError(d, err), f.Close())
	}
	return f, nil
}

func checkRegular(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return &fs.PathError{Op: "open", Path: f.Name(), Err: errNotRegular}
	}
	return nil
}

func (s *Store) stampHolds(d Digest, f *os.File) (Stamp, bool) {
	kept, ok := s.stamps.load(d)
	if !ok {
		return Stamp{}, false
	}
	seen, err := StampOf(f)
	return kept, err == nil && kept.Holds(seen)
}

// OpenUnverified opens the blob without reading it, and reports whether its stamp is valid. It is
// for callers that hash the result that they make of it. Errors are those of Open but for
// *CorruptError.
func (s *Store) OpenUnverified(d Digest) (f *os.File, verified bool, err error) {
	if f, err = s.openFile(d); err != nil {
		return nil, false, err
	}
	_, verified = s.stampHolds(d, f)
	return f, verified, nil
}

// Open returns a descriptor of the blob for reading, after checking that its bytes are right: by
// its stamp, otherwise by hashing it. The caller closes it. Errors are ErrNotFound, *CorruptError,
// or the system's.
func (s *Store) Open(ctx context.Context, d Digest) (*os.File, error) {
	f, err := s.openFile(d)
	if err != nil {
		return nil, err
	}
	if _, ok := s.stampHolds(d, f); ok {
		return f, nil
	}
	if err := f.Close(); err != nil {
		return nil, s.nameError(d, err)
	}
	unlock, err := s.locks.Lock(ctx, d)
	if err != nil {
		return nil, err
	}
	defer unlock()
	f, _, err = s.openLocked(ctx, d)
	return f, err
}

// openLocked opens and verifies the blob. The caller holds its lock.
func (s *Store) openLocked(ctx context.Context, d Digest) (*os.File, Stamp, error) {
	f, err := s.openFile(d)
	if err != nil {
		return nil, Stamp{}, err
	}
	stamp, ok := s.stampHolds(d, f)
	if ok {
		return f, stamp, nil
	}
	if s.volatile {
		return nil, Stamp{}, errors.Join(f.Close(), s.dropStale(d), s.nameError(d, fs.ErrNotExist))
	}
	stamp, err = s.verify(ctx, d, f)
	if err != nil {
		return nil, Stamp{}, errors.Join(err, f.Close())
	}
	return f, stamp, nil
}

// verify hashes the blob's file f and saves its stamp if the bytes are right. The caller holds the
// blob's lock, so the store does not change the stamp in the meantime. A user may unlink a view,
// which does, so it retries.
func (s *Store) verify(ctx context.Context, d Digest, f *os.File) (Stamp, error) {
	for range 3 {
		before, err := StampOf(f)
		if err != nil {
			return Stamp{}, s.nameError(d, err)
		}
		// The process that changed the file may not have synced it. If syncing it here fails, the
		// stamp is valid for this boot only.
		boot := ""
		if s.volatile || s.fs.Sync(f) != nil {
			boot = Boot()
		}
		var after Stamp
		got, err := Sum(ctx, fileAt{s.fs, f}, 0, before.Size)
		if err == nil {
			after, err = StampOf(f)
		}
		switch {
		case err != nil:
			return Stamp{}, s.nameError(d, err)
		case before != after:
			continue
		case got != d:
			s.stamps.forget(d)
			return Stamp{}, &CorruptError{Digest: d, Got: got}
		}
		after.Boot = boot
		s.stamps.save(d, after)
		return after, nil
	}
	return Stamp{}, s.nameError(d, ErrChanged)
}

// Link gives the verified blob a further name in the open directory dir, for a view, and returns
// the stamp that the file has from now on. It does not sync the name, because views can be made
// again. If no link is possible (too many, or another file system) it makes a copy, and returns the
// copy's stamp.
func (s *Store) Link(ctx context.Context, d Digest, dir *os.File, name string) (Stamp, error) {
	unlock, err := s.locks.Lock(ctx, d)
	if err != nil {
		return Stamp{}, err
	}
	defer unlock()
	f, stamp, err := s.openLocked(ctx, d)
	if err != nil {
		return Stamp{}, err
	}
	err = s.fs.LinkAt(s.path(d), dir, name)
	switch {
	case errors.Is(err, syscall.EMLINK), errors.Is(err, syscall.EXDEV):
		stamp, err = s.copyTo(ctx, f, dir, name)
	case err == nil:
		stamp, err = s.restamp(d, f, stamp)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return Stamp{}, fmt.Errorf("link blob %s as %s/%s: %w", d, dir.Name(), name, err)
	}
	return stamp, nil
}

// Unlink removes such a name. A missing name is no error.
func (s *Store) Unlink(d Digest, dir *os.File, name string) error {
	unlock, err := s.locks.Lock(context.Background(), d)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := s.openFile(d)
	if err != nil {
		// the blob is missing or unreadable, but its view must be removed
		return Ignore(fs.ErrNotExist, s.fs.UnlinkAt(dir, name))
	}
	stamp, held := s.stampHolds(d, f)
	if err := Ignore(fs.ErrNotExist, s.fs.UnlinkAt(dir, name)); err != nil {
		return errors.Join(err, f.Close())
	}
	if held {
		_, err = s.restamp(d, f, stamp)
	}
	return errors.Join(err, f.Close())
}

// restamp saves the blob's new stamp after the store linked or unlinked a name of it, which changes
// the ctime. The previous stamp was valid and the caller holds the blob's lock, so only the ctime
// may differ.
func (s *Store) restamp(d Digest, f *os.File, before Stamp) (Stamp, error) {
	after, err := StampOf(f)
	if err != nil {
		return Stamp{}, err
	}
	after.Boot = before.Boot
	expect := before
	expect.Ctime = after.Ctime
	if after != expect {
		s.stamps.forget(d)
		return Stamp{}, fmt.Errorf("blob %s: %w", d, ErrChanged)
	}
	if after != before {
		s.stamps.save(d, after)
	}
	return after, nil
}

func (s *Store) copyTo(ctx context.Context, f, dir *os.File, name string) (Stamp, error) {
	info, err := f.Stat()
	if err != nil {
		return Stamp{}, err
	}
	// By descriptor, because dir may have been renamed or replaced.
	to, err := s.fs.Create(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name))
	if err != nil {
		return Stamp{}, err
	}
	// The digest is ignored, because the source is verified, and the copy is later compared with
	// its own stamp.
	if _, err = s.copy(ctx, to, f, info.Size()); err == nil {
		err = s.fs.Chmod(to, 0o444)
	}
	var stamp Stamp
	if err == nil {
		stamp, err = StampOf(to)
	}
	stamp.Boot = Boot()
	if err != nil {
		err = errors.Join(err, s.fs.UnlinkAt(dir, name))
	}
	return stamp, errors.Join(err, to.Close())
}
