package cas

import (
	"errors"
	"os"
	"syscall"
)

// FS is the seam to the file system: every call that changes something, can
// lose something or can bring bytes that are wrong. OS is the real one; tests
// put one around it that fails, stops or forgets what was not synced. Files
// are real files in both cases, for their descriptors are sent to clients.
//
// Paths are absolute or relative to the working directory; errors are those of package os.
type FS interface {
	// Mkdir makes a folder of mode 0700, or leaves the one that stands there.
	Mkdir(path string) error
	// ReadDir gives the sorted names in a folder.
	ReadDir(path string) ([]string, error)
	// Create makes a file for reading and writing, mode 0600. It never opens what is there already.
	Create(path string) (*os.File, error)
	// Open opens for reading, follows no symbolic link at the end of path, and
	// does not wait at a FIFO.
	Open(path string) (*os.File, error)
	// OpenWrite opens an existing file for reading and writing.
	OpenWrite(path string) (*os.File, error)

	ReadAt(f *os.File, p []byte, off int64) (int, error)
	WriteAt(f *os.File, p []byte, off int64) (int, error)
	// Clone makes dst, which is empty, share the bytes of src.
	Clone(dst, src *os.File) error
	Truncate(f *os.File, size int64) error
	// Allocate makes f, which is empty, that many bytes long, and has the disk
	// keep room for all of them.
	Allocate(f *os.File, size int64) error
	Chmod(f *os.File, mode os.FileMode) error
	// Sync makes the bytes and the size of f durable.
	Sync(f *os.File) error

	// Link gives a file a further name, and never replaces what has that name.
	Link(from, to string) error
	// LinkAt is Link into an open folder.
	LinkAt(from string, dir *os.File, name string) error
	UnlinkAt(dir *os.File, name string) error
	// Rename replaces what has the name to.
	Rename(from, to string) error
	Remove(path string) error
	// SyncDir makes the names in a folder durable.
	SyncDir(path string) error
}

// Full reports whether err says that there is no room: on the disk, or within
// the file system's quota of who runs this process.
func Full(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// OS is the operating system's file system.
type OS struct{}

var _ FS = OS{}

func (OS) Mkdir(path string) error {
	err := os.Mkdir(path, 0o700)
	if errors.Is(err, os.ErrExist) {
		info, statErr := os.Stat(path)
		if statErr == nil && info.IsDir() {
			return nil
		}
	}
	return err
}

func (OS) ReadDir(path string) ([]string, error) {
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

func (OS) Create(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
}

func (OS) Open(path string) (*os.File, error) { return openSafely(path, os.O_RDONLY) }

func (OS) OpenWrite(path string) (*os.File, error) { return openSafely(path, os.O_RDWR) }

func (OS) ReadAt(f *os.File, p []byte, off int64) (int, error)  { return f.ReadAt(p, off) }
func (OS) WriteAt(f *os.File, p []byte, off int64) (int, error) { return f.WriteAt(p, off) }
func (OS) Truncate(f *os.File, size int64) error                { return f.Truncate(size) }
func (OS) Chmod(f *os.File, mode os.FileMode) error             { return f.Chmod(mode) }
func (OS) Sync(f *os.File) error                                { return f.Sync() }
func (OS) Link(from, to string) error                           { return os.Link(from, to) }
func (OS) Rename(from, to string) error                         { return os.Rename(from, to) }
func (OS) Remove(path string) error                             { return os.Remove(path) }

func (OS) SyncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// writeZeros is Allocate where the file system cannot do it by itself.
func writeZeros(f *os.File, size int64) error {
	zeros := make([]byte, 256<<10)
	for at := int64(0); at < size; at += int64(len(zeros)) {
		if _, err := f.WriteAt(zeros[:min(int64(len(zeros)), size-at)], at); err != nil {
			return err
		}
	}
	return nil
}

// at reads and writes a file through the seam.
type at struct {
	fs FS
	f  *os.File
}

func (a at) ReadAt(p []byte, off int64) (int, error) { return a.fs.ReadAt(a.f, p, off) }

func (a at) WriteAt(p []byte, off int64) (int, error) { return a.fs.WriteAt(a.f, p, off) }
