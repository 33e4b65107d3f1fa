// Package cas stores immutable blobs under the digest of their bytes.
//
// A blob is a file of mode 0444 named by the BLAKE3 digest of its plain bytes. Put, PutFile and
// AdoptHashed return only when the bytes and the name are durable: data synced, linked without
// replacing, directory synced. A crash at any step leaves at most a temporary file, which the next
// Open removes; a name in the store never refers to missing or partial bytes.
//
// A blob is hashed when it is stored. Afterwards its Stamp is believed: while device, inode, size
// and times hold, a blob is served without being read; as soon as they differ it is hashed before
// it is served. Changes that the store makes itself (further links for views) renew the stamp.
//
// All methods of a Store may be called at the same time. One process has a
// store open at a time; callers of this package ensure that.
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
	incoming string // blobs that have no name yet
	fs       FS
	stamps   stampCache
	volatile bool

	shards Shards // the directories of blobs

	// locks orders what happens to one blob: linking, unlinking, hashing,
	// removing. A blob's lock is taken first; no other lock is held over it.
	locks keyed.Locks[Digest]

	holdsMu sync.Mutex     // guards held; taken last
	holds   map[Digest]int // how many Holds keep a blob
}

// Options of Open.
type Options struct {
	Stamps StampBook // nil: stamps live as long as the Store
	FS     FS        // nil: OS

	// Volatile is for blobs that can be made again at any time: nothing is
	// synced, stamps die with the boot, and a file that does not fit its stamp
	// is removed instead of hashed. Such a store has no quarantine. See Fill.
	Volatile bool

	// ReadOnly is for a store that is only read, perhaps on a read-only file
	// system or another user's: Open makes and removes nothing.
	ReadOnly bool
}

// The directories below the state directory that a Store owns. Names of mode 0700,
// for a blob's rights are those of the view that leads to it.
const (
	objectsName    = "objects"
	incomingName   = "incoming" // below objects, so that a link never leaves the file system
	quarantineName = "quarantine"
)

// Open opens the store in the state directory dir, makes it if there is none, and removes what a
// crash has left of unfinished work. No other process may use the store meanwhile.
func Open(dir string, o Options) (*Store, error) {
	s := &Store{
		dir:      dir,
		objects:  filepath.Join(dir, objectsName),
		incoming: filepath.Join(dir, objectsName, incomingName),
		fs:       o.FS,
		stamps:   stampCache{book: o.Stamps, stamps: make(map[Digest]Stamp)},
		holds:    make(map[Digest]int),
	}
	if s.fs == nil {
		s.fs = OS{}
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

// makeDirs makes the directories that are always there.
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
		return nil // its parent belongs to another user, which made and synced it
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

// RemoveLeftovers removes the files that a crash has left in an incoming directory.
func RemoveLeftovers(fsys FS, incoming string) error {
	names, err := fsys.ReadDir(incoming)
	for _, name := range names {
		err = errors.Join(err, fsys.Remove(filepath.Join(incoming, name)))
	}
	return err
}

func (s *Store) directory(d Digest) string { return s.shards.Path(d[0]) }
func (s *Store) path(d Digest) string      { return filepath.Join(s.directory(d), d.String()) }

// Has reports whether a blob of that digest is there, without a look at its bytes.
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

// RoundUpToBlock returns what a file of so many bytes takes on the disk, in whole
// blocks, where that is not known yet, if it has no holes.
func RoundUpToBlock(size int64) int64 { return (size + Block - 1) / Block * Block }

// DiskBytesIn returns what a blob of the store in the state directory dir takes on
// the disk, in whole blocks. It needs no open store, for the index, which a
// Store is opened with, wants to know it as well.
func DiskBytesIn(dir string, d Digest) (int64, error) {
	name := d.String()
	return DiskBytes(filepath.Join(dir, objectsName, name[:2], name))
}

// Stamp returns the stamp that the file of a verified blob has had since the
// store last touched it, from memory: what a hit compares with. False means
// that nothing is known, and that Verify is needed.
func (s *Store) Stamp(d Digest) (Stamp, bool) { return s.stamps.load(d) }

// Verify is Open without a descriptor.
func (s *Store) Verify(ctx context.Context, d Digest) error {
	f, err := s.Open(ctx, d)
	if err != nil {
		return err
	}
	return f.Close()
}

// Check hashes the blob whatever its stamp says. Errors are those of Open.
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

// Remove forgets the blob and deletes it, durably. Descriptors and further
// names of it stay valid. The caller ensures that nothing refers to it.
func (s *Store) Remove(d Digest) error {
	unlock, err := s.locks.Lock(context.Background(), d)
	if err != nil {
		return err
	}
	defer unlock()
	s.stamps.forget(d)
	return s.syncRemoved(d, s.fs.Remove(s.path(d)))
}

// syncRemoved makes it durable that the blob has no name, after err came of taking
// the name away. It does so also if there was none: an earlier call may have
// got no further than that, and ErrNotFound has to stay true after a crash.
func (s *Store) syncRemoved(d Digest, err error) error {
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return s.nameError(d, err)
	}
	if syncErr := s.fs.SyncDir(s.directory(d)); !errors.Is(syncErr, fs.ErrNotExist) {
		err = cmp.Or(syncErr, err)
	}
	return s.nameError(d, err)
}

// SyncName makes the name of a blob durable, for one that was found and not put: a
// crash may have come before its directory was synced.
func (s *Store) SyncName(d Digest) error {
	return s.nameError(d, s.fs.SyncDir(s.directory(d)))
}

// Quarantine moves the blob out of the store, with a note why. Views that have
// a further name of the file keep it: they are the caller's to drop.
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
// Blobs that come or go meanwhile may be given or not.
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
	// a volatile store, which is asked for its sum again and again, has few of them
	there, err := s.fs.ReadDir(s.objects)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, shard := range there {
		var first [1]byte
		if ParseHex("directory", shard, first[:]) != nil {
			continue // incoming, and what is not ours
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
				continue // removed since we read the directory
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
