package index

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/epcached/epcached/cas"
)

// ReserveBytes is how large the reserve is: as much as a rewritten journal takes, nearly always.
const ReserveBytes = maxJournal

// reservePiece is given up at a time, because the process that fills the disk may take what is given
// up before we do.
const reservePiece = ReserveBytes / 4

// reserve is a file of blocks that hold nothing, for a disk that is full.
// Without it nothing could be removed there: a tombstone has to be durable before
// its build goes, and the database writes new pages before it frees old ones.
//
// Its size alone says how much is left, so it needs no sync: after a crash it exists, is shorter, or
// is missing, and is made again then.
type reserve struct {
	fs   cas.FS
	path string

	mu   sync.Mutex // one change at a time
	told bool       // that it cannot be made; guarded by mu
}

func newReserve(fsys cas.FS, dir string) *reserve {
	return &reserve{fs: fsys, path: filepath.Join(dir, "reserve")}
}

// use calls fn, and again for each piece of the reserve that it needs on a full disk. fn must bear to run again after such an error.
func (r *reserve) use(fn func() error) error {
	for {
		err := fn()
		if !cas.Full(err) || !r.give() {
			return err
		}
	}
}

// give gives a piece up, and reports whether there was one.
func (r *reserve) give() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	size := r.size()
	if size == 0 {
		return false
	}
	f, err := r.fs.OpenWrite(r.path)
	if err != nil {
		return false
	}
	err = r.fs.Truncate(f, max(0, size-reservePiece))
	if err == nil {
		err = r.fs.Sync(f) // some file systems give blocks out again only when it is durable that they were freed
	}
	return errors.Join(err, f.Close()) == nil
}

// size is what the reserve has, 0 if it is missing or no file.
func (r *reserve) size() int64 {
	info, err := os.Lstat(r.path)
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	return info.Size()
}

// dropHollow removes a reserve without blocks: copies of a store may have lost them.
func (r *reserve) dropHollow() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	size := r.size()
	disk, err := cas.DiskBytes(r.path)
	if size == 0 || err != nil || disk >= size {
		return nil
	}
	return r.fs.Remove(r.path)
}

// fill makes the reserve whole. That it cannot be done is told once.
func (r *reserve) fill() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.size() == ReserveBytes {
		return nil
	}
	err := r.make()
	if err == nil || r.told {
		r.told = err != nil
		return nil
	}
	r.told = true
	return fmt.Errorf("reserve for a full disk: %w", err)
}

func (r *reserve) make() error {
	if err := remove(r.fs, r.path); err != nil {
		return err
	}
	f, err := r.fs.Create(r.path)
	if err != nil {
		return err
	}
	err = errors.Join(r.fs.Allocate(f, ReserveBytes), f.Close())
	if err != nil {
		err = errors.Join(err, r.fs.Remove(r.path))
	}
	return err
}
