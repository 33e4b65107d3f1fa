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

// Unpack makes the unpacked form of a packed blob, unless it is there. Equal calls at the same time
// write it once, and the others wait for that. begins, which may be nil, is called before anything
// is written; progress, which may be nil, a hundred times at most while bytes are. Errors that
// IsMissingOrDamaged knows say that a base or the recipe is no good; those that cas.IsDiskFull
// knows and ErrNoSpace, that there is no space.
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
		return nil // it has become whole meanwhile, and its recipe is gone
	}
	return err
}

// fillCopy writes the unpacked form, which has its place within what may be taken as everything
// else has.
func (s *Store) fillCopy(ctx context.Context, store *cas.Store, d cas.Digest, progress func(done,
	total int64)) error {
	release := func() {}
	defer func() { release() }() // when what was written is in the account
	defer s.account.changed()
	return store.Fill(ctx, d, func(f *os.File) error {
		r, _, _, err := s.recipe(d)
		if err != nil {
			return err
		}
		if err := s.owner.Fits(s.Copies.dir, "the unpacked copy", r.Size, 0); err != nil {
			return fmt.Errorf("%w in %s", err, s.Copies.dir)
		}
		if !s.Copies.otherFileSystem {
			reservation, err := s.owner.Reserve(ctx, cas.RoundUpToBlock(r.Size), 0)
			if err != nil {
				return err
			}
			release = reservation
		}
		return s.rebuildInto(ctx, d, f, throttled(progress))
	})
}

// throttled passes on at most a hundred progress reports.
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

// dropIdleCopies removes every unpacked form that is not in use, and returns the bytes freed,
// because unpacking again costs a copy, but a lack of space a compile.
func (s *Store) dropIdleCopies(ctx context.Context, store *cas.Store) (freed int64) {
	err := store.Walk(ctx, func(d cas.Digest, size, _ int64) error {
		if err := s.DropCopy(d); err != nil {
			return ignore(ErrInUse, err)
		}
		freed += cas.RoundUpToBlock(size)
		return nil
	})
	if err != nil && ctx.Err() == nil {
		s.log.Warn("cannot remove unpacked blobs to free space", "error", err)
	}
	return freed
}

// DropCopy removes the unpacked form of a blob, if any, and all that leads to it. ErrInUse: in use.
func (s *Store) DropCopy(d cas.Digest) error {
	open := s.Copies.Store()
	if open == nil {
		return nil
	}
	if err := s.owner.DropViews(d); err != nil {
		return err
	}
	inHand := false
	// else a view's bytes without a name here would be in no account
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

// rebuildInto rebuilds a packed blob into an empty file. Where the recipe is as it was when it was
// proven, and all bases are as they were when they were verified, it is copied; else what
// comes out is hashed.
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
		// A base may just have been rewritten: then the recipe is another by now.
		if err := f.Truncate(0); err != nil {
			return err
		}
	}
}

// apply opens all bases before it copies: open files stay although their names are removed.
func (s *Store) apply(ctx context.Context, r *dedupe.Recipe, f *os.File, proven bool,
	progress func(done, total int64)) error {
	open := make(map[cas.Digest]*dedupe.File, len(r.Bases))
	defer func() {
		for _, one := range open {
			_ = one.Close() // read-only: nothing can be lost
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

// MakeWhole stores the whole form of a packed blob again, durably, and then removes the recipe.
// Blobs that took from its literals take from the blob. Errors are ErrNoSpace, those that
// cas.IsDiskFull knows, those for which IsMissingOrDamaged is true, and the system's.
func (s *Store) MakeWhole(ctx context.Context, d cas.Digest) error {
	leave, err := s.LockForm(ctx)
	if err != nil {
		return err
	}
	defer leave()
	hold, done := s.holdAccounted()
	defer done()
	return s.makeWhole(ctx, d, hold, nil)
}

// makeWhole is MakeWhole; the hold keeps the whole form. The caller holds formLock.
func (s *Store) makeWhole(ctx context.Context, d cas.Digest, hold *cas.Hold, gate Gate) error {
	was, packed := s.recipeStore.Has(d)
	there, err := hold.Keep(ctx, d)
	if !packed || err != nil {
		return err
	}
	defer s.accountByForm(d)()
	if there { // a crash came before the recipe was removed
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
		return nil // they take from literals that no blob calls its own: Compact tries again
	}
	return err
}

// replaceRecipe stores the whole form of a blob, which the hold keeps, and removes its recipe.
func (s *Store) replaceRecipe(ctx context.Context, d cas.Digest, was dedupe.Packed,
	hold *cas.Hold) error {
	if err := s.owner.Fits(s.dir, "the unpacked form of a file", was.Size, 0); err != nil {
		return err
	}
	release, err := s.owner.Reserve(ctx, cas.RoundUpToBlock(was.Size),
		s.diskBytesOf([]cas.Digest{d}))
	if err != nil {
		return err
	}
	defer release()
	defer s.account.changed() // before the reservation is released: what was written counts by then
	if err := s.putWhole(ctx, d, hold); err != nil {
		return err
	}
	if err := s.memory.Remeasure(d); err != nil {
		return err
	}
	return s.giveUpRecipe(d, was)
}

// putWhole stores what the recipe gives, and has the hold keep it.
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

// reader reads blobs in whichever form they are.
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

// OpenUnverified opens a blob in any form, unverified, so not for serving a client.
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

// assemble returns what a recipe makes of its bases, unverified.
func (s *reader) assemble(r *dedupe.Recipe) (*dedupe.Assembled, error) {
	return dedupe.Assemble(r, func(d cas.Digest) (dedupe.Source, error) {
		f, _, err := s.unverified(d)
		return f, err
	})
}

// unverified opens a whole form. verified reports whether its stamp holds.
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

// Copies are the unpacked forms of blobs.
type Copies struct {
	fs              cas.FS
	dir             string
	otherFileSystem bool
	stamps          cas.StampBook
	log             *slog.Logger

	opened  atomic.Pointer[cas.Store] // nil until something is unpacked
	opening sync.Mutex                // held while it is opened
}

// open opens the store of the unpacked forms, or makes it.
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

// Store returns the store of the unpacked forms, nil while nothing has been unpacked.
func (c *Copies) Store() *cas.Store { return c.opened.Load() }

// Directory is that of the unpacked forms, absolute. apart: on another file system than whole ones.
func (c *Copies) Directory() (path string, apart bool) { return c.dir, c.otherFileSystem }

// Each calls fn for every unpacked form that takes space on the store's own file system, with its
// bytes on disk.
func (c *Copies) Each(ctx context.Context, fn func(d cas.Digest, disk int64) error) error {
	open := c.Store()
	if open == nil || c.otherFileSystem {
		return nil
	}
	return open.Walk(ctx, func(d cas.Digest, _, _ int64) error {
		disk, err := cas.DiskBytesIn(c.dir, d)
		if err != nil {
			return nil //nolint:nilerr // it has just gone
		}
		return fn(d, disk)
	})
}

// Stamp is the stamp of a blob's unpacked form, from memory.
func (c *Copies) Stamp(d cas.Digest) (cas.Stamp, bool) {
	open := c.Store()
	if open == nil {
		return cas.Stamp{}, false
	}
	return open.Stamp(d)
}

// Check drops an unpacked form if its bytes have changed: it is made again when it is needed.
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
		store, _, err := s.ServingStore(d) // it may have become whole meanwhile
		if err == nil {
			f, err = store.Open(ctx, d)
		}
		return err
	})
	return f, err
}

const attempts = 3 // of an operation, where blobs change their forms meanwhile

// inEitherForm calls whole, or packed if a blob is not whole. It retries where either finds
// nothing, because the blob has just changed its form or base, or its copy was removed.
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
		defer from.Close() // only read from
		return dedupe.CopyVerified(ctx, from, d, f, progress)
	}
	return s.inEitherForm(d, whole, func() error { return s.rebuildInto(ctx, d, f, progress) })
}

// Verify is for a blob in whichever form: it looks at stamps, and hashes where they do not hold. Of
// a packed one it reads the recipe and verifies the bases, which does not prove that the one
// goes with the others: Check does.
func (s *Store) Verify(ctx context.Context, d cas.Digest) error {
	return s.inEitherForm(d, func() error { return s.whole.Verify(ctx, d) }, func() error {
		return s.verifyPacked(ctx, d)
	})
}

func (s *Store) verifyPacked(ctx context.Context, d cas.Digest) error {
	r, _, proven, err := s.recipe(d)
	// its literals are in the recipe's file, which has no digest
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

// Check reads every byte of a blob, whatever stamps say; a packed one's as its recipe gives them.
func (s *Store) Check(ctx context.Context, d cas.Digest) error {
	return s.inEitherForm(d, func() error { return s.whole.Check(ctx, d) }, func() error {
		return s.verifyStoredRecipe(ctx, d)
	})
}

// IsDamage reports whether an error is about wrong bytes of a blob, a base or a recipe.
func IsDamage(err error) bool {
	var format *dedupe.FormatError
	return cas.IsUnsound(err) || errors.As(err, &format)
}

// IsMissingOrDamaged reports whether an error is about something that is missing, or is broken, or
// perhaps a base that is.
func IsMissingOrDamaged(err error) bool {
	var base *dedupe.BaseError
	return IsDamage(err) || errors.Is(err, cas.ErrNotFound) || errors.As(err, &base)
}

// Damage is a blob, or a recipe, that is no good.
type Damage struct {
	Digest cas.Digest
	Recipe bool // the recipe of that blob; else its whole form
	Why    string
}

// DamageOf finds out what keeps a blob from being served: its whole form, or if it is packed its
// recipe or its bases, also missing ones. It lists no missing blob that is not packed, and
// does not hash again bytes that were just verified.
func (s *Store) DamageOf(ctx context.Context, d cas.Digest) (out []Damage) {
	err := s.whole.Verify(ctx, d)
	if !errors.Is(err, cas.ErrNotFound) || !s.recipeStore.HasOrRead(d) {
		if cas.IsUnsound(err) {
			out = append(out, Damage{Digest: d, Why: err.Error()})
		}
		return out
	}
	p, _ := s.recipeStore.Has(d) // of one that cannot be read, none
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
	// All bases are sound: what does not come out right is the recipe's doing.
	if err := s.Check(ctx, d); IsMissingOrDamaged(err) {
		out = append(out, Damage{d, true, "the recipe is damaged: " + err.Error()})
	}
	return out
}
