// Package reserve reserves blocks of the file system for operations that must not fail when it is
// full, such as removals. A Reserve is safe for concurrent use.
package reserve

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/epcached/epcached/cas"
)

// Bytes is the size of the reserve, which nearly always suffices for a rewritten journal.
const Bytes = 4 << 20

// Piece is how many bytes are freed at a time, because the process that fills the disk may take
// them first.
const Piece = Bytes / 4

// Reserve is a file of unused blocks, for a full disk. Without it no build could be removed there,
// because its tombstone has to be durable before, and because the database writes new pages before
// it frees old ones.
//
// Only its size matters, so it needs no sync: if it is shorter or missing after a crash, it is made
// again.
type Reserve struct {
	fs   cas.FS
	path string

	mu     sync.Mutex // one change at a time
	warned bool       // a failure was logged; guarded by mu
}

// New returns the reserve of a state directory.
func New(fsys cas.FS, dir string) *Reserve {
	return &Reserve{fs: fsys, path: filepath.Join(dir, "reserve")}
}

// Use calls fn. If the disk is full it frees a piece of the reserve and calls fn again, repeatedly.
// fn must be able to run again after such an error.
func (r *Reserve) Use(fn func() error) error { return r.use(0, fn) }

// UseSome is Use, but leaves the last piece for removals.
func (r *Reserve) UseSome(fn func() error) error { return r.use(Piece, fn) }

func (r *Reserve) use(least int64, fn func() error) error {
	for {
		if err := fn(); !cas.IsDiskFull(err) || !r.freeBlocks(least) {
			return err
		}
	}
}

// freeBlocks frees a piece, and reports whether there was one above least.
func (r *Reserve) freeBlocks(least int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	size := r.Size()
	if size <= least {
		return false
	}
	f, err := r.fs.OpenWrite(r.path)
	if err != nil {
		return false
	}
	err = r.fs.Truncate(f, max(0, size-Piece))
	if err == nil {
		// some file systems reuse blocks only after the release is durable
		err = r.fs.Sync(f)
	}
	return errors.Join(err, f.Close()) == nil
}

// Size returns the size of the reserve, 0 if it is missing or not a file.
func (r *Reserve) Size() int64 {
	info, err := os.Lstat(r.path)
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	return info.Size()
}

// DropHollow removes a reserve without allocated blocks, which a copy of a store may have.
func (r *Reserve) DropHollow() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	size := r.Size()
	if disk, err := cas.DiskBytes(r.path); size == 0 || err != nil || disk >= size {
		return nil
	}
	return r.fs.Remove(r.path)
}

// Replenish refills the reserve if free is at least twice its size. After an error, later calls
// retry and do not report the same error again.
func (r *Reserve) Replenish(free int64) error {
	if free < 2*Bytes {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.Size() == Bytes {
		return nil
	}
	err := r.make()
	if err == nil || r.warned {
		r.warned = err != nil
		return nil
	}
	r.warned = true
	return fmt.Errorf("space reserved for a full disk: %w", err)
}

func (r *Reserve) make() error {
	if err := cas.Ignore(fs.ErrNotExist, r.fs.Remove(r.path)); err != nil {
		return err
	}
	f, err := r.fs.Create(r.path)
	if err != nil {
		return err
	}
	err = errors.Join(r.fs.Allocate(f, Bytes), f.Close())
	if err != nil {
		err = errors.Join(err, r.fs.Remove(r.path))
	}
	return err
}
