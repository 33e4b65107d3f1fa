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
// for callers that hash the bytes they make of it. Errors are those of Open but for *CorruptError.
func (s *Store) OpenUnverified(d Digest) (f *os.File, verified bool, err error) {
	if f, err = s.openFile(d); err != nil {
		return nil, false, err
	}
	_, verified = s.stampHolds(d, f)
	return f, verified, nil
}

// Open returns a descriptor of the blob for reading, after checking that its
// bytes are right: by its stamp, else by hashing it. The caller closes it.
// Errors are ErrNotFound, *CorruptError, or whatever the system said.
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

// openLocked opens and verifies the blob, whose lock is held: its stamp may be new by now.
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

// verify hashes the blob's file f and keeps its stamp if the bytes are right.
// The blob's lock is held, so the store itself does not change the stamp
// meanwhile; others may have unlinked a view by hand, so it tries again.
func (s *Store) verify(ctx context.Context, d Digest, f *os.File) (Stamp, error) {
	for range 3 {
		before, err := StampOf(f)
		if err != nil {
			return Stamp{}, s.nameError(d, err)
		}
		// The process that changed the file may not have synced it. If that cannot
		// be done here, the stamp is valid for this boot only.
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

// Link gives the verified blob a further name in the open directory dir, for a
// view, and returns the stamp that the file has from now on. The name is not
// synced: views are made again. Where no further link is possible (too many,
// or another file system) the name is a copy, and the stamp the copy's own.
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

// Unlink removes such a name again. A name that is gone already is no error.
func (s *Store) Unlink(d Digest, dir *os.File, name string) error {
	unlock, err := s.locks.Lock(context.Background(), d)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := s.openFile(d)
	if err != nil {
		// the blob is gone or unreadable; its view has to go all the same
		return s.unlinkAt(dir, name)
	}
	stamp, held := s.stampHolds(d, f)
	if err := s.unlinkAt(dir, name); err != nil {
		return errors.Join(err, f.Close())
	}
	if held {
		_, err = s.restamp(d, f, stamp)
	}
	return errors.Join(err, f.Close())
}

func (s *Store) unlinkAt(dir *os.File, name string) error {
	err := s.fs.UnlinkAt(dir, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// restamp keeps the stamp that the blob's file has after we linked or unlinked a
// name of it, which changes its ctime. The stamp before was good and the
// blob's lock is held, so nothing but the ctime may differ.
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
	// dir may be under another path by now, or in another place than its name says.
	to, err := s.fs.Create(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name))
	if err != nil {
		return Stamp{}, err
	}
	// The digest is not looked at: the source is verified, and what is served
	// from the copy is compared with the stamp below.
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
