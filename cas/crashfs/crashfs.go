package crashfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/epcached/epcached/cas"
)

// ErrStopped is the error of every step from the one on at which the file system stops.
var ErrStopped = errors.New("the machine has stopped")

// Sparse is the real file system, but reserves no space: for a store in memory that would take
// longer than all else that opens it.
type Sparse struct{ cas.OS }

// Allocate makes f that long.
func (Sparse) Allocate(f *os.File, size int64) error { return f.Truncate(size) }

// FS is a cas.FS; see the package comment. It is safe for concurrent use.
type FS struct {
	Sparse
	root string

	mu    sync.Mutex // guards the fields below, and makes steps atomic
	steps int
	stop  int   // the first step that is not carried out; 0: none
	fail  int   // the one step that fails
	err   error // its error
	files map[key]*file
	dirs  map[string]map[string]key // directory -> names at its last SyncDir
}

// key identifies the file that a name leads to.
type key struct {
	dev, ino uint64
	dir      bool
}

type file struct {
	hold   *os.File // prevents reuse of the inode, without counting as open
	synced content
	failed bool // a Sync failed: unsynced bytes are lost, and no later Sync reports it
}

// New returns a file system for the tree below root. Files that exist now count as synced.
func New(root string) (*FS, error) {
	f := &FS{root: root, files: make(map[key]*file), dirs: make(map[string]map[string]key)}
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return f.rememberDir(path)
		}
		open, err := os.Open(path)
		if err != nil {
			return err
		}
		return errors.Join(f.rememberBytes(open), open.Close())
	})
	return f, err
}

// StopAt makes the step of that number, from 1, and all after it give
// ErrStopped without being carried out.
func (f *FS) StopAt(step int) { f.mu.Lock(); f.stop = step; f.mu.Unlock() }

// FailAt makes only the step of that number, from 1, fail with err. A failing Sync loses the
// unsynced bytes, and the next Sync of that file succeeds, as on Linux.
func (f *FS) FailAt(step int, err error) { f.mu.Lock(); f.fail, f.err = step, err; f.mu.Unlock() }

// Steps returns how many steps there have been.
func (f *FS) Steps() int { f.mu.Lock(); defer f.mu.Unlock(); return f.steps }

// Close closes the files that it holds.
func (f *FS) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var err error
	for _, file := range f.files {
		if file.hold != nil {
			err = errors.Join(err, file.hold.Close())
		}
	}
	clear(f.files)
	return err
}

// step counts a step. The caller holds mu.
func (f *FS) step() error {
	f.steps++
	switch {
	case f.stop > 0 && f.steps >= f.stop:
		return ErrStopped
	case f.fail > 0 && f.steps == f.fail:
		return f.err
	}
	return nil
}

func do[T any](f *FS, fn func() (T, error)) (T, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.step(); err != nil {
		return *new(T), err
	}
	return fn()
}

func do0(f *FS, fn func() error) error {
	_, err := do(f, func() (struct{}, error) { return struct{}{}, fn() })
	return err
}

// keysIn returns the file or directory of each name in a directory.
func keysIn(path string) (map[string]key, error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer dir.Close() // only read from
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return nil, err
	}
	names := make(map[string]key, len(entries))
	for _, e := range entries {
		s, err := cas.StampAt(int(dir.Fd()), e.Name())
		if err != nil {
			return nil, err
		}
		names[e.Name()] = key{s.Dev, s.Ino, e.IsDir()}
	}
	return names, nil
}

// rememberDir records the names of a directory as synced.
func (f *FS) rememberDir(path string) error {
	names, err := keysIn(path)
	if err == nil {
		f.dirs[path] = names
	}
	return err
}

func (f *FS) file(open *os.File) (*file, error) {
	s, err := cas.StampOf(open)
	if err != nil {
		return nil, err
	}
	k := key{s.Dev, s.Ino, false}
	if f.files[k] == nil {
		hold, err := os.OpenFile(throughFD(open), openPath, 0)
		if err != nil {
			return nil, err
		}
		f.files[k] = &file{hold: hold}
	}
	return f.files[k], nil
}

// openPath is Linux's O_PATH. Such a descriptor does not count as open when the store asks the
// kernel.
const openPath = 0x200000

func throughFD(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// content returns the file's current content.
func (f *file) content() (content, error) {
	open, err := os.Open(throughFD(f.hold))
	if err != nil {
		return content{}, err
	}
	defer open.Close() // only read from
	return contentOf(open)
}

// rememberBytes records the bytes of a file as synced.
func (f *FS) rememberBytes(open *os.File) error {
	file, err := f.file(open)
	if err != nil {
		return err
	}
	if file.failed {
		return nil
	}
	file.synced, err = file.content()
	return err
}

// Mkdir is a step.
func (f *FS) Mkdir(path string) error { return do0(f, func() error { return f.OS.Mkdir(path) }) }

// Create is a step.
func (f *FS) Create(path string) (*os.File, error) {
	return do(f, func() (*os.File, error) {
		open, err := f.OS.Create(path)
		if err != nil {
			return nil, err
		}
		if _, err := f.file(open); err != nil {
			return nil, errors.Join(err, open.Close())
		}
		return open, nil
	})
}

// WriteAt is a step; one that fails writes half.
func (f *FS) WriteAt(open *os.File, p []byte, off int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.step(); err != nil {
		n, _ := f.OS.WriteAt(open, p[:len(p)/2], off) // the error is returned below
		return n, err
	}
	return f.OS.WriteAt(open, p, off)
}

// Clone is not supported, so that every byte passes through WriteAt.
func (f *FS) Clone(dst, src *os.File) error { return errors.ErrUnsupported }

// Truncate is a step.
func (f *FS) Truncate(open *os.File, size int64) error {
	return do0(f, func() error { return f.OS.Truncate(open, size) })
}

// Allocate is a step.
func (f *FS) Allocate(open *os.File, size int64) error {
	return do0(f, func() error { return f.Sparse.Allocate(open, size) })
}

// Chmod is a step.
func (f *FS) Chmod(open *os.File, mode os.FileMode) error {
	return do0(f, func() error { return f.OS.Chmod(open, mode) })
}

// Sync is a step, and remembers the bytes.
func (f *FS) Sync(open *os.File) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.step(); err != nil {
		if file, fileErr := f.file(open); fileErr == nil {
			file.failed = true
		}
		return err
	}
	if err := f.OS.Sync(open); err != nil {
		return err
	}
	return f.rememberBytes(open)
}

// Link is a step.
func (f *FS) Link(from, to string) error {
	return do0(f, func() error { return f.OS.Link(from, to) })
}

// LinkAt is a step.
func (f *FS) LinkAt(from string, dir *os.File, name string) error {
	return do0(f, func() error { return f.OS.LinkAt(from, dir, name) })
}

// UnlinkAt is a step.
func (f *FS) UnlinkAt(dir *os.File, name string) error {
	return do0(f, func() error { return f.OS.UnlinkAt(dir, name) })
}

// Rename is a step.
func (f *FS) Rename(from, to string) error {
	return do0(f, func() error { return f.OS.Rename(from, to) })
}

// Remove is a step.
func (f *FS) Remove(path string) error { return do0(f, func() error { return f.OS.Remove(path) }) }

// SyncDir is a step, and remembers the names.
func (f *FS) SyncDir(path string) error {
	return do0(f, func() error {
		if err := f.OS.SyncDir(path); err != nil {
			return err
		}
		return f.rememberDir(path)
	})
}
