package cas

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
)

// Put stores the bytes of r, and returns their digest and number when they are durable. An existing
// intact blob is kept.
func (h *Hold) Put(ctx context.Context, r Source) (Digest, int64, error) {
	d, err := h.putCopy(ctx, func(to *os.File) (Digest, error) {
		return h.s.copyFrom(ctx, to, r, r.Size())
	})
	if err != nil {
		return Digest{}, 0, fmt.Errorf("store a blob: %w", err)
	}
	return d, r.Size(), nil
}

// PutFile stores the bytes of the file f, which stays as it is, and returns their digest and length
// when they are durable. It reads at explicit offsets, and clones the bytes if the file system can.
// It hashes the store's copy. It fails with ErrChanged if the size or times of f changed in the
// meantime.
func (h *Hold) PutFile(ctx context.Context, f *os.File) (Digest, int64, error) {
	before, err := StampOf(f)
	if err == nil {
		err = checkRegular(f)
	}
	var d Digest
	if err == nil {
		d, err = h.putCopy(ctx, func(to *os.File) (Digest, error) {
			d, err := h.s.copy(ctx, to, f, before.Size)
			if err == nil {
				err = unchanged(f, before)
			}
			return d, err
		})
	}
	if err != nil {
		return Digest{}, 0, fmt.Errorf("store %s: %w", f.Name(), err)
	}
	return d, before.Size, nil
}

// putCopy makes a blob from a new file that write fills and hashes.
func (h *Hold) putCopy(ctx context.Context, write func(*os.File) (Digest, error)) (Digest, error) {
	f, path, err := h.s.stage()
	if err != nil {
		return Digest{}, err
	}
	d, err := write(f)
	if err != nil {
		err = errors.Join(err, h.s.fs.Remove(path))
	} else {
		err = h.commit(ctx, f, path, d, false)
	}
	return d, errors.Join(err, f.Close())
}

// AdoptHashed makes the staged file at path a blob without copying it, and returns its digest and
// length when it is durable. The file has to be on the store's file system and its writer has to be
// done. If a process could still write it, it is copied instead. In both cases path is removed, but
// after an error it still exists, unless its bytes could not be synced. known is the result of
// HashAhead or CopyAhead, or zero; an unchanged file is not hashed again.
func (h *Hold) AdoptHashed(ctx context.Context, path string, known Hashed) (Digest, int64, error) {
	f, err := h.s.fs.Open(path)
	if err != nil {
		return Digest{}, 0, fmt.Errorf("adopt a blob: %w", err)
	}
	d, n, err := h.adopt(ctx, f, path, known)
	if err = errors.Join(err, f.Close()); err != nil {
		return Digest{}, 0, fmt.Errorf("adopt %s: %w", path, err)
	}
	return d, n, nil
}

func (h *Hold) adopt(ctx context.Context, f *os.File, path string, known Hashed) (Digest, int64,
	error) {
	now, err := StampOf(f)
	if err != nil {
		return Digest{}, 0, err
	}
	if known.stamp != now {
		startWriting(f) // while it is hashed
		if known, err = h.s.hash(ctx, f); err != nil {
			return Digest{}, 0, err
		}
	}
	if known != (Hashed{}) {
		err = h.commit(ctx, f, path, known.digest, true)
		if !errors.Is(err, errOtherFileSystem) {
			return known.digest, known.stamp.Size, err
		}
	}
	d, n, err := h.PutFile(ctx, f)
	if err != nil {
		return Digest{}, 0, err
	}
	return d, n, h.s.fs.Remove(path)
}

func unchanged(f *os.File, before Stamp) error {
	after, err := StampOf(f)
	if err != nil {
		return err
	}
	if after.Size != before.Size || after.Mtime != before.Mtime {
		return fmt.Errorf("%w: %d bytes before, %d after", ErrChanged, before.Size, after.Size)
	}
	return nil
}

// stage makes an empty file with a temporary name.
func (s *Store) stage() (*os.File, string, error) {
	path := filepath.Join(s.incoming, rand.Text())
	f, err := s.fs.Create(path)
	return f, path, err
}

var errOtherFileSystem = errors.New("staged on another file system")

// commit links the staged file f at path to its name, durably, and removes path. The durability of
// the store depends on this order:
//
//  1. data synced: from here on the bytes survive a power cut;
//  2. linked, without replacing: from here on Open finds them. A crash before
//     this line leaves only the staged file, which the next start removes;
//  3. directory synced: from here on the name survives a power cut, and only then
//     may the caller acknowledge the blob.
//
// After an error an adopted staged file, which is the caller's, remains unless the sync failed. The
// hold protects the blob from step 2 on.
//
// After a failed sync it is unknown which bytes are on the disk, and a second sync would succeed
// without writing them. Therefore the file is removed, and the next Put writes a new one.
func (h *Hold) commit(ctx context.Context, f *os.File, path string, d Digest,
	adopted bool) (err error) {
	s := h.s
	keep := false // path is the caller's, and intact
	defer func() {
		if err == nil || keep {
			return
		}
		err = errors.Join(err, Ignore(fs.ErrNotExist, s.fs.Remove(path)))
	}()
	if err := s.fs.Chmod(f, 0o444); err != nil {
		return err
	}
	if err := s.fs.Sync(f); err != nil {
		return err
	}
	keep = adopted
	unlock, err := s.locks.Lock(ctx, d)
	if err != nil {
		return err
	}
	defer unlock()
	made, err := s.linkNew(ctx, f, path, d)
	if err != nil {
		return err
	}
	h.keepLocked(d)
	// Synced also if the name existed, because its writer may have been stopped before this.
	if err := s.fs.SyncDir(s.directory(d)); err != nil {
		if made {
			err = errors.Join(err, s.fs.Remove(s.path(d)))
		}
		return err
	}
	if err := s.fs.Remove(path); err != nil {
		return err
	}
	if !made {
		return nil // the existing blob has its own stamp
	}
	stamp, err := StampOf(f)
	if err != nil {
		return err
	}
	s.stamps.save(d, stamp)
	return nil
}

// linkNew links path to the blob's name, unless an intact blob exists. It quarantines a damaged
// one, which this file replaces. The caller holds the blob's lock.
func (s *Store) linkNew(ctx context.Context, f *os.File, path string, d Digest) (made bool,
	err error) {
	if err := s.shards.Make(d[0], false); err != nil {
		return false, err
	}
	for range 2 {
		err = s.fs.Link(path, s.path(d))
		switch {
		case err == nil:
			return true, s.sameFile(f, d)
		case errors.Is(err, syscall.EXDEV):
			return false, errOtherFileSystem
		case errors.Is(err, fs.ErrNotExist):
			// A user has deleted the directory.
			if err := s.shards.Make(d[0], true); err != nil {
				return false, err
			}
			continue
		case !errors.Is(err, fs.ErrExist):
			return false, err
		}
		there, _, err := s.openLocked(ctx, d)
		if err == nil {
			return false, there.Close()
		}
		if !IsUnsound(err) {
			return false, err
		}
		if err := s.quarantine(d, err.Error()); err != nil {
			return false, err
		}
	}
	return false, err
}

// IsUnsound reports whether err, of opening or verifying a blob, means that the file is bad: other
// bytes, not a regular file, or unreadable. Other errors, and ErrNotFound, do not.
func IsUnsound(err error) bool {
	return errors.As(err, new(*CorruptError)) || errors.Is(err, errNotRegular) ||
		errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EIO) ||
		errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENXIO) // a link, a socket
}

// sameFile checks that the linked path is the hashed file: a compiler could have replaced it.
func (s *Store) sameFile(f *os.File, d Digest) error {
	ours, err := f.Stat()
	if err != nil {
		return err
	}
	there, err := os.Lstat(s.path(d))
	if err != nil {
		return err
	}
	if !os.SameFile(ours, there) {
		return errors.Join(fmt.Errorf("link blob %s: %w", d, ErrChanged), s.fs.Remove(s.path(d)))
	}
	return nil
}

// Hold protects blobs from RemoveUnless from the moment at which they are stored, or found to
// exist, until Release, so that the caller can record a reference to them. It may be used by
// several goroutines. A caller of Hold blocks only on a removal of the same blob.
type Hold struct {
	s *Store

	mu   sync.Mutex // guards kept
	kept []Digest   // once for each call that kept it
}

// Hold returns a Hold without blobs. The caller releases it.
func (s *Store) Hold() *Hold { return &Hold{s: s} }

// Source is what Put reads.
type Source interface {
	io.ReaderAt
	Size() int64
}

// Keep protects an existing blob, and reports whether it exists.
func (h *Hold) Keep(ctx context.Context, d Digest) (bool, error) {
	unlock, err := h.s.locks.Lock(ctx, d)
	if err != nil {
		return false, err
	}
	defer unlock()
	if !h.s.Has(d) {
		return false, nil
	}
	h.keepLocked(d)
	return true, nil
}

// Kept returns the blobs, each once.
func (h *Hold) Kept() []Digest {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := slices.SortedFunc(slices.Values(h.kept), Digest.Compare)
	return slices.Compact(out)
}

// Release ends the protection. It may be called more than once.
func (h *Hold) Release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.s.holdsMu.Lock()
	defer h.s.holdsMu.Unlock()
	for _, d := range h.kept {
		if h.s.holds[d]--; h.s.holds[d] == 0 {
			delete(h.s.holds, d)
		}
	}
	h.kept = nil
}

// keepLocked is called with the blob's lock held.
func (h *Hold) keepLocked(d Digest) {
	h.mu.Lock()
	h.kept = append(h.kept, d)
	h.mu.Unlock()
	h.s.holdsMu.Lock()
	h.s.holds[d]++
	h.s.holdsMu.Unlock()
}
