// Package packing stores the blobs of one store, whole or packed, to save disk space. Four
// operations change the representation of a blob:
//
//   - Store.Pack replaces the whole file of a blob by a recipe: ranges of other blobs, its bases,
//     and literals, the bytes that no other blob has.
//   - Store.Unpack makes a copy of a packed blob for a request. The copy is not synced, and may
//     vanish at any time.
//   - Store.MakeWhole stores a packed blob whole again.
//   - Store.Compact makes a blob in use whole, and packs its idle base and the other dependents of
//     that again; or it removes a base that no build needs.
//
// A blob is whole or packed. It is both only during a change or after a crash, and then the whole
// file is served. Bases are whole, and are kept as long as a recipe needs them; a base is never
// packed itself. Literals are stored as a separate blob, which can be a base of later recipes.
//
// Package cas stores the whole files and the copies, package dedupe the recipes. This package
// changes the representations in an order in which the blob can be served at any time, also after a
// crash. It does not know builds: it asks its Owner before it removes a blob or uses one as a base.
// Its Memory has the recorded facts about blobs.
//
// A Store is safe for concurrent use. Operations that change the representation of a blob hold the
// representation lock, one at a time; opening, verifying and copying blobs never blocks on it. When
// an operation returns, its result is durable, except for copies.
package packing

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// ErrInUse says that an operation did nothing because a blob or build is in use, or was just now.
var ErrInUse = errors.New("in use")

// ErrNoSpace is wrapped by an Owner's error if its budget has no space. The disk may still have
// some.
var ErrNoSpace = errors.New("no free space")

// Gate blocks before each piece that background work reads, until it may continue; its error ends
// that work. A nil Gate is always open.
type Gate = func(context.Context) error

// Owner knows which builds need and use blobs. Its methods are called while locks are held, also of
// a blob, and must not call operations that change representations.
type Owner interface {
	// Needed reports whether a build needs a blob, and true if that is unknown.
	Needed(d cas.Digest) (bool, error)

	// DropViews removes all other links to the bytes of a blob. It fails with ErrInUse, and removes
	// none, if one of them is in use.
	DropViews(d cas.Digest) error

	// BeingServed reports whether a new link to the blob was made since DropViews, or is about to
	// be.
	BeingServed(d cas.Digest) bool

	// MayTake returns a function that reports whether another blob is permitted as a base of d. Use
	// it at once, because builds change.
	MayTake(d cas.Digest) (func(from cas.Digest) (bool, error), error)

	// Reserve reserves disk bytes, in whole blocks, for another representation, until release,
	// which may be called more than once. instead is how many bytes will be removed afterwards. If
	// it is 0, a request waits, and other blobs may be removed for it. It fails with ErrNoSpace if
	// the budget has no space.
	Reserve(ctx context.Context, disk, instead int64) (release func(), err error)

	// CountTransient announces, until done, that fewer bytes are about to replace these on the
	// disk, so that no build is evicted for them.
	CountTransient(disk int64) (done func())

	// Fits returns an error that wraps syscall.ENOSPC if size bytes for the use what may not be
	// written to the file system of dir now. instead is how many bytes will be removed there
	// afterwards.
	Fits(dir, what string, size, instead int64) error
}

// Memory stores facts about blobs; stamps may be lost. *index.Index implements it.
type Memory interface {
	// BlobBytes returns the size of the plain bytes, as recorded in its builds.
	BlobBytes(d cas.Digest) (size int64, needed bool, err error)
	DiskBytes(d cas.Digest) (disk int64, needed bool, err error) // as accounted for
	// Remeasure accounts for the current disk bytes of the whole file.
	Remeasure(d cas.Digest) error

	UnpackedStamps() cas.StampBook // of copies
	RecipeStamps() cas.StampBook   // of recipe files that were verified
}

// Table stores values by the digests of blobs; all of them may be lost. An index.Table implements
// it.
type Table interface {
	Get(d []byte) ([]byte, bool)
	Save(d, value []byte) error
	Drop(d []byte)
	Each(ctx context.Context, fn func(d, value []byte) error) error
}

// memories has the recorded facts about blobs.
type memories struct {
	Memory
	sketches, shares Table
	changed          func(cas.Digest) // called when a blob must be read again; may be nil
}

func (n *memories) Remeasure(d cas.Digest) error {
	if n.changed != nil {
		n.changed(d)
	}
	return n.Memory.Remeasure(d)
}

func (n *memories) dropShare(d cas.Digest) {
	n.shares.Drop(d[:])
	if n.changed != nil {
		n.changed(d)
	}
}

func (n *memories) dropSharing(d cas.Digest) {
	n.sketches.Drop(d[:])
	n.dropShare(d)
}

// Options configure a Store, and have the functions that it calls.
type Options struct {
	Dir    string     // the state directory, absolute
	Whole  *cas.Store // of the state directory
	FS     cas.FS     // nil: the operating system's
	Memory Memory
	Owner  Owner
	Log    *slog.Logger

	Sketches Table // sketches, by which similar blobs are found
	Shares   Table // the Share of each blob
	// called when a blob became whole, or its share was dropped; may be nil
	Changed func(cas.Digest)

	// ReadOnly is for a store that is not written to. Only OpenUnverified, Check and CopyTo may be
	// called, and Copies and Owner are not used.
	ReadOnly bool
}

// Store stores blobs, whole and packed. Make one with Open.
type Store struct {
	reader
	Recipes Recipes
	Sharing *Sharing
	Copies  *Copies

	dir    string
	memory *memories
	owner  Owner
	log    *slog.Logger

	representationLock chan struct{} // has one token: one change at a time
	// transients has done functions of CountTransient, called on unlock. Guarded by
	// representationLock.
	transients []func()
	waiting    atomic.Int32 // callers that wait for representationLock
	account    account
}

// Open reads the recipes, and removes unpacked copies from an earlier boot. Unreadable recipes are
// logged, and listed by Problems.
func Open(o Options) (*Store, error) {
	s := &Store{
		dir: o.Dir, owner: o.Owner, log: o.Log, representationLock: make(chan struct{}, 1),
		account: account{movingBlobs: movingBlobs{counts: make(map[*cas.Hold]bool),
			moving: make(map[cas.Digest]int)}},
		memory: &memories{o.Memory, o.Sketches, o.Shares, o.Changed},
		Copies: &Copies{
			fs: o.FS, dir: filepath.Join(o.Dir, "unpacked"),
			stamps: o.Memory.UnpackedStamps(), log: o.Log,
		},
	}
	var err error
	if s.whole = o.Whole; o.ReadOnly {
		s.recipeStore = dedupe.ReadRecipeStore(s.dir)
	} else if s.recipeStore, err = dedupe.OpenRecipeStore(s.dir, o.FS); err != nil {
		return nil, err
	}
	s.Recipes, s.Sharing = s.recipeStore, &Sharing{s.reader, s.memory, s.owner}
	if o.ReadOnly {
		return s, nil
	}
	for _, p := range s.recipeStore.Problems() {
		s.log.Error("store has a problem", "store", s.dir, "object", p.Path, "newer", p.Newer,
			"unread", p.Unread, "detail", p.Detail)
	}
	if _, err := os.Lstat(s.Copies.dir); errors.Is(err, fs.ErrNotExist) {
		return s, nil // made when a blob is first unpacked
	}
	_, err = s.Copies.open()
	return s, err
}

// Recipes has the reading methods of dedupe.RecipeStore, which documents them.
type Recipes interface {
	Has(d cas.Digest) (dedupe.Packed, bool)
	Get(d cas.Digest) (*dedupe.Recipe, error)
	Walk(ctx context.Context, fn func(cas.Digest, dedupe.Packed) error) error
	Users(base cas.Digest) []cas.Digest
	Complete() bool
	RetryUnread()
	Problems() []dedupe.Problem
}

// ServingStore returns the store with the file of a blob to serve: the whole file, or the copy of a
// packed blob.
func (s *Store) ServingStore(d cas.Digest) (store *cas.Store, unpacked bool, err error) {
	if !s.OnlyPacked(d) {
		return s.whole, false, nil
	}
	store, err = s.Copies.open()
	return store, true, err
}

// LockRepresentation acquires the lock for changes of representations. leave releases it. It fails
// only if the context ends.
func (s *Store) LockRepresentation(ctx context.Context) (leave func(), err error) {
	s.waiting.Add(1)
	defer s.waiting.Add(-1)
	select {
	case s.representationLock <- struct{}{}:
		return func() {
			for _, done := range s.transients {
				done()
			}
			s.transients = nil
			<-s.representationLock
		}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// countTransient counts bytes that the caller, which holds the representation lock, removes before
// it unlocks.
func (s *Store) countTransient(disk int64) {
	s.transients = append(s.transients, s.owner.CountTransient(disk))
}

// LockContended reports whether a caller waits for the lock: background work then releases it.
func (s *Store) LockContended() bool { return s.waiting.Load() > 0 }

// Space has the disk bytes of packed blobs, besides the whole blobs that builds need.
type Space struct {
	Recipes int64
	Bases   int64 // literals and blobs that only recipes need, and blobs in change
	Copies  int64 // unpacked copies on the store's file system
}

func (p *Space) Sum() int64 { return p.Recipes + p.Bases + p.Copies }

// account caches the Space for a short time, because each stored build needs it.
type account struct {
	mu      sync.Mutex // guards the next three fields; never held while the disk is read
	at      time.Time
	last    Space
	changes uint64

	movingBlobs movingBlobs
}

// movingBlobs are blobs that are accounted for by their files on disk, instead of by their builds.
type movingBlobs struct {
	mu sync.Mutex // guards the fields below

	// counts has holds that protect blobs which perhaps no build and no recipe needs any more.
	counts map[*cas.Hold]bool

	// moving counts, by blob, the calls that change its representation, or remove it if it is not
	// needed.
	moving map[cas.Digest]int
}

// holdAccounted returns a hold, and accounts for its blobs while they are held. done releases it.
func (s *Store) holdAccounted() (hold *cas.Hold, done func()) {
	b := &s.account.movingBlobs
	hold = s.whole.Hold()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.counts[hold] = true
	return hold, func() {
		s.Release(hold)
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.counts, hold)
	}
}

// accountByForm accounts for blobs by their files on disk until done, even if a build accounts for
// another representation, or no recipe needs them any more.
func (s *Store) accountByForm(all ...cas.Digest) (done func()) {
	b := &s.account.movingBlobs
	b.add(all, 1)
	return func() { b.add(all, -1) }
}

func (b *movingBlobs) add(all []cas.Digest, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, d := range all {
		if b.moving[d] += n; b.moving[d] == 0 {
			delete(b.moving, d)
		}
	}
}

func (b *movingBlobs) all() (out []cas.Digest) {
	b.mu.Lock()
	defer b.mu.Unlock()
	out = slices.Collect(maps.Keys(b.moving))
	for hold := range b.counts {
		out = append(out, hold.Kept()...)
	}
	return out
}

// AccountExcess returns by how many bytes the builds' account exceeds the files of blobs that are
// being packed or unpacked. It is corrected when the change is durable.
func (s *Store) AccountExcess() (sum int64, err error) {
	counted := make(map[cas.Digest]bool)
	for _, d := range s.account.movingBlobs.all() {
		accounted, needed, err := s.memory.DiskBytes(d)
		if err != nil {
			return 0, err
		}
		if needed && !counted[d] {
			counted[d] = true
			disk, _ := cas.DiskBytesIn(s.dir, d) // 0 for a missing file
			sum += accounted - disk
		}
	}
	return sum, nil
}

// changed invalidates the cached Space.
func (a *account) changed() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.at = time.Time{}
	a.changes++
}

// accountLifetime is how long the cached Space is used.
const accountLifetime = time.Second

// Space returns the sums. It is fast if no blob is packed. Without fresh they may be
// accountLifetime old.
func (s *Store) Space(fresh bool) (Space, error) {
	a := &s.account
	a.mu.Lock()
	at, last, changes := a.at, a.last, a.changes
	a.mu.Unlock()
	if !fresh && !at.IsZero() && time.Since(at) < accountLifetime {
		return last, nil
	}
	now, err := s.sumSpace()
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil && a.changes == changes {
		a.at, a.last = time.Now(), now
	}
	return now, err
}

func (s *Store) sumSpace() (now Space, err error) {
	err = s.recipeStore.Walk(context.Background(), func(_ cas.Digest, p dedupe.Packed) error {
		now.Recipes += p.Disk
		return nil
	})
	if err != nil {
		return now, err
	}
	counted := make(map[cas.Digest]bool)
	// Bases first, because a blob that ceases to be a base in between is then among the moving
	// ones.
	for _, d := range slices.Concat(s.recipeStore.Bases(), s.account.movingBlobs.all()) {
		_, needed, err := s.memory.DiskBytes(d)
		if err != nil {
			return now, err
		}
		if !needed && !counted[d] {
			counted[d] = true
			disk, _ := cas.DiskBytesIn(s.dir, d) // 0 for a missing blob
			now.Bases += disk
		}
	}
	err = s.Copies.Each(context.Background(), func(_ cas.Digest, disk int64) error {
		now.Copies += disk
		return nil
	})
	return now, err
}

// Bytes returns the disk bytes of a blob's whole file, of its recipe without the bases, and of its
// unpacked copy, each 0 if there is none.
func (s *Store) Bytes(d cas.Digest) (whole, recipe, unpacked int64) {
	whole, _ = cas.DiskBytesIn(s.dir, d) // 0 for a missing file
	if p, ok := s.recipeStore.Has(d); ok {
		recipe = p.Disk
	}
	if s.Copies.Store() != nil {
		unpacked, _ = cas.DiskBytesIn(s.Copies.dir, d) // as above
	}
	return whole, recipe, unpacked
}
