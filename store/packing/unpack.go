package packing

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Unpack makes the unpacked copy of a packed blob, unless it exists. Concurrent calls write it
// once. begins, which may be nil, is called before the first byte is written, and progress, which
// may be nil, at most a hundred times. If a base or the recipe is damaged, IsMissingOrDamaged is
// true for the error. If there is no space, it wraps ErrNoSpace, or cas.IsDiskFull is true for it.
func (s *Store) Unpack(ctx context.Context, d cas.Digest, begins func(),
	progress func(done, total int64)) error {
	store, err := s.Copies.open()
	if err != nil {
		return err
	}
	if err := store.Verify(ctx, d); err == nil {
		return nil
	} else if !IsMissingOrDamaged(err) {
		return err
	}
	if begins != nil {
		begins()
	}
	err = s.fillCopy(ctx, store, d, progress)
	if (cas.IsDiskFull(err) || errors.Is(err, ErrNoSpace)) && s.dropIdleCopies(ctx, store) > 0 {
		err = s.fillCopy(ctx, store, d, progress)
	}
	if errors.Is(err, cas.ErrNotFound) && s.whole.Has(d) {
		return nil // it has become whole in the meantime
	}
	return err
}

// fillCopy reserves space for the unpacked copy and writes it.
func (s *Store) fillCopy(ctx context.Context, store *cas.Store, d cas.Digest, progress func(done,
	total int64)) error {
	release := func() {}
	defer func() { release() }() // when the account has the written bytes
	defer s.account.changed()
	return store.Fill(ctx, d, func(f *os.File) error {
		r, _, _, err := s.recipe(d)
		if err != nil {
			return err
		}
		if err := s.owner.Fits(s.Copies.dir, "the unpacked copy", r.Size, 0); err != nil {
			return fmt.Errorf("%w in %s", err, s.Copies.dir)
		}
		reservation, err := s.owner.Reserve(ctx, cas.RoundUpToBlock(r.Size), 0)
		if err != nil {
			return err
		}
		release = reservation
		return s.rebuildInto(ctx, d, f, throttled(progress))
	})
}

// throttled returns a function that passes at most a hundred reports to progress.
func throttled(progress func(done, total int64)) func(done, total int64) {
	if progress == nil {
		return nil
	}
	reported := int64(0)
	return func(done, total int64) {
		if done == total || done-reported >= total/100 {
			reported = done
			progress(done, total)
		}
	}
}

// dropIdleCopies removes all unpacked copies that are not in use, and returns the bytes freed.
// Unpacking them again costs less than a compile for lack of space.
func (s *Store) dropIdleCopies(ctx context.Context, store *cas.Store) (freed int64) {
	err := store.Walk(ctx, func(d cas.Digest, size, _ int64) error {
		if err := s.DropCopy(d); err != nil {
			return cas.Ignore(ErrInUse, err)
		}
		freed += cas.RoundUpToBlock(size)
		return nil
	})
	if err != nil && ctx.Err() == nil {
		s.log.Warn("cannot remove unpacked blobs to free space", "error", err)
	}
	return freed
}

// DropCopy removes the unpacked copy of a blob, if any, and the views with it. It fails with
// ErrInUse if it is in use.
func (s *Store) DropCopy(d cas.Digest) error {
	open := s.Copies.Store()
	if open == nil {
		return nil
	}
	if err := s.owner.DropViews(d); err != nil {
		return err
	}
	inHand := false
	// Otherwise no account would have the bytes that only a view keeps.
	_, err := open.RemoveUnless(d, func() (bool, error) {
		inHand = s.owner.BeingServed(d)
		return inHand, nil
	})
	s.account.changed()
	if inHand {
		return ErrInUse
	}
	return err
}

// rebuildInto assembles a packed blob in an empty file. If the recipe and all bases are unchanged
// since they were verified, it only copies; otherwise it verifies the result.
func (s *Store) rebuildInto(ctx context.Context, d cas.Digest, f *os.File,
	progress func(done, total int64)) error {
	for attempt := 1; ; attempt++ {
		r, stamp, proven, err := s.recipe(d)
		if err != nil {
			return err
		}
		err = s.apply(ctx, r, f, proven, progress)
		if err == nil && !proven {
			s.markVerified(d, stamp)
		}
		if !errors.Is(err, cas.ErrNotFound) || attempt == attempts {
			return err
		}
		// Retry, because a base was perhaps replaced, and the recipe with it.
		if err := f.Truncate(0); err != nil {
			return err
		}
	}
}

// apply assembles the recipe's blob in f. It opens all bases first, so that it can read them even
// if they are removed.
func (s *Store) apply(ctx context.Context, r *dedupe.Recipe, f *os.File, proven bool,
	progress func(done, total int64)) error {
	open := make(map[cas.Digest]*dedupe.File, len(r.Bases))
	defer func() {
		for _, one := range open {
			_ = one.Close() // opened for reading, so no data can be lost
		}
	}()
	for _, one := range r.Bases {
		base, verified, err := s.unverified(one.Digest)
		if err != nil {
			return &dedupe.BaseError{Digest: one.Digest, Err: err}
		}
		open[one.Digest] = base
		proven = proven && verified
	}
	take := func(d cas.Digest) (dedupe.Source, error) {
		base := open[d]
		delete(open, d) // closed by dedupe.Apply
		return base, nil
	}
	return dedupe.Apply(ctx, r, take, f, dedupe.ApplyOptions{Trusted: proven, Progress: progress})
}

// MakeWhole stores a packed blob whole again, durably, and then removes the recipe. The blob
// replaces its literals as a base. Errors are as for Unpack.
func (s *Store) MakeWhole(ctx context.Context, d cas.Digest) error {
	leave, err := s.LockRepresentation(ctx)
	if err != nil {
		return err
	}
	defer leave()
	hold, done := s.holdAccounted()
	defer done()
	return s.makeWhole(ctx, d, hold, nil)
}

// makeWhole is MakeWhole for a caller that holds representationLock. hold protects the blob from
// removal.
func (s *Store) makeWhole(ctx context.Context, d cas.Digest, hold *cas.Hold, gate Gate) error {
	was, packed := s.recipeStore.Has(d)
	there, err := hold.Keep(ctx, d)
	if !packed || err != nil {
		return err
	}
	defer s.accountByForm(d)()
	if there { // a crash prevented the removal of the recipe
		err = s.removeRecipeOfWhole(ctx, d)
	} else {
		err = s.replaceRecipe(ctx, d, was, hold)
	}
	if err != nil || was.Literals == dedupe.NoLiterals {
		return err
	}
	literals := was.Bases[was.Literals].Digest
	err = s.repack(ctx, literals, search{include: []cas.Digest{d}, gate: gate})
	if IsMissingOrDamaged(err) || errors.Is(retryLater(err), ErrInUse) {
		return nil // their base are literals of no existing blob; Compact retries
	}
	return err
}

// replaceRecipe stores the whole file of a blob, which hold protects, and removes its recipe.
func (s *Store) replaceRecipe(ctx context.Context, d cas.Digest, was dedupe.Packed,
	hold *cas.Hold) error {
	if err := s.owner.Fits(s.dir, "the unpacked file", was.Size, 0); err != nil {
		return err
	}
	release, err := s.owner.Reserve(ctx, cas.RoundUpToBlock(was.Size),
		s.diskBytesOf([]cas.Digest{d}))
	if err != nil {
		return err
	}
	defer release()
	// before the reservation is released, so that the written bytes are counted already
	defer s.account.changed()
	if err := s.putWhole(ctx, d, hold); err != nil {
		return err
	}
	if err := s.memory.Remeasure(d); err != nil {
		return err
	}
	return s.giveUpRecipe(d, was)
}

// putWhole stores the blob that the recipe restores, protected by hold.
func (s *Store) putWhole(ctx context.Context, d cas.Digest, hold *cas.Hold) error {
	r, err := s.recipeStore.Get(d)
	if err != nil {
		return err
	}
	a, err := s.assemble(r)
	if err != nil {
		return err
	}
	got, _, err := hold.Put(ctx, io.NewSectionReader(a, 0, a.Size()))
	if err = errors.Join(err, a.Close()); err != nil {
		return fmt.Errorf("blob %s: %w", d, err)
	}
	if got != d {
		s.Release(hold)
		return &cas.CorruptError{Digest: d, Got: got}
	}
	return nil
}

// reader reads blobs, whole or packed.
type reader struct {
	whole       *cas.Store
	recipeStore *dedupe.RecipeStore
}

// OnlyPacked reports whether a blob is not whole, and has a recipe.
func (s *reader) OnlyPacked(d cas.Digest) bool {
	return s.recipeStore.HasOrRead(d) && !s.whole.Has(d)
}

// Size returns the plain bytes of a blob, whole or packed. Errors are cas.ErrNotFound and the
// system's.
func (s *reader) Size(d cas.Digest) (int64, error) {
	size, err := s.whole.Size(d)
	if !errors.Is(err, cas.ErrNotFound) || !s.recipeStore.HasOrRead(d) {
		return size, err
	}
	if p, known := s.recipeStore.Has(d); known {
		return p.Size, nil
	}
	r, err := s.recipeStore.Get(d)
	if err != nil {
		return 0, err
	}
	return r.Size, nil
}

// Source is a blob that can be read.
type Source interface {
	dedupe.Source
	io.Closer
}

// OpenUnverified opens a blob, whole or packed. Its bytes are not verified, so do not serve them to
// clients.
func (s *reader) OpenUnverified(d cas.Digest) (Source, error) {
	if !s.OnlyPacked(d) {
		f, _, err := s.unverified(d)
		return f, err
	}
	r, err := s.recipeStore.Get(d)
	if err != nil {
		return nil, err
	}
	return s.assemble(r)
}

// assemble returns the blob that a recipe restores from its bases, unverified.
func (s *reader) assemble(r *dedupe.Recipe) (*dedupe.Assembled, error) {
	return dedupe.Assemble(r, func(d cas.Digest) (dedupe.Source, error) {
		f, _, err := s.unverified(d)
		return f, err
	})
}

// unverified opens a whole file. verified reports whether its stamp is unchanged.
func (s *reader) unverified(d cas.Digest) (src *dedupe.File, verified bool, err error) {
	f, verified, err := s.whole.OpenUnverified(d)
	if err != nil {
		return nil, false, err
	}
	src, err = dedupe.NewFile(f)
	return src, verified, err
}

func (s *reader) openWhole(ctx context.Context, d cas.Digest) (*dedupe.File, error) {
	f, err := s.whole.Open(ctx, d)
	if err != nil {
		return nil, err
	}
	return dedupe.NewFile(f)
}

// Copies has the unpacked copies of blobs.
type Copies struct {
	fs     cas.FS
	dir    string // absolute
	stamps cas.StampBook
	log    *slog.Logger

	opened  atomic.Pointer[cas.Store] // nil until a blob is unpacked
	opening sync.Mutex                // held while it is opened
}

// open opens the store of unpacked copies, or makes it.
func (c *Copies) open() (*cas.Store, error) {
	if open := c.Store(); open != nil {
		return open, nil
	}
	c.opening.Lock()
	defer c.opening.Unlock()
	if open := c.Store(); open != nil {
		return open, nil
	}
	open, err := cas.Open(c.dir, cas.Options{FS: c.fs, Stamps: c.stamps, Volatile: true})
	if err != nil {
		return nil, err
	}
	c.opened.Store(open)
	return open, nil
}

// Store returns the store of unpacked copies, nil while no blob has been unpacked.
func (c *Copies) Store() *cas.Store { return c.opened.Load() }

// Each calls fn for every unpacked copy, with its bytes on disk.
func (c *Copies) Each(ctx context.Context, fn func(d cas.Digest, disk int64) error) error {
	open := c.Store()
	if open == nil {
		return nil
	}
	return open.Walk(ctx, func(d cas.Digest, _, _ int64) error {
		disk, err := cas.DiskBytesIn(c.dir, d)
		if err != nil {
			return nil //nolint:nilerr // it was just removed
		}
		return fn(d, disk)
	})
}

// Stamp returns the recorded stamp of a blob's unpacked copy.
func (c *Copies) Stamp(d cas.Digest) (cas.Stamp, bool) {
	open := c.Store()
	if open == nil {
		return cas.Stamp{}, false
	}
	return open.Stamp(d)
}

// Check drops an unpacked copy if its bytes have changed. It is made again when it is needed.
func (c *Copies) Check(ctx context.Context, d cas.Digest) {
	open := c.Store()
	if open == nil || !open.Has(d) {
		return
	}
	if err := open.Check(ctx, d); IsDamage(err) {
		c.log.Warn("unpacked blob dropped", "digest", d.String(), "why", err)
		if err := open.Remove(d); err != nil && !errors.Is(err, cas.ErrNotFound) {
			c.log.Error("cannot drop an unpacked blob", "digest", d.String(), "error", err)
		}
	}
}

// Open returns a descriptor of a verified blob, unpacked if need be, which the caller closes.
// Errors are cas.ErrNotFound, those for which IsMissingOrDamaged is true, and the system's.
func (s *Store) Open(ctx context.Context, d cas.Digest) (f *os.File, err error) {
	whole := func() error {
		f, err = s.whole.Open(ctx, d)
		return err
	}
	err = s.inEitherForm(d, whole, func() error {
		if err := s.Unpack(ctx, d, nil, nil); err != nil {
			return err
		}
		store, _, err := s.ServingStore(d) // it may have become whole in the meantime
		if err == nil {
			f, err = store.Open(ctx, d)
		}
		return err
	})
	return f, err
}

const attempts = 3 // of an operation on a blob that is being packed or unpacked

// inEitherForm calls whole, or packed if a blob is not whole. It retries if a file is missing,
// because the blob may have been packed or unpacked, or its copy removed, in the meantime.
func (s *Store) inEitherForm(d cas.Digest, whole, packed func() error) error {
	for attempt := 1; ; attempt++ {
		err := whole()
		if !errors.Is(err, cas.ErrNotFound) {
			return err
		}
		if s.recipeStore.HasOrRead(d) {
			err = packed()
		} else if !s.whole.Has(d) {
			return err
		}
		if !errors.Is(err, cas.ErrNotFound) || attempt == attempts {
			return err
		}
	}
}

// CopyTo writes a blob, whole or packed, into an empty file, and verifies it on the way. Errors are
// those of Open, and of writing.
func (s *Store) CopyTo(ctx context.Context, d cas.Digest, f *os.File, progress func(done,
	total int64)) error {
	whole := func() error {
		from, _, err := s.unverified(d)
		if err != nil {
			return err
		}
		defer from.Close() // opened for reading
		return dedupe.CopyVerified(ctx, from, d, f, progress)
	}
	return s.inEitherForm(d, whole, func() error { return s.rebuildInto(ctx, d, f, progress) })
}

// Verify verifies a blob by stamps, and hashes files whose stamps have changed. For a packed blob
// it reads the recipe and verifies the bases, but not that they restore the blob, as Check does.
func (s *Store) Verify(ctx context.Context, d cas.Digest) error {
	return s.inEitherForm(d, func() error { return s.whole.Verify(ctx, d) }, func() error {
		return s.verifyPacked(ctx, d)
	})
}

func (s *Store) verifyPacked(ctx context.Context, d cas.Digest) error {
	r, _, proven, err := s.recipe(d)
	// Literals in the recipe's file, of an earlier version, have no digest of their own.
	if err == nil && r.Frames != nil && !proven {
		err = s.verifyStoredRecipe(ctx, d)
	}
	if err != nil {
		return err
	}
	for _, base := range r.Bases {
		if err := s.whole.Verify(ctx, base.Digest); err != nil {
			return &dedupe.BaseError{Digest: base.Digest, Err: err}
		}
	}
	return nil
}

// Check verifies every byte of a blob without relying on stamps. It assembles a packed blob.
func (s *Store) Check(ctx context.Context, d cas.Digest) error {
	return s.inEitherForm(d, func() error { return s.whole.Check(ctx, d) }, func() error {
		return s.verifyStoredRecipe(ctx, d)
	})
}

// IsDamage reports whether an error is about wrong bytes of a blob, a base or a recipe.
func IsDamage(err error) bool {
	return cas.IsUnsound(err) || errors.As(err, new(*dedupe.FormatError))
}

// IsMissingOrDamaged reports whether an error is about a missing or damaged blob, base or recipe.
func IsMissingOrDamaged(err error) bool {
	return IsDamage(err) || errors.Is(err, cas.ErrNotFound) ||
		errors.As(err, new(*dedupe.BaseError))
}

// Damage is a damaged or missing blob or recipe.
type Damage struct {
	Digest cas.Digest
	Recipe bool // the recipe of that blob; otherwise its whole file
	Why    string
}

// DamageOf lists the damage that prevents serving a blob: in its whole file or, if it is packed, in
// its recipe or bases, with missing bases. It does not list a missing blob that is not packed. It
// does not hash bytes again that were just verified.
func (s *Store) DamageOf(ctx context.Context, d cas.Digest) (out []Damage) {
	err := s.whole.Verify(ctx, d)
	if !errors.Is(err, cas.ErrNotFound) || !s.recipeStore.HasOrRead(d) {
		if cas.IsUnsound(err) {
			out = append(out, Damage{Digest: d, Why: err.Error()})
		}
		return out
	}
	p, _ := s.recipeStore.Has(d) // zero for an unreadable one
	for _, base := range p.Bases {
		err := s.whole.Verify(ctx, base.Digest)
		if size, _ := s.whole.Size(base.Digest); err == nil && size != base.Size {
			out = append(out, Damage{d, true, fmt.Sprintf("the recipe expects base %s to have "+
				"%d bytes, and it has %d", base.Digest, base.Size, size)})
		}
		if IsMissingOrDamaged(err) {
			out = append(out, Damage{Digest: base.Digest, Why: "a base blob is damaged: " +
				"" + err.Error()})
		}
	}
	if len(out) > 0 {
		return out
	}
	// All bases are intact, so a wrong result is the recipe's fault.
	if err := s.Check(ctx, d); IsMissingOrDamaged(err) {
		out = append(out, Damage{d, true, "the recipe is damaged: " + err.Error()})
	}
	return out
}
