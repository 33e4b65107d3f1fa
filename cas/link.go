package cas

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// Link gives the verified blob a further name in the open folder dir, for a
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
		stamp, err = s.renew(d, f, stamp)
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
		return s.unlinkAt(dir, name) // the blob is gone or unreadable; its view has to go all the same
	}
	stamp, held := s.holds(d, f)
	if err := s.unlinkAt(dir, name); err != nil {
		return errors.Join(err, f.Close())
	}
	if held {
		_, err = s.renew(d, f, stamp)
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

// renew keeps the stamp that the blob's file has after we linked or unlinked a
// name of it, which changes its ctime. The stamp before was good and the
// blob's lock is held, so nothing but the ctime may differ.
func (s *Store) renew(d Digest, f *os.File, before Stamp) (Stamp, error) {
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
