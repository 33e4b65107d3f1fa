// Package packing keeps the blobs of one store in the representation that serves best for what it
// takes on the disk. Four operations change it:
//
//   - Store.Pack replaces the whole form of a blob by a recipe: ranges of other blobs, its bases,
//     and literals, which no other blob has.
//   - Store.Unpack makes a copy of a packed blob for a request. It is not synced, and may vanish at
//     any time.
//   - Store.MakeWhole stores a packed blob whole again.
//   - Store.Compact makes a blob whole that is used, and packs the idle base that it took from,
//     and what else took from that, again, by matching; or it removes a base that no build needs.
//
// A blob is whole or packed; both at once only while its form is changed, or after a crash, and
// then it is served whole. Bases are whole, and stay as long as a recipe needs them; recipes have
// depth one. Literals are stored as a blob of their own, which later recipes take from, or, where
// none does or would and a sample of them gains an eighth, compressed in the recipe's file.
//
// Package cas keeps the whole forms and the copies, package dedupe the recipes. This package knows
// which forms each blob has, and changes them in an order in which one of them serves the blob at
// any time, also after a crash. It knows digests, files, stamps and space, and not what blobs are
// kept for: it asks its Owner before it removes anything, or has a blob take bytes of another one.
// Its Memory has the facts known about blobs.
//
// A Store may be used by any number of goroutines. Operations that change the form of a blob hold
// the form lock, one at a time; opening, verifying and copying blobs never blocks on it. Packed,
// whole and removed forms are reported when they are durable, except for copies.
package packing

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// ErrInUse says that something was left alone because it is in use, or was just now.
var ErrInUse = errors.New("in use")

// ErrNoSpace is in the error of an Owner without budget for a form. The disk may still have space.
var ErrNoSpace = errors.New("no free space")

// Gate blocks before each piece that background work reads, until it may continue; its error ends
// that work. A nil Gate is always open.
type Gate = func(context.Context) error

// Owner knows what blobs are kept for and in use by. Its methods are called with locks held, also
// of a blob, and must not call what changes forms.
type Owner interface {
	// Needed reports whether a blob has to stay for more than recipes, also where that is unknown.
	Needed(d cas.Digest) (bool, error)

	// DropViews removes all else that leads to the bytes of a blob, and keeps them on the disk.
	// After ErrInUse, part of that is in use, and all is left as it was.
	DropViews(d cas.Digest) error

	// BeingServed reports whether a name leads to a blob's bytes since DropViews, or soon.
	BeingServed(d cas.Digest) bool

	// MayTake returns a check, to be used at once, of the blobs that a blob may take bytes from.
	MayTake(d cas.Digest) (func(from cas.Digest) (bool, error), error)

	// Reserve sets space aside for another form, of so many bytes in whole blocks, until release,
	// which may be called more than once. instead is what is removed when it is there, likewise;
	// 0: nothing is, a request waits for it, and other blobs may be removed for it. An error that
	// is ErrNoSpace says that there is no space within the budget; others are the context's or the
	// system's.
	Reserve(ctx context.Context, disk, instead int64) (release func(), err error)

	// CountTransient announces that a smaller form is about to replace bytes on the disk, in whole
	// blocks, until done, so that nothing else is evicted for it.
	CountTransient(disk int64) (done func())

	// Fits returns an error that is syscall.ENOSPC where so many named bytes may not be written to
	// the file system of a directory now. instead is what is removed from there then; 0: nothing
	// is.
	Fits(dir, what string, size, instead int64) error
}

// Memory is what is remembered of blobs beside them; stamps may be lost. *index.Index is one.
type Memory interface {
	// of the plain bytes, as its builds say
	BlobBytes(d cas.Digest) (size int64, needed bool, err error)
	DiskBytes(d cas.Digest) (disk int64, needed bool, err error) // as accounted for
	// accounts for what the whole form takes now
	Remeasure(d cas.Digest) error

	UnpackedStamps() cas.StampBook // of copies
	RecipeStamps() cas.StampBook   // of the files of recipes that were proven to give their blob
}

// Table keeps values by the digests of blobs; all of them may be lost. An index.Table is one.
type Table interface {
	Get(d []byte) ([]byte, bool)
	Save(d, value []byte) error
	Drop(d []byte)
	Each(ctx context.Context, fn func(d, value []byte) error) error
}

// memories are what is remembered of blobs.
type memories struct {
	Memory
	sketches, shares Table
	changed          func(cas.Digest) // may be nil: what a blob shares has to be found again
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

// Options say where a Store keeps its data, and which functions it calls.
type Options struct {
	Dir    string     // the state directory, absolute
	Copies string     // the directory of the unpacked forms, absolute
	Apart  bool       // that is on another file system than the state directory
	Whole  *cas.Store // of the state directory
	FS     cas.FS     // nil: the operating system's
	Memory Memory
	Owner  Owner
	Log    *slog.Logger

	Sketches Table            // by which blobs with equal parts are found
	Shares   Table            // what each blob was found to share
	Changed  func(cas.Digest) // may be nil: the blob is whole again, or its share was dropped

	// ReadOnly is for a store that is only read: OpenUnverified, Check and CopyTo are all that may
	// be called. Copies and Owner are not used.
	ReadOnly bool
}

// Store keeps blobs in their forms. Make one with Open.
type Store struct {
	reader
	Recipes Recipes
	Sharing *Sharing
	Copies  *Copies

	dir    string
	memory *memories
	owner  Owner
	log    *slog.Logger

	formLock chan struct{} // one token: the form of one blob is changed at a time
	// CountTransient's done, called on unlock; guarded by formLock
	transients []func()
	waiting    atomic.Int32 // callers that wait for formLock
	account    account
}

// Open reads the recipes, and removes unpacked forms of an earlier boot. Recipes that cannot be
// read are in the log, and in Problems.
func Open(o Options) (*Store, error) {
	s := &Store{
		dir: o.Dir, owner: o.Owner, log: o.Log, formLock: make(chan struct{}, 1),
		account: account{movingBlobs: movingBlobs{counts: make(map[*cas.Hold]bool),
			moving: make(map[cas.Digest]int)}},
		memory: &memories{o.Memory, o.Sketches, o.Shares, o.Changed},
		Copies: &Copies{
			fs: o.FS, dir: o.Copies, otherFileSystem: o.Apart,
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
	if _, err := os.Lstat(o.Copies); errors.Is(err, fs.ErrNotExist) {
		return s, nil // made when something is unpacked
	}
	_, err = s.Copies.open()
	return s, err
}

// Recipes is the part of dedupe.RecipeStore that reads; its methods are documented there.
type Recipes interface {
	Has(d cas.Digest) (dedupe.Packed, bool)
	Get(d cas.Digest) (*dedupe.Recipe, error)
	Walk(ctx context.Context, fn func(cas.Digest, dedupe.Packed) error) error
	Users(base cas.Digest) []cas.Digest
	Complete() bool
	RetryUnread()
	Problems() []dedupe.Problem
}

// ServingStore returns the store that has the form of a blob that is served: the whole one, or a
// copy where there is but a recipe.
func (s *Store) ServingStore(d cas.Digest) (store *cas.Store, unpacked bool, err error) {
	if !s.OnlyPacked(d) {
		return s.whole, false, nil
	}
	store, err = s.Copies.open()
	return store, true, err
}

// LockForm acquires the lock for changes of forms; leave releases it. The error is the context's.
func (s *Store) LockForm(ctx context.Context) (leave func(), err error) {
	s.waiting.Add(1)
	defer s.waiting.Add(-1)
	select {
	case s.formLock <- struct{}{}:
		return func() {
			for _, done := range s.transients {
				done()
			}
			s.transients = nil
			<-s.formLock
		}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// countTransient counts bytes that are removed before the caller releases the lock that it holds.
func (s *Store) countTransient(disk int64) {
	s.transients = append(s.transients, s.owner.CountTransient(disk))
}

// FormLockContended reports whether a caller waits for the lock: background work then releases it.
func (s *Store) FormLockContended() bool { return s.waiting.Load() > 0 }

// ignore returns nil for an error of the kind, and any other one as it is.
func ignore(kind, err error) error {
	if errors.Is(err, kind) {
		return nil
	}
	return err
}

// Space is what packed blobs take besides the whole ones that are needed, in bytes on disk.
type Space struct {
	Recipes int64
	Bases   int64 // literals and blobs that only recipes need, and blobs in change
	Copies  int64 // unpacked forms, where they lie on the store's file system
}

// Sum is all of it.
func (p *Space) Sum() int64 { return p.Recipes + p.Bases + p.Copies }

// account remembers it for a moment: it is asked for with each build that is stored.
type account struct {
	mu   sync.Mutex
	at   time.Time // guarded by mu
	last Space     // guarded by mu

	movingBlobs movingBlobs
}

// movingBlobs are blobs that are accounted for by what they take, whatever else says so.
type movingBlobs struct {
	mu sync.Mutex // guards the rest

	// counts keep blobs, though no build and no recipe may need these any more.
	counts map[*cas.Hold]bool

	// moving counts calls that give a blob another form, or remove it if it is not needed.
	moving map[cas.Digest]int
}

// holdAccounted is cas.Store.Hold of blobs that are accounted for as long as they are held. done is
// Release, and the end of that.
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

// accountByForm accounts for blobs by their form on disk until done, even if a build accounts
// for another form, or no recipe takes from them any more.
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

// AccountExcess is by how many bytes on disk the builds' account exceeds blobs that change their
// form: it is corrected when that is durable.
func (s *Store) AccountExcess() (sum int64, err error) {
	counted := make(map[cas.Digest]bool)
	for _, d := range s.account.movingBlobs.all() {
		accounted, needed, err := s.memory.DiskBytes(d)
		if err != nil {
			return 0, err
		}
		if needed && !counted[d] {
			counted[d] = true
			disk, _ := cas.DiskBytesIn(s.dir, d) // of one that is not there, none
			sum += accounted - disk
		}
	}
	return sum, nil
}

// changed says that what is remembered does not hold any more.
func (a *account) changed() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.at = time.Time{}
}

// accountLifetime is how long it is believed.
const accountLifetime = time.Second

// Space sums up. Where nothing is packed that costs nothing. Without fresh it may be what it was a
// second ago.
func (s *Store) Space(fresh bool) (Space, error) {
	a := &s.account
	a.mu.Lock()
	defer a.mu.Unlock()
	if !fresh && !a.at.IsZero() && time.Since(a.at) < accountLifetime {
		return a.last, nil
	}
	var now Space
	err := s.recipeStore.Walk(context.Background(), func(_ cas.Digest, p dedupe.Packed) error {
		now.Recipes += p.Disk
		return nil
	})
	if err != nil {
		return now, err
	}
	counted := make(map[cas.Digest]bool)
	// in this order: what is no base any more is going by then
	for _, d := range slices.Concat(s.recipeStore.Bases(), a.movingBlobs.all()) {
		_, needed, err := s.memory.DiskBytes(d)
		if err != nil {
			return now, err
		}
		if !needed && !counted[d] {
			counted[d] = true
			disk, _ := cas.DiskBytesIn(s.dir, d) // of one that is missing, none
			now.Bases += disk
		}
	}
	err = s.Copies.Each(context.Background(), func(_ cas.Digest, disk int64) error {
		now.Copies += disk
		return nil
	})
	if err == nil {
		a.at, a.last = time.Now(), now
	}
	return now, err
}

// Bytes returns the bytes on disk of each form of a blob, 0 for one that it does not have: whole,
// the recipe without its bases, unpacked.
func (s *Store) Bytes(d cas.Digest) (whole, recipe, unpacked int64) {
	whole, _ = cas.DiskBytesIn(s.dir, d) // of one that is not there, none
	if p, ok := s.recipeStore.Has(d); ok {
		recipe = p.Disk
	}
	if s.Copies.Store() != nil {
		unpacked, _ = cas.DiskBytesIn(s.Copies.dir, d) // likewise
	}
	return whole, recipe, unpacked
}
