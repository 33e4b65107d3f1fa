package crashfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/epcached/epcached/cas"
)

// ErrStopped is what every step gives from the one on at which the file system stops.
var ErrStopped = errors.New("the machine has stopped")

// FS is a cas.FS; see the package comment. All methods may be called at the same time.
type FS struct {
	cas.OS
	root string

	mu    sync.Mutex // guards all below, and makes each step one
	steps int
	stop  int   // the step that is not carried out, and none after it; 0: none
	fail  int   // the one step that fails
	err   error // with this error
	files map[key]*file
	dirs  map[string]map[string]key // directory -> names at its last SyncDir
}

// key is what a directory's name leads to.
type key struct {
	dev, ino uint64
	dir      bool
}

type file struct {
	hold   *os.File // keeps the inode from being used for another file, and does not count as open
	synced content
	failed bool // a Sync failed: what was not synced then is lost, and no later Sync reports it
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

// FailAt makes only the step of that number, from 1, fail with err. A failing Sync loses what was
// not synced, and the next Sync of that file pretends that all is well, as Linux does.
func (f *FS) FailAt(step int, err error) { f.mu.Lock(); f.fail, f.err = step, err; f.mu.Unlock() }

// Steps returns how many steps there have been.
func (f *FS) Steps() int { f.mu.Lock(); defer f.mu.Unlock(); return f.steps }

// Close gives up the files that it holds.
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

// step counts, with mu held.
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

// rememberDir takes the names of a directory as they are.
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

// openPath is Linux's O_PATH. The store asks the kernel whether a file is open before it removes
// it.
const openPath = 0x200000

func throughFD(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// content returns what the file holds now.
func (f *file) content() (content, error) {
	open, err := os.Open(throughFD(f.hold))
	if err != nil {
		return content{}, err
	}
	defer open.Close() // only read from
	return contentOf(open)
}

// rememberBytes takes the bytes of a file as they are.
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
		n, _ := f.OS.WriteAt(open, p[:len(p)/2], off) // err says enough
		return n, err
	}
	return f.OS.WriteAt(open, p, off)
}

// Clone is not to be had here, so that every byte is seen.
func (f *FS) Clone(dst, src *os.File) error { return errors.ErrUnsupported }

// Truncate is a step.
func (f *FS) Truncate(open *os.File, size int64) error {
	return do0(f, func() error { return f.OS.Truncate(open, size) })
}

// Allocate is a step.
func (f *FS) Allocate(open *os.File, size int64) error {
	return do0(f, func() error { return f.OS.Allocate(open, size) })
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
