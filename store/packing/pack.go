package packing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"syscall"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Gain is how much a recipe has to save, in bytes on disk: unpacking costs a copy.
type Gain int8

// The gains.
const (
	Worth  Gain = iota // an eighth of the blob, and 64 KiB: for what may be asked for again soon
	Little             // 64 KiB: for what an administrator wants packed
)

// minimum returns the least of it for a blob of so many bytes.
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

// errSavesTooLittle reports that a recipe of a blob would save too little.
var errSavesTooLittle = errors.New("packing saves too little")

// Pack replaces the whole form of a blob by a recipe, if that saves at least as much and the
// blob is not in use, and returns how many bytes on disk that freed: 0 for one that is packed,
// or not worth it. ErrInUse: the blob is in use. It takes as long as reading the blob and what
// it shares, a few times; ctx and gate end it between two steps, and leave the blob in a form
// that serves it. The whole form is removed last, when the recipe's literals and the recipe
// are durable and the recipe was proven to give the blob.
//
// Blobs that take from the whole form are packed again before, by matching: most of it is
// in the recipe's literals then. A crash on the way leaves a blob that is whole and has a
// recipe, which is removed the next time, and blobs that take from either.
func (s *Store) Pack(ctx context.Context, d cas.Digest, least Gain, gate Gate) (freed int64,
	err error) {
	leave, err := s.LockForm(ctx)
	if err != nil {
		return 0, err
	}
	defer leave()
	size, err := s.whole.Size(d)
	if err != nil {
		return 0, ignore(cas.ErrNotFound, err) // it is packed already
	}
	if len(s.recipeStore.Users(d)) > 0 && s.Sharing.Saving(d) < least.minimum(size) {
		return 0, nil // most bases: they need not be read again for that
	}
	freed, err = s.pack(ctx, d, least, nil, gate)
	if errors.Is(err, errSavesTooLittle) {
		err = nil
	}
	return freed, err
}

// pack is Pack, and errSavesTooLittle if nothing came of it; the caller holds formLock. The blobs
// of also are compared with it besides those that it is probably like.
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
	how := search{minGain: least, include: also, dependents: users,
		single: len(users) == 0, gate: gate}
	if err = s.makeRecipe(ctx, d, how, hold); err == nil {
		err = s.repack(ctx, d, search{minGain: least, gate: gate})
	}
	removed := false
	if err == nil {
		removed, err = s.removeWhole(d)
	}
	if !removed { // after an error it may be, and not durably: then the recipe stays
		return 0, errors.Join(err, s.removeRecipeOfWhole(context.WithoutCancel(ctx), d))
	}
	freed = before - s.diskBytesOf(append(users, d))
	s.log.Info("blob packed", "digest", d.String(), "users", len(users), "freed", freed)
	return freed, nil
}

// diskBytesOf sums blobs' bytes on disk: whole forms, recipes, and the literals of these.
func (s *Store) diskBytesOf(all []cas.Digest) (sum int64) {
	for _, d := range all {
		whole, recipe, _ := s.Bytes(d)
		sum += whole + recipe
		if p, ok := s.recipeStore.Has(d); ok && p.Literals != dedupe.NoLiterals {
			own, _ := cas.DiskBytesIn(s.dir, p.Bases[p.Literals].Digest)
			sum += own // of a removed one, none
		}
	}
	return sum
}

// repack packs the blobs again, by matching, that take bytes from a base, and has them take nothing
// from it: from what the base's own recipe takes from, from the blobs that the search names, or
// from any other. A blob that would save too little becomes whole. The caller holds formLock.
func (s *Store) repack(ctx context.Context, base cas.Digest, how search) error {
	if p, packed := s.recipeStore.Has(base); packed {
		how.include = append(how.include, digestsOf(p.Bases)...)
	}
	how.exclude, how.single = []cas.Digest{base}, true
	for _, d := range s.dependents(base) {
		was, packed := s.recipeStore.Has(d)
		if !packed || !slices.Contains(s.recipeStore.Users(base), d) {
			continue // it was removed, durably or not yet, or was packed again for another base
		}
		if err := s.repackWithout(ctx, d, was, how); err != nil {
			return err
		}
	}
	return nil
}

// dependents lists the blobs with recipes that take from a base, the one that takes most first: it
// may become the base of the others.
func (s *Store) dependents(base cas.Digest) []cas.Digest {
	taken := func(d cas.Digest) int64 {
		p, _ := s.recipeStore.Has(d) // of one that was just removed, nothing
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
			how.exclude = append(how.exclude, one.Digest) // they are written again, in one piece
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

// makeRecipe looks for what a blob shares with others, and puts a recipe of that in the place
// of the one that the blob may have, durably, if it saves enough; else errSavesTooLittle. The
// hold keeps what the recipe takes from. The caller holds formLock.
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
			return errSavesTooLittle // it was removed meanwhile: another time
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
	defer s.account.changed() // before the reservation is released: what was written counts by then
	r, literals, err := s.recipeOfPlan(ctx, d, found, how, hold)
	if err != nil {
		return err
	}
	err = s.putRecipe(ctx, r, literals)
	var other *cas.CorruptError
	if errors.As(err, &other) && other.Digest == d && !s.anyDamaged(ctx, r) {
		// The blob stays as it is, and that nothing can be had of it is noted.
		s.log.Error("not packed: the recipe does not restore the file; please report this",
			"digest", d.String(), "error", err)
		return errors.Join(errSavesTooLittle, s.Sharing.saveShare(d, Share{}))
	}
	return err
}

// anyDamaged reads a blob and all that its recipe takes from.
func (s *Store) anyDamaged(ctx context.Context, r *dedupe.Recipe) bool {
	if s.whole.Check(ctx, r.Blob) != nil {
		return true
	}
	return slices.ContainsFunc(digestsOf(r.Bases), func(one cas.Digest) bool {
		return s.whole.Check(ctx, one) != nil
	})
}

// recipeOfPlan returns the recipe of a plan. Its literals are stored as a blob of their own, which
// others can take from; where none does or would, and a sample of them gains enough, they are
// returned, to be compressed into the recipe's own file.
func (s *Store) recipeOfPlan(ctx context.Context, d cas.Digest, m *Matched, how search,
	hold *cas.Hold) (*dedupe.Recipe, dedupe.Source, error) {
	size := m.Plan.LiteralSize()
	if size == 0 {
		r, err := m.Plan.Recipe(d, cas.Digest{})
		return r, nil, err
	}
	if err := s.owner.Fits(s.dir, "the file's own bytes", size, m.Plan.Size); err != nil {
		return nil, nil, err
	}
	literals := m.Plan.Literals(m.target)
	if how.single && worthCompressing(size, 0) {
		stored, err := dedupe.Compressed(ctx, literals)
		if err != nil {
			return nil, nil, err
		}
		if worthCompressing(size, stored) && !s.isWantedBase(ctx, d) {
			return m.Plan.Framed(d), literals, nil
		}
	}
	own, _, err := hold.Put(ctx, io.NewSectionReader(literals, 0, size))
	if err == nil {
		err = s.Sharing.addSketch(ctx, own, how.gate) // later recipes take from them, too
	}
	if err != nil {
		return nil, nil, err
	}
	r, err := m.Plan.Recipe(d, own)
	return r, nil, err
}

// isWantedBase reports whether another blob, not packed yet, would take bytes from this one.
func (s *Store) isWantedBase(ctx context.Context, d cas.Digest) (wanted bool) {
	err := s.Sharing.EachShare(ctx, func(other cas.Digest, found Share) error {
		wanted = wanted || s.whole.Has(other) && slices.Contains(found.From, d)
		return nil
	})
	return wanted || err != nil
}

// worthCompressing reports whether compressing to so many bytes is worth it: packing has to
// save as much, for the same reason.
func worthCompressing(size, stored int64) bool {
	return cas.RoundUpToBlock(size)-cas.RoundUpToBlock(stored) >= Worth.minimum(size)
}

// removeWhole removes the whole form of a blob that has a sound recipe.
func (s *Store) removeWhole(d cas.Digest) (removed bool, err error) {
	if err := s.owner.DropViews(d); err != nil {
		return false, err
	}
	removed, err = s.whole.RemoveUnless(d, func() (bool, error) {
		if !s.recipeStore.Complete() {
			return true, nil // a recipe that cannot be read may take from it
		}
		p, ok := s.recipeStore.Has(d)
		if !ok || len(s.recipeStore.Users(d)) > 0 || s.owner.BeingServed(d) {
			return true, nil // another recipe takes from it by now, or a request is being given it
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

// Of blobs that are alike the first one that was stored is the base. Later it may be idle, while
// one that is used every day is packed: that one has an unpacked form most of the time, so its
// bytes are stored twice, and it is unpacked again and again. Or no build needs the base any
// more. Then its family is compacted.

// Family is a blob that is used, and what it is to take the place of.
type Family struct {
	Hot  cas.Digest // is used, and becomes whole; zero: none
	Base cas.Digest // is idle, and is packed, or removed if only recipes need it; zero: none
}

// CompactableFamilies lists the families that are worth compacting, those first that have most in
// common. hot reports whether a blob is used, and idle whether none of its builds is.
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
		own, best := p.Compressed, dedupe.NoLiterals
		for i, one := range p.Bases {
			if i == p.Literals {
				literals[one.Digest], own = true, one.Size
			} else if best < 0 || p.Taken[i] > p.Taken[best] {
				best = i
			}
		}
		if p.Size-own < Worth.minimum(p.Size) { // it would be stored twice
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
		if err == nil && !needed && !literals[base] { // what cannot be read says so elsewhere
			found[Family{Base: base}] = 0
		}
	}
	all := make([]Family, 0, len(found))
	for f := range found {
		all = append(all, f)
	}
	slices.SortFunc(all, func(a, b Family) int {
		return cmp.Or(cmp.Compare(found[b], found[a]), slices.Compare(a.Hot[:], b.Hot[:]),
			slices.Compare(a.Base[:], b.Base[:]))
	})
	return all, err
}

// mayCompact reports whether all that take bytes from the base may take them from the blob that
// is used: else more would be stored than is saved.
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

// Compact makes the blob that is used whole, packs its base and the blobs that take from that
// again, by matching, and removes what is not needed any more. Nothing is removed before all that
// needs it takes from elsewhere, durably and proven; a crash on the way leaves blobs that are
// whole without need, and CompactableFamilies lists them. ErrInUse: one of them is in use, or there
// is no free space for both just now.
func (s *Store) Compact(ctx context.Context, f Family, gate Gate) error {
	leave, err := s.LockForm(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if !f.Base.IsZero() && !s.whole.Has(f.Base) {
		return nil // it was packed or removed meanwhile
	}
	hold, done := s.holdAccounted()
	defer done()
	var also []cas.Digest
	if !f.Hot.IsZero() {
		if err := s.makeWhole(ctx, f.Hot, hold, gate); err != nil {
			return retryLater(err)
		}
		s.memory.dropShare(f.Hot) // it takes from no other any more
		also = append(also, f.Hot)
	}
	if !f.Base.IsZero() {
		needed, err := s.owner.Needed(f.Base)
		switch {
		case err != nil:
			return err
		case needed:
			_, err = s.pack(ctx, f.Base, Worth, also, gate)
		default: // it is removed with the last recipe that takes from it
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
	// a client that has it open keeps it; it is removed later
	return ignore(ErrInUse, s.DropCopy(f.Hot))
}

// retryLater makes ErrInUse of an error that says that there is no free space: there may be
// some when other builds were evicted.
func retryLater(err error) error {
	if errors.Is(err, ErrNoSpace) || errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%w: %w", ErrInUse, err)
	}
	return err
}
