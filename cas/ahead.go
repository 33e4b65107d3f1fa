package cas

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
)

// Hashed is the result of HashAhead or CopyAhead for a staged file.
type Hashed struct {
	digest Digest
	stamp  Stamp
}

// Digest returns the digest of the file's bytes. It is zero for the zero Hashed.
func (k Hashed) Digest() Digest { return k.digest }

// CopyAhead copies the n bytes of src into a new file at path, which it hashes on the way, on all
// cores, while the system begins to write it to the disk, so that AdoptHashed has little left to
// do. No other user can open the file before it is read-only, because the directory belongs to the
// store alone. It fails with io.ErrUnexpectedEOF if src is shorter. After an error path may exist,
// and the caller removes it.
func (s *Store) CopyAhead(ctx context.Context, src io.ReaderAt, path string, n int64) (Hashed,
	error) {
	f, err := s.fs.Create(path)
	if err != nil {
		return Hashed{}, fmt.Errorf("copy to %s: %w", path, err)
	}
	var known Hashed
	known.digest, err = s.copyFrom(ctx, f, src, n)
	if err == nil {
		err = s.fs.Chmod(f, 0o444)
	}
	if err == nil {
		known.stamp, err = StampOf(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return Hashed{}, fmt.Errorf("copy to %s: %w", path, err)
	}
	return known, nil
}

// HashAhead hashes a staged file after its writer has finished, makes it read-only, and starts its
// writeback, so that AdoptHashed has little left to do later. It returns the zero Hashed, and
// hashes nothing, if a process could still write the file.
func (s *Store) HashAhead(ctx context.Context, path string) (Hashed, error) {
	f, err := s.fs.Open(path)
	if err != nil {
		return Hashed{}, fmt.Errorf("hash %s: %w", path, err)
	}
	startWriting(f)
	known, err := s.hash(ctx, f)
	if err = errors.Join(err, f.Close()); err != nil {
		return Hashed{}, fmt.Errorf("hash %s: %w", path, err)
	}
	return known, nil
}

// MakeReadOnly is the first part of HashAhead: it reports whether no process can write f any more.
func (s *Store) MakeReadOnly(f *os.File) (bool, error) { return makeOwnReadOnly(s.fs, f) }

// hash hashes a read-only file. The stamp is taken before, so that a change during hashing is
// noticed.
func (s *Store) hash(ctx context.Context, f *os.File) (Hashed, error) {
	if err := checkRegular(f); err != nil {
		return Hashed{}, err
	}
	if alone, err := makeOwnReadOnly(s.fs, f); err != nil || !alone {
		return Hashed{}, err
	}
	before, err := StampOf(f)
	if err != nil {
		return Hashed{}, err
	}
	d, err := Sum(ctx, fileAt{s.fs, f}, 0, before.Size)
	if err == nil {
		err = unchanged(f, before)
	}
	return Hashed{d, before}, err
}

func (s *Store) copy(ctx context.Context, dst, src *os.File, n int64) (Digest, error) {
	if s.fs.Clone(dst, src) == nil {
		info, err := dst.Stat()
		if err != nil {
			return Digest{}, err
		}
		if info.Size() != n {
			return Digest{}, fmt.Errorf("%w: %d bytes before, %d after", ErrChanged, n, info.Size())
		}
		return Sum(ctx, fileAt{s.fs, dst}, 0, n)
	}
	return s.copyFrom(ctx, dst, fileAt{s.fs, src}, n)
}

func (s *Store) copyFrom(ctx context.Context, dst *os.File, src io.ReaderAt, n int64) (Digest,
	error) {
	Preallocate(dst, n)
	return Sum(ctx, &copier{fs: s.fs, dst: dst, src: src}, 0, n)
}

// copier copies each range that is read, so that every core copies a piece and hashes it while it
// is in its cache. copy_file_range would be 1.5 times slower, because the copy has to be read again
// for hashing. If the file system can share bytes, Clone does so too.
type copier struct {
	fs     FS
	dst    *os.File
	src    io.ReaderAt
	copied atomic.Int64 // bytes
}

// writebackEvery is how much is copied before the disk begins to write, long before the sync.
const writebackEvery = 16 << 20

func (c *copier) ReadAt(p []byte, off int64) (int, error) {
	n, err := c.src.ReadAt(p, off)
	if k, err := WriteInSteps(fileAt{c.fs, c.dst}, p[:n], off); err != nil {
		return k, err
	}
	if copied := c.copied.Add(int64(n)); copied/writebackEvery != (copied-int64(n))/writebackEvery {
		startWriting(c.dst)
	}
	return n, err
}

// WriteStep is how much of a large file one call writes. The file system takes memory for a call as
// a whole if it can: finding a contiguous MiB takes longer than copying it when the memory is full
// of cached files, and it exceeds a core's cache.
const WriteStep = 256 << 10

// WriteInSteps writes p to w at off, WriteStep bytes at a time, and returns how many were written.
func WriteInSteps(w io.WriterAt, p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := w.WriteAt(p[done:min(done+WriteStep, len(p))], off+int64(done))
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// WriteFile makes a file with these bytes, and syncs it. After an error there is none.
func WriteFile(fsys FS, path string, b []byte) error {
	f, err := fsys.Create(path)
	if err != nil {
		return err
	}
	_, err = fsys.WriteAt(f, b, 0)
	if err == nil {
		err = fsys.Sync(f)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		err = errors.Join(err, fsys.Remove(path))
	}
	return err
}
