// Package cas stores immutable blobs under the digest of their bytes.
//
// A blob is a file of mode 0444 named by the BLAKE3 digest of its plain bytes. Put, PutFile and
// AdoptHashed return only when the bytes and the name are durable: data synced, linked without
// replacing, directory synced. A crash at any step leaves at most a temporary file, which the next
// Open removes; a name in the store never refers to missing or partial bytes.
//
// A blob is hashed when it is stored. Afterwards its Stamp is trusted: while device, inode, size
// and times are unchanged, a blob is served without being read; if they differ it is hashed before
// it is served. Changes that the store makes itself (further links for views) renew the stamp.
//
// A Store is safe for concurrent use. Only one process may have a store open; callers of this
// package ensure that.
//
// Start with Open, Store.Hold, Hold.Put and Store.Open; the layout on disk is described
// in doc/format.md.
package cas

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/epcached/epcached/internal/keyed"
)

// Store is a directory of blobs. See the package comment for what it promises.
type Store struct {
	dir      string // the state directory
	objects  string
	incoming string // directory of staged blobs
	fs       FS
	stamps   stampCache
	volatile bool

	shards Shards // the directories of blobs

	// locks serialises operations on one blob: linking, unlinking, hashing, removing. A blob's lock
	// is taken before all other locks.
	locks keyed.Locks[Digest]

	holdsMu sync.Mutex     // guards held; taken last
	holds   map[Digest]int // number of Holds that protect a blob
}

// Options of Open.
type Options struct {
	Stamps StampBook // nil: stamps are only in memory
	FS     FS        // nil: OS

	// Volatile is for blobs that can be made again at any time: files are not synced, stamps are
	// valid for one boot, and a file that does not match its stamp is removed instead of hashed.
	// Such a store has no quarantine. See Fill.
	Volatile bool

	// ReadOnly is for a store on a read-only file system, or of another user: Open makes and
	// removes no files.
	ReadOnly bool
}

// The directories below the state directory that a Store owns. They have mode 0700, because views
// decide which users may read a blob.
const (
	objectsName    = "objects"
	incomingName   = "incoming" // below objects, so that a link never leaves the file system
	quarantineName = "quarantine"
)

// Open opens the store in the state directory dir, makes it if there is none, and removes temporary
// files that a crash has left. No other process may use the store at the same time.
func Open(dir string, o Options) (*Store, error) {
	s := &Store{
		dir:      dir,
		objects:  filepath.Join(dir, objectsName),
		incoming: filepath.Join(dir, objectsName, incomingName),
		fs:       cmp.Or[FS](o.FS, OS{}),
		stamps:   stampCache{book: o.Stamps, stamps: make(map[Digest]Stamp)},
		holds:    make(map[Digest]int),
	}
	if s.volatile = o.Volatile; s.volatile {
		s.fs = unsynced{s.fs}
	}
	s.shards.FS, s.shards.Dir = s.fs, s.objects
	if o.ReadOnly {
		return s, nil
	}
	err := s.makeDirs()
	if err == nil {
		err = RemoveLeftovers(s.fs, s.incoming)
	}
	if err == nil && s.volatile {
		err = s.removeStale()
	}
	if err != nil {
		return nil, fmt.Errorf("open blob store %s: %w", dir, err)
	}
	return s, nil
}

// makeDirs makes the fixed directories.
func (s *Store) makeDirs() error {
	if err := MakeDir(s.fs, s.dir); err != nil {
		return err
	}
	if s.volatile {
		return makeDirs(s.fs, s.objects, s.incoming)
	}
	if err := s.fs.Mkdir(filepath.Join(s.dir, quarantineName)); err != nil {
		return err
	}
	return s.shards.Open()
}

// MakeDir makes a directory of mode 0700 durably, if it is not there. Its name is
// synced also if it existed, because its maker may have been stopped before it did so.
func MakeDir(fsys FS, path string) error {
	info, err := os.Stat(path)
	there := err == nil && info.IsDir()
	if !there {
		if err := fsys.Mkdir(path); err != nil {
			return err
		}
	}
	err = fsys.SyncDir(filepath.Dir(path))
	if there && cannotSync(err) {
		return nil // another user made and synced it, and owns the parent
	}
	return err
}

func cannotSync(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, errors.ErrUnsupported) ||
		errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EROFS)
}

func makeDirs(fsys FS, paths ...string) error {
	for _, path := range paths {
		if err := fsys.Mkdir(path); err != nil {
			return err
		}
	}
	return nil
}

// RemoveLeftovers removes the files that a crash has left in an incoming directory. It leaves
// directories, because no store makes one there.
func RemoveLeftovers(fsys FS, incoming string) error {
	names, err := fsys.ReadDir(incoming)
	for _, name := range names {
		err = errors.Join(err, removeFile(fsys, filepath.Join(incoming, name)))
	}
	return err
}

// removeFile removes a file, or a link, that may be missing. It leaves a directory.
func removeFile(fsys FS, path string) error {
	if info, err := os.Lstat(path); err == nil && info.IsDir() {
		return nil
	}
	return Ignore(fs.ErrNotExist, fsys.Remove(path))
}

func (s *Store) directory(d Digest) string { return s.shards.Path(d[0]) }
func (s *Store) path(d Digest) string      { return filepath.Join(s.directory(d), d.String()) }

// Has reports whether a blob exists, without checking its bytes.
func (s *Store) Has(d Digest) bool {
	_, err := s.Size(d)
	return err == nil
}

// Size returns the length of a blob in bytes, or ErrNotFound.
func (s *Store) Size(d Digest) (int64, error) {
	info, err := os.Lstat(s.path(d))
	if err != nil {
		return 0, s.nameError(d, err)
	}
	if !info.Mode().IsRegular() {
		return 0, fmt.Errorf("blob %s: %w", d, errNotRegular)
	}
	return info.Size(), nil
}

// Block is what a file's size is rounded up to on the disk.
const Block = 4096

// RoundUpToBlock returns how many bytes a file of this size without holes will take on the disk, in
// whole blocks.
func RoundUpToBlock(size int64) int64 { return (size + Block - 1) / Block * Block }

// DiskBytesIn returns the disk bytes, in whole blocks, of a blob of the store in the state
// directory dir. It needs no open store, because the index needs it before the store is opened.
func DiskBytesIn(dir string, d Digest) (int64, error) {
	name := d.String()
	return DiskBytes(filepath.Join(dir, objectsName, name[:2], name))
}

// Stamp returns the stamp that the file of a verified blob has had since the store last touched it,
// for comparing it at a hit. It returns false if the stamp is unknown, so that Verify is needed.
func (s *Store) Stamp(d Digest) (Stamp, bool) { return s.stamps.load(d) }

// Verify is Open without a descriptor.
func (s *Store) Verify(ctx context.Context, d Digest) error {
	f, err := s.Open(ctx, d)
	if err != nil {
		return err
	}
	return f.Close()
}

// Check hashes the blob without relying on its stamp. Errors are those of Open.
func (s *Store) Check(ctx context.Context, d Digest) error {
	unlock, err := s.locks.Lock(ctx, d)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := s.openFile(d)
	if err != nil {
		return err
	}
	_, err = s.verify(ctx, d, f)
	return errors.Join(err, f.Close())
}

// Remove deletes the blob, durably. Descriptors and other links stay valid. The caller ensures that
// no build needs it.
func (s *Store) Remove(d Digest) error {
	unlock, err := s.locks.Lock(context.Background(), d)
	if err != nil {
		return err
	}
	defer unlock()
	s.stamps.forget(d)
	return s.syncRemoved(d, s.fs.Remove(s.path(d)))
}

// syncRemoved makes the removal of a blob's name durable; err is the error of the removal. It does
// so also if there was no name, because an earlier removal may not have been synced, and
// ErrNotFound has to stay true after a crash.
func (s *Store) syncRemoved(d Digest, err error) error {
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return s.nameError(d, err)
	}
	if syncErr := s.fs.SyncDir(s.directory(d)); !errors.Is(syncErr, fs.ErrNotExist) {
		err = cmp.Or(syncErr, err)
	}
	return s.nameError(d, err)
}

// SyncName makes the name of a blob durable, if it was found and not put, because a crash may have
// prevented the sync of its directory.
func (s *Store) SyncName(d Digest) error {
	return s.nameError(d, s.fs.SyncDir(s.directory(d)))
}

// Quarantine moves the blob out of the store, with a note why. Views that link the file keep it,
// and the caller has to drop them.
func (s *Store) Quarantine(d Digest, why string) error {
	unlock, err := s.locks.Lock(context.Background(), d)
	if err != nil {
		return err
	}
	defer unlock()
	return s.quarantine(d, why)
}

// quarantine is called with the blob's lock held.
func (s *Store) quarantine(d Digest, why string) error {
	s.stamps.forget(d)
	if s.volatile {
		return s.syncRemoved(d, s.fs.Remove(s.path(d)))
	}
	return s.syncRemoved(d, SetAside(s.fs, s.dir, s.path(d), why))
}

// Walk calls fn with every blob, its length, and the bytes that it takes on the disk, in whole
// blocks, in order of digests, and stops at fn's first error, which it returns. It reads no blob.
// fn may or may not be called with blobs that are added or removed in the meantime.
func (s *Store) Walk(ctx context.Context, fn func(d Digest, size, disk int64) error) error {
	return s.each(ctx, func(_ string, d Digest, info fs.FileInfo, ok bool) error {
		if !ok {
			return nil
		}
		return fn(d, info.Size(), info.Sys().(*syscall.Stat_t).Blocks*512)
	})
}

func (s *Store) each(ctx context.Context,
	fn func(path string, d Digest, info fs.FileInfo, ok bool) error) error {
	// reads the names, because a volatile store, which is walked often, has few shards
	there, err := s.fs.ReadDir(s.objects)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, shard := range there {
		var first [1]byte
		if ParseHex("directory", shard, first[:]) != nil {
			continue // incoming, or a foreign name
		}
		dir := filepath.Join(s.objects, shard)
		names, err := s.fs.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted since
		}
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := ctx.Err(); err != nil {
				return err
			}
			path := filepath.Join(dir, name)
			info, err := os.Lstat(path)
			if errors.Is(err, fs.ErrNotExist) {
				continue // removed since the directory was read
			}
			if err != nil {
				return err
			}
			d, err := ParseDigest(name)
			ok := err == nil && info.Mode().IsRegular() && d[0] == first[0]
			if err := fn(path, d, info, ok); err != nil {
				return err
			}
		}
	}
	return nil
}

// nameError names the blob, and makes a missing file ErrNotFound.
func (s *Store) nameError(d Digest, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		err = ErrNotFound
	}
	return fmt.Errorf("blob %s: %w", d, err)
}
