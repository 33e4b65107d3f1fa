package cas

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// leaseRetryTime is for how long opening a file is retried while another process has a lease on it.
const leaseRetryTime = 5 * time.Second

// openSafely opens a file without following a link and without blocking on a FIFO. It retries after
// EAGAIN, because a process that asks the kernel whether a file is in use has a write lease on it
// for a moment, and a non-blocking open fails then (fcntl(2)).
func openSafely(path string, flag int) (*os.File, error) {
	end := time.Now().Add(leaseRetryTime)
	for {
		f, err := os.OpenFile(path, flag|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if !errors.Is(err, unix.EAGAIN) || time.Now().After(end) {
			return f, err
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// Clone shares extents (XFS, btrfs, bcachefs). On other file systems it fails.
func (OS) Clone(dst, src *os.File) error {
	err := control(dst, func(d int) error {
		return control(src, func(s int) error { return unix.IoctlFileClone(d, s) })
	})
	if err != nil {
		return &os.LinkError{Op: "clone", Old: src.Name(), New: dst.Name(), Err: err}
	}
	return nil
}

// Allocate is fast if the file system supports it. Otherwise it writes zeros.
func (OS) Allocate(f *os.File, size int64) error {
	err := control(f, func(fd int) error { return unix.Fallocate(fd, 0, 0, size) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return writeZeros(f, size)
	}
	return pathError("fallocate", f.Name(), err)
}

func (OS) LinkAt(from string, dir *os.File, name string) error {
	return control(dir, func(fd int) error {
		if err := unix.Linkat(unix.AT_FDCWD, from, fd, name, 0); err != nil {
			return &os.LinkError{Op: "link", Old: from, New: dir.Name() + "/" + name, Err: err}
		}
		return nil
	})
}

func (OS) UnlinkAt(dir *os.File, name string) error {
	err := control(dir, func(fd int) error { return unix.Unlinkat(fd, name, 0) })
	return pathError("unlink", dir.Name()+"/"+name, err)
}

func pathError(op, path string, err error) error {
	if err != nil {
		return &os.PathError{Op: op, Path: path, Err: err}
	}
	return nil
}

// control calls fn with f's descriptor. It does not use Fd, which would set the file, perhaps a
// client's, to blocking.
func control(f *os.File, fn func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) {
		for inner = unix.EINTR; errors.Is(inner, unix.EINTR); {
			inner = fn(int(fd))
		}
	})
	return errors.Join(err, inner)
}

// StampOf returns the stamp of an open file.
func StampOf(f *os.File) (s Stamp, err error) {
	err = control(f, func(fd int) (err error) {
		s, err = StampFD(fd)
		return err
	})
	return s, pathError("fstat", f.Name(), err)
}

// StampAt returns the stamp of the file of that name in the directory with the
// descriptor dirfd. A symbolic link is not followed: the stamp is its own.
func StampAt(dirfd int, name string) (Stamp, error) {
	s, err := stampAt(dirfd, name, unix.AT_SYMLINK_NOFOLLOW)
	return s, pathError("fstatat", name, err)
}

// StampPath returns the stamp of the file that a path resolves to, so a changed link changes it.
func StampPath(path string) (Stamp, error) {
	s, err := stampAt(unix.AT_FDCWD, path, 0)
	return s, pathError("stat", path, err)
}

// StampThrough is StampPath for a name in the directory with the descriptor. Its error names no
// path.
func StampThrough(dirfd int, name string) (Stamp, error) { return stampAt(dirfd, name, 0) }

func stampAt(dirfd int, name string, flags int) (Stamp, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dirfd, name, &st, flags); err != nil {
		return Stamp{}, err
	}
	return stampFrom(&st), nil
}

// StampFD is StampOf for a descriptor, which may be one of O_PATH. Its error names no path.
func StampFD(fd int) (Stamp, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return Stamp{}, err
	}
	return stampFrom(&st), nil
}

func stampFrom(st *unix.Stat_t) Stamp {
	return Stamp{
		// 32 bits on other architectures
		Dev: uint64(st.Dev), Ino: st.Ino, Size: st.Size, //nolint:unconvert
		Mtime: st.Mtim.Nano(), Ctime: st.Ctim.Nano(),
	}
}

// makeOwnReadOnly makes the staged file f read-only and owned by the daemon. It reports whether no
// process can write it any more: no writable descriptor or mapping is left, and it has one name.
func makeOwnReadOnly(fs FS, f *os.File) (bool, error) {
	var st unix.Stat_t
	if err := control(f, func(fd int) error { return unix.Fstat(fd, &st) }); err != nil {
		return false, err
	}
	if st.Nlink != 1 {
		return false, nil // it could be opened again by the other name
	}
	if int(st.Uid) != os.Geteuid() && f.Chown(os.Geteuid(), os.Getegid()) != nil {
		return false, nil // its owner could make it writable again
	}
	if err := fs.Chmod(f, 0o444); err != nil {
		return false, err
	}
	// A read lease is granted only while no open file description, and so no mapping either, could
	// write. From here on mode 0444 prevents new ones. The lease is released at once, because it is
	// not needed any longer and would send a signal when it is broken.
	err := control(f, func(fd int) error {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_RDLCK); err != nil {
			return err
		}
		_, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK)
		return err
	})
	return err == nil, nil // on an error, or without leases, the caller copies
}

// startWriting starts the writeback of a file. It does not block and returns no error, because the
// sync that follows reports failures.
func startWriting(f *os.File) {
	// Best effort: otherwise all is written at the sync.
	_ = control(f,
		func(fd int) error { return unix.SyncFileRange(fd, 0, 0, unix.SYNC_FILE_RANGE_WRITE) })
}

// Preallocate reserves disk space for all of f, which is empty, if that is fast, so that writes
// need not allocate blocks each. Best effort: if there is no space, writing fails.
func Preallocate(f *os.File, size int64) {
	if size < WriteStep {
		return
	}
	_ = control(f, func(fd int) error { return unix.Fallocate(fd, 0, 0, size) }) // see above
}

// Boot returns the kernel's id of this boot, for the stamps of files that are not synced.
var Boot = sync.OnceValue(func() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown " // without the id such a stamp is never valid, see Holds
	}
	return strings.TrimSpace(string(b))
})

// DiskBytes returns the bytes of the file at path on the disk, in whole blocks.
func DiskBytes(path string) (int64, error) {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	return st.Blocks * 512, pathError("lstat", path, err)
}

// FreeBytes returns the free bytes of the directory's file system for an ordinary user.
func FreeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	err := unix.Statfs(dir, &st)
	return int64(st.Bavail) * int64(st.Bsize), pathError("statfs", dir, err)
}

// Owner returns the user that a file belongs to.
func Owner(info os.FileInfo) uint32 { return info.Sys().(*syscall.Stat_t).Uid }

// CheckPath fails if another user can replace what the absolute path leads to: a user that owns or
// may write to a directory on the way, or that owns a link. Missing components are ignored.
func CheckPath(path string) error {
	above := filepath.Dir(path)
	if above != path {
		if err := CheckPath(above); err != nil {
			return err
		}
	}
	info, err := os.Lstat(path)
	if err != nil {
		return Ignore(os.ErrNotExist, err)
	}
	if err = CheckOwner(path, info); err != nil || info.Mode().Type() != os.ModeSymlink {
		return err
	}
	if _, err = os.Stat(path); errors.Is(err, unix.ELOOP) {
		return err
	}
	to, err := os.Readlink(path)
	if err == nil && !filepath.IsAbs(to) {
		above, err = filepath.EvalSymlinks(above)
		to = filepath.Join(above, to)
	}
	return cmp.Or(err, CheckPath(to))
}

// CheckOwner fails if a user other than root and the process's own owns the file or may write to
// it. In a directory with the sticky bit other users may create files, but replace none.
func CheckOwner(path string, info os.FileInfo) error {
	switch uid, mode := Owner(info), info.Mode(); {
	case uid != 0 && uid != uint32(os.Geteuid()):
		return fmt.Errorf("%s belongs to user %d", path, uid)
	case mode.Type() != os.ModeSymlink && mode.Perm()&0o022 != 0 &&
		!(mode.IsDir() && mode&os.ModeSticky != 0): // only its owner can replace a link
		return fmt.Errorf("%s: other users may write to it (mode %v)", path, mode)
	}
	return nil
}

// FS has the calls to the file system that can change, lose or corrupt data. OS is the real one;
// tests wrap it to fail, stop or lose unsynced data. Files are real files in both cases, because
// their descriptors are sent to clients.
//
// Paths are absolute or relative to the working directory; errors are those of package os.
type FS interface {
	// Mkdir makes a directory of mode 0700, or leaves an existing one. A link is none.
	Mkdir(path string) error
	// ReadDir gives the sorted names in a directory. It follows no link at the end of path.
	ReadDir(path string) ([]string, error)
	// Create makes a file for reading and writing, mode 0600. It fails if the file exists.
	Create(path string) (*os.File, error)
	// Open opens for reading, follows no link at the end of path, and does not block on a FIFO.
	Open(path string) (*os.File, error)
	// OpenWrite opens an existing file for reading and writing.
	OpenWrite(path string) (*os.File, error)

	ReadAt(f *os.File, p []byte, off int64) (int, error)
	WriteAt(f *os.File, p []byte, off int64) (int, error)
	// Clone makes dst, which is empty, share the bytes of src.
	Clone(dst, src *os.File) error
	Truncate(f *os.File, size int64) error
	// Allocate makes the empty f that long, and reserves disk space for all of it.
	Allocate(f *os.File, size int64) error
	Chmod(f *os.File, mode os.FileMode) error
	// Sync makes the bytes and the size of f durable.
	Sync(f *os.File) error

	// Link links a file to another name, and fails if that exists.
	Link(from, to string) error
	// LinkAt is Link into an open directory.
	LinkAt(from string, dir *os.File, name string) error
	UnlinkAt(dir *os.File, name string) error
	// Rename replaces an existing file.
	Rename(from, to string) error
	Remove(path string) error
	// SyncDir makes the names in a directory durable.
	SyncDir(path string) error
}

// IsDiskFull reports whether err means that the disk, or the quota of the daemon's user, is full.
func IsDiskFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// OS is the operating system's file system.
type OS struct{}

var _ FS = OS{}

func (OS) Mkdir(path string) error {
	err := os.Mkdir(path, 0o700)
	if errors.Is(err, os.ErrExist) {
		if info, statErr := os.Lstat(path); statErr == nil && info.IsDir() {
			return nil
		}
	}
	return err
}

func (OS) ReadDir(path string) ([]string, error) {
	d, err := openSafely(path, unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	names, err := d.Readdirnames(-1)
	slices.Sort(names)
	return names, errors.Join(err, d.Close())
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

// Ignore returns err, unless it is of that kind.
func Ignore(kind, err error) error {
	if errors.Is(err, kind) {
		return nil
	}
	return err
}

// writeZeros is Allocate for file systems that do not support it.
func writeZeros(f *os.File, size int64) error {
	zeros := make([]byte, 256<<10)
	for at := int64(0); at < size; at += int64(len(zeros)) {
		if _, err := f.WriteAt(zeros[:min(int64(len(zeros)), size-at)], at); err != nil {
			return err
		}
	}
	return nil
}

type fileAt struct {
	fs FS
	f  *os.File
}

func (a fileAt) ReadAt(p []byte, off int64) (int, error) { return a.fs.ReadAt(a.f, p, off) }

func (a fileAt) WriteAt(p []byte, off int64) (int, error) { return a.fs.WriteAt(a.f, p, off) }
