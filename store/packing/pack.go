package packing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"syscall"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Gain says how many bytes on disk a recipe has to save, because unpacking costs a copy.
type Gain int8

const (
	Worth  Gain = iota // an eighth of the blob and 64 KiB: for blobs that may be needed again soon
	Little             // 64 KiB: for blobs that an administrator wants packed
)

// minimum returns how many bytes the recipe of a blob of this size has to save.
func (g Gain) minimum(size int64) int64 {
	if g == Little {
		return minSaving
	}
	return max(minSaving, size/minSavingPart)
}

const (
	minSaving     = 64 << 10
	minSavingPart = 8 // an eighth
)

// errSavesTooLittle says that a recipe would save less than its Gain.
var errSavesTooLittle = errors.New("packing saves too little")

// Pack replaces the whole file of a blob by a recipe, if that saves at least least, and returns how
// many bytes on disk that freed, 0 for a blob that is packed or not worth it. It fails with
// ErrInUse if the blob is in use. It reads the blob and its bases a few times. ctx and gate can
// stop it between two steps, after which the blob can still be served. The whole file is removed
// last, when the literals and the recipe are durable and the recipe was verified to restore the
// blob.
//
// If the blob is a base, its dependents are packed again before, mostly with the literals of the
// new recipe as their base. A crash in between may leave a blob that is whole and has a recipe,
// which the next start removes.
func (s *Store) Pack(ctx context.Context, d cas.Digest, least Gain, gate Gate) (freed int64,
	err error) {
	leave, err := s.LockRepresentation(ctx)
	if err != nil {
		return 0, err
	}
	defer leave()
	size, err := s.whole.Size(d)
	if err != nil {
		return 0, cas.Ignore(cas.ErrNotFound, err) // packed already
	}
	if len(s.recipeStore.Users(d)) > 0 && s.Sharing.Saving(d) < least.minimum(size) {
		return 0, nil // avoids reading most bases again
	}
	freed, err = s.pack(ctx, d, least, nil, gate)
	if errors.Is(err, errSavesTooLittle) {
		err = nil
	}
	return freed, err
}

// pack is Pack, but fails with errSavesTooLittle for a blob that is not worth it. The caller holds
// representationLock. It compares the blobs in also with it, besides those with similar sketches.
func (s *Store) pack(ctx context.Context, d cas.Digest, least Gain, also []cas.Digest,
	gate Gate) (freed int64, err error) {
	if err := s.removeRecipeOfWhole(ctx, d); err != nil {
		return 0, err
	}
	defer s.accountByForm(d)()
	hold, done := s.holdAccounted()
	defer done()
	users := s.recipeStore.Users(d)
	before := s.diskBytesOf(append(users, d))
	how := search{minGain: least, include: also, dependents: users, gate: gate}
	if err = s.makeRecipe(ctx, d, how, hold); err == nil {
		err = s.repack(ctx, d, search{minGain: least, gate: gate})
	}
	removed := false
	if err == nil {
		removed, err = s.removeWhole(d)
	}
	if !removed { // after an error the removal may not be durable, so the recipe is kept
		return 0, errors.Join(err, s.removeRecipeOfWhole(context.WithoutCancel(ctx), d))
	}
	freed = before - s.diskBytesOf(append(users, d))
	s.log.Info("blob packed", "digest", d.String(), "users", len(users), "freed", freed)
	return freed, nil
}

// diskBytesOf sums blobs' bytes on disk: whole files, recipes, and the literals of these.
func (s *Store) diskBytesOf(all []cas.Digest) (sum int64) {
	for _, d := range all {
		whole, recipe, _ := s.Bytes(d)
		sum += whole + recipe
		if p, ok := s.recipeStore.Has(d); ok && p.Literals != dedupe.NoLiterals {
			own, _ := cas.DiskBytesIn(s.dir, p.Bases[p.Literals].Digest)
			sum += own // 0 for a removed blob
		}
	}
	return sum
}

// repack packs the dependents of a base again, by matching, with other bases: those of the base's
// own recipe, those that the search names, or any other. A blob that would save too little becomes
// whole. The caller holds representationLock.
func (s *Store) repack(ctx context.Context, base cas.Digest, how search) error {
	if p, packed := s.recipeStore.Has(base); packed {
		how.include = append(how.include, digestsOf(p.Bases)...)
	}
	how.exclude = []cas.Digest{base}
	for _, d := range s.dependents(base) {
		was, packed := s.recipeStore.Has(d)
		if !packed || !slices.Contains(s.recipeStore.Users(base), d) {
			continue // it was removed, or was packed again with another base
		}
		if err := s.repackWithout(ctx, d, was, how); err != nil {
			return err
		}
	}
	return nil
}

// dependents lists the blobs with recipes that use a base, the one that takes the most bytes first,
// because it may become the base of the others.
func (s *Store) dependents(base cas.Digest) []cas.Digest {
	taken := func(d cas.Digest) int64 {
		p, _ := s.recipeStore.Has(d) // zero if it was just removed
		if at := slices.Index(digestsOf(p.Bases), base); at >= 0 {
			return p.Taken[at]
		}
		return 0
	}
	all := s.recipeStore.Users(base)
	slices.SortStableFunc(all, func(a, b cas.Digest) int { return cmp.Compare(taken(b), taken(a)) })
	return all
}

func (s *Store) repackWithout(ctx context.Context, d cas.Digest, was dedupe.Packed,
	how search) error {
	hold, done := s.holdAccounted()
	defer done()
	how.include, how.exclude = slices.Clone(how.include), slices.Clone(how.exclude)
	for i, one := range was.Bases {
		if i == was.Literals && len(s.recipeStore.Users(one.Digest)) == 1 {
			// not as bases, because they are written again
			how.exclude = append(how.exclude, one.Digest)
		} else {
			how.include = append(how.include, one.Digest)
		}
	}
	err := errSavesTooLittle
	if !s.whole.Has(d) {
		err = s.makeRecipe(ctx, d, how, hold)
	}
	if errors.Is(err, errSavesTooLittle) {
		err = s.makeWhole(ctx, d, hold, how.gate)
	}
	return err
}

// makeRecipe finds the bytes that a blob shares with others, and durably stores a recipe, which
// replaces an existing one. It fails with errSavesTooLittle if that saves too few bytes. hold
// protects the bases from removal. The caller holds representationLock.
func (s *Store) makeRecipe(ctx context.Context, d cas.Digest, how search, hold *cas.Hold) error {
	found, err := s.Sharing.match(ctx, d, how)
	if err != nil {
		return err
	}
	if found == nil {
		return errSavesTooLittle
	}
	defer found.Close()
	if !found.isWorth(how.minGain) {
		return errSavesTooLittle
	}
	for _, one := range found.digests() {
		if there, err := hold.Keep(ctx, one); err != nil {
			return err
		} else if !there {
			return errSavesTooLittle // it was removed in the meantime
		}
	}
	now := s.diskBytesOf([]cas.Digest{d})
	s.countTransient(now)
	needs := cas.RoundUpToBlock(found.Plan.LiteralSize()) + cas.RoundUpToBlock(found.recipeBytes())
	release, err := s.owner.Reserve(ctx, needs, now)
	if err != nil {
		return err
	}
	defer release()
	// before the reservation is released, so that the written bytes are counted already
	defer s.account.changed()
	r, err := s.recipeOfPlan(ctx, d, found, how.gate, hold)
	if err != nil {
		return err
	}
	err = s.putRecipe(ctx, r)
	var other *cas.CorruptError
	if errors.As(err, &other) && other.Digest == d && !s.anyDamaged(ctx, r) {
		// The blob stays unchanged, and is recorded as not worth packing.
		s.log.Error("not packed: the recipe does not restore the file; please report this",
			"digest", d.String(), "error", err)
		return errors.Join(errSavesTooLittle, s.Sharing.saveShare(d, Share{}))
	}
	return err
}

// anyDamaged verifies a blob and the bases of its recipe.
func (s *Store) anyDamaged(ctx context.Context, r *dedupe.Recipe) bool {
	if s.whole.Check(ctx, r.Blob) != nil {
		return true
	}
	return slices.ContainsFunc(digestsOf(r.Bases), func(one cas.Digest) bool {
		return s.whole.Check(ctx, one) != nil
	})
}

// recipeOfPlan returns the recipe of a plan, after storing its literals as a separate blob, which
// can be a base of others.
func (s *Store) recipeOfPlan(ctx context.Context, d cas.Digest, m *Matched, gate Gate,
	hold *cas.Hold) (*dedupe.Recipe, error) {
	size := m.Plan.LiteralSize()
	if size == 0 {
		return m.Plan.Recipe(d, cas.Digest{})
	}
	if err := s.owner.Fits(s.dir, "the file's own bytes", size, m.Plan.Size); err != nil {
		return nil, err
	}
	own, _, err := hold.Put(ctx, io.NewSectionReader(m.Plan.Literals(m.target), 0, size))
	if err == nil {
		// because later recipes may use the literals as a base
		err = s.Sharing.addSketch(ctx, own, gate)
	}
	if err != nil {
		return nil, err
	}
	return m.Plan.Recipe(d, own)
}

// removeWhole removes the whole file of a blob that has a verified recipe.
func (s *Store) removeWhole(d cas.Digest) (removed bool, err error) {
	if err := s.owner.DropViews(d); err != nil {
		return false, err
	}
	removed, err = s.whole.RemoveUnless(d, func() (bool, error) {
		if !s.recipeStore.Complete() {
			return true, nil // an unreadable recipe may have it as a base
		}
		p, ok := s.recipeStore.Has(d)
		if !ok || len(s.recipeStore.Users(d)) > 0 || s.owner.BeingServed(d) {
			return true, nil // it has become a base, or a request is being served with it
		}
		for _, base := range p.Bases {
			if !s.whole.Has(base.Digest) {
				return true, &dedupe.BaseError{Digest: base.Digest, Err: cas.ErrNotFound}
			}
		}
		return false, nil
	})
	if !removed || err != nil {
		return false, err
	}
	s.account.changed()
	s.memory.dropShare(d)
	if err := s.memory.Remeasure(d); err != nil {
		s.log.Warn("cannot account for the space of a packed "+
			"blob", "digest", d.String(), "error", err)
	}
	return true, nil
}

func digestsOf(all []dedupe.Base) (out []cas.Digest) {
	for _, one := range all {
		out = append(out, one.Digest)
	}
	return out
}

// Of similar blobs the one that was stored first is the base. Later it may be idle, while a packed
// blob is used every day. That one then has an unpacked copy most of the time, so its bytes are
// stored twice, and it is unpacked repeatedly. Or no build needs the base any more. In both cases
// its family is compacted.

// Family is a blob in use, and the base that it should replace.
type Family struct {
	Hot  cas.Digest // in use, becomes whole; zero: none
	Base cas.Digest // idle, is packed, or removed if only recipes need it; zero: none
}

// CompactableFamilies lists the families that are worth compacting, those that share most bytes
// first. hot reports whether a blob is in use, and idle whether none of its builds is.
func (s *Store) CompactableFamilies(ctx context.Context, hot,
	idle func(cas.Digest) bool) ([]Family, error) {
	found := make(map[Family]int64) // bytes in common
	look := func(f Family, taken int64) {
		size, err := s.whole.Size(f.Base)
		if err == nil && 2*taken >= size && hot(f.Hot) && idle(f.Base) && s.mayCompact(f) {
			found[f] = taken
		}
	}
	literals := make(map[cas.Digest]bool)
	err := s.recipeStore.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		best := dedupe.NoLiterals
		for i, one := range p.Bases {
			if i == p.Literals {
				literals[one.Digest] = true
			} else if best < 0 || p.Taken[i] > p.Taken[best] {
				best = i
			}
		}
		if p.Size-p.Own < Worth.minimum(p.Size) { // the base would be stored twice
			if hot(d) && !s.whole.Has(d) {
				found[Family{Hot: d}] = 0
			}
		} else if best >= 0 {
			look(Family{d, p.Bases[best].Digest}, p.Taken[best])
		}
		return nil
	})
	if err == nil {
		err = s.Sharing.EachShare(ctx, func(d cas.Digest, share Share) error {
			if len(share.From) > 0 && !share.Little && s.whole.Has(d) {
				look(Family{d, share.From[0]}, share.Saving)
			}
			return nil
		})
	}
	for _, base := range s.recipeStore.Bases() {
		needed, err := s.owner.Needed(base)
		if err == nil && !needed && !literals[base] { // errors are reported elsewhere
			found[Family{Base: base}] = 0
		}
	}
	return slices.SortedFunc(maps.Keys(found), func(a, b Family) int {
		return cmp.Or(cmp.Compare(found[b], found[a]), slices.Compare(a.Hot[:], b.Hot[:]),
			slices.Compare(a.Base[:], b.Base[:]))
	}), err
}

// mayCompact reports whether all dependents of the base may use the hot blob as their base, because
// otherwise compacting would take more bytes than it saves.
func (s *Store) mayCompact(f Family) bool {
	isHot := func(d cas.Digest) bool { return d == f.Hot }
	others := slices.DeleteFunc(s.recipeStore.Users(f.Base), isHot)
	may, err := s.Sharing.mayTake(append(others, f.Base))
	if err != nil {
		return false
	}
	ok, err := may(f.Hot)
	return ok && err == nil
}

// Compact makes the blob in use whole, packs its base and the dependents of that again, by
// matching, and removes blobs that are not needed any more. It removes a blob only when all recipes
// that used it have been replaced, durably and verified. A crash in between leaves blobs whole
// without need, which CompactableFamilies lists again. It fails with ErrInUse if a blob is in use,
// or if there is not enough free space now.
func (s *Store) Compact(ctx context.Context, f Family, gate Gate) error {
	leave, err := s.LockRepresentation(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if !f.Base.IsZero() && !s.whole.Has(f.Base) {
		return nil // it was packed or removed in the meantime
	}
	hold, done := s.holdAccounted()
	defer done()
	var also []cas.Digest
	if !f.Hot.IsZero() {
		if err := s.makeWhole(ctx, f.Hot, hold, gate); err != nil {
			return retryLater(err)
		}
		s.memory.dropShare(f.Hot) // it is whole and needs no base
		also = append(also, f.Hot)
	}
	if !f.Base.IsZero() {
		needed, err := s.owner.Needed(f.Base)
		switch {
		case err != nil:
			return err
		case needed:
			_, err = s.pack(ctx, f.Base, Worth, also, gate)
		default: // it is removed with the last recipe that needs it
			err = s.repack(ctx, f.Base, search{include: also, gate: gate})
		}
		if err != nil {
			return retryLater(err)
		}
	}
	s.log.Info("family compacted", "used", f.Hot.String(), "base", f.Base.String())
	if f.Hot.IsZero() {
		return nil
	}
	// if a client has the copy open, it is removed later
	return cas.Ignore(ErrInUse, s.DropCopy(f.Hot))
}

// retryLater replaces an error for missing space by ErrInUse, so that the caller retries when other
// builds were evicted.
func retryLater(err error) error {
	if errors.Is(err, ErrNoSpace) || errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%w: %w", ErrInUse, err)
	}
	return err
}
