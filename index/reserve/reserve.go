// Package reserve keeps some blocks of the file system for the time when it is full: for what must
// not fail then. A Reserve may be used by any number of goroutines.
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

// Bytes is how large the reserve is: as much as a rewritten journal takes, nearly always.
const Bytes = 4 << 20

// Piece is given up at a time, because the process that fills the disk may take it first.
const Piece = Bytes / 4

// Reserve is a file of blocks that hold nothing, for a disk that is full.
// Without it nothing could be removed there: a tombstone has to be durable before
// its build goes, and the database writes new pages before it frees old ones.
//
// Its size alone says how much is left, so it needs no sync: after a crash it exists, is shorter,
// or is missing, and is made again then.
type Reserve struct {
	fs   cas.FS
	path string

	mu     sync.Mutex // one change at a time
	warned bool       // that it cannot be made; guarded by mu
}

// New returns the reserve of a state directory.
func New(fsys cas.FS, dir string) *Reserve {
	return &Reserve{fs: fsys, path: filepath.Join(dir, "reserve")}
}

// Use calls fn, and again for each piece of the reserve that it needs on a full disk. fn must bear
// to run again after such an error.
func (r *Reserve) Use(fn func() error) error { return r.use(0, fn) }

// UseSome is Use that leaves the last piece for removals.
func (r *Reserve) UseSome(fn func() error) error { return r.use(Piece, fn) }

func (r *Reserve) use(least int64, fn func() error) error {
	for {
		if err := fn(); !cas.IsDiskFull(err) || !r.freeBlocks(least) {
			return err
		}
	}
}

// freeBlocks gives a piece up, and reports whether there was one above the least.
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
		// some file systems give blocks out again only when it is durable that they were freed
		err = r.fs.Sync(f)
	}
	return errors.Join(err, f.Close()) == nil
}

// Size is what the reserve has, 0 if it is missing or no file.
func (r *Reserve) Size() int64 {
	info, err := os.Lstat(r.path)
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	return info.Size()
}

// DropHollow removes a reserve without blocks: copies of a store may have lost them.
func (r *Reserve) DropHollow() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	size := r.Size()
	if disk, err := cas.DiskBytes(r.path); size == 0 || err != nil || disk >= size {
		return nil
	}
	return r.fs.Remove(r.path)
}

// Replenish makes the reserve whole where free bytes of the disk are enough for that and as much
// again. After an error the next one tries again, and gives no error for the same.
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
	if err := r.fs.Remove(r.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
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
