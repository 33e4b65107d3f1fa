package forms

import (
	"context"
	"errors"
	"io"
	"slices"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Gain is how much a recipe has to save, in bytes on disk: unpacking costs a copy.
type Gain int8

// The gains.
const (
	Worth  Gain = iota // an eighth of the blob, and 64 KiB: for what may be asked for again soon
	Little             // 64 KiB: for what is cold for long, and what somebody wants packed
)

// of gives the least of it for a blob of so many bytes.
func (g Gain) of(size int64) int64 {
	if g == Little {
		return minSaving
	}
	return max(minSaving, size/minSavingPart)
}

const (
	minSaving     = 64 << 10
	minSavingPart = 8 // an eighth
)

// Pack replaces the whole form of a blob by a recipe, if that saves at least as much and nobody has the blob, and tells how many bytes on disk that
// freed: 0 for one that is packed, or not worth it. ErrInUse: somebody has it. It takes as long as reading the blob and what it
// shares, a few times; ctx and gate end it between two steps, and leave the blob in a form that serves it. The order is what keeps it safe: the
// recipe's own literals are durable, then the recipe is, then it is proven to give the blob, and only then does the whole form go.
//
// Of a blob that others take from, they take from its literals then, and where it takes from itself: each of their recipes is proven
// before it takes the place of its former self, and that before the whole form goes. What a crash leaves of that, FinishExchange finishes.
func (s *Store) Pack(ctx context.Context, d cas.Digest, least Gain, gate Gate) (freed int64, err error) {
	leave, err := s.TakeTurn(ctx)
	if err != nil {
		return 0, err
	}
	defer leave()
	size, err := s.whole.Size(d)
	if err != nil {
		return 0, ignoreNotFound(err) // it is packed already
	}
	taken := len(s.shelf.Users(d)) > 0
	if taken && s.Saving(d) < least.of(size) {
		return 0, nil // most containers: they need not be read again for that
	}
	hold, done := s.hold()
	defer done()
	if worth, err := s.ensureRecipe(ctx, d, least, hold, gate); !worth || err != nil {
		return 0, err
	}
	if !taken {
		return s.removeWhole(d)
	}
	if freed, err = s.giveWay(ctx, d, gate); errors.Is(err, errLimits) {
		s.log.Info("container not packed", "digest", d.String(), "why", err)
		return 0, errors.Join(ignoreNotFound(s.removeRecipe(d)), s.saveShare(d, Share{})) // it would not be another time, too
	}
	return freed, err
}

// ensureRecipe sees to it that the blob has a recipe that gives it, and has the hold keep what that needs. false: there is none that would be
// worth it.
func (s *Store) ensureRecipe(ctx context.Context, d cas.Digest, least Gain, hold *cas.Hold, gate Gate) (bool, error) {
	if p, ok := s.shelf.Has(d); ok {
		// Of an earlier time when it was packed. Since then other users may have come, or a container may be gone.
		// Of one with compressed literals nobody can take what others take from the blob.
		if len(s.shelf.Users(d)) == 0 || p.Compressed == 0 {
			if ok, err := s.stillGood(ctx, d, p, hold); ok || err != nil {
				return ok, err
			}
		}
		s.Release(hold)
		if err := s.giveUpRecipe(d, p); err != nil {
			return false, err
		}
	}
	return s.makeRecipe(ctx, d, least, hold, gate)
}

// stillGood tells whether a recipe gives its blob, from containers that the blob may refer to.
func (s *Store) stillGood(ctx context.Context, d cas.Digest, p dedupe.Packed, hold *cas.Hold) (bool, error) {
	may, err := s.owner.MayTake(d)
	if err != nil {
		return false, err
	}
	if ok, err := s.keepContainers(ctx, p.Containers, hold); !ok || err != nil || !allMay(may, p.Containers) {
		return false, err
	}
	err = s.proveRecipe(ctx, d)
	return err == nil, ctx.Err()
}

// keepContainers has the hold keep blobs, and tells whether all are there.
func (s *Store) keepContainers(ctx context.Context, all []dedupe.Container, hold *cas.Hold) (bool, error) {
	for _, one := range all {
		if one.Digest.IsZero() {
			continue // literals that are not stored yet
		}
		if there, err := hold.Keep(ctx, one.Digest); !there || err != nil {
			return false, err
		}
	}
	return true, nil
}

// makeRecipe looks for what the blob shares with others, and writes a recipe if that saves at least as much.
func (s *Store) makeRecipe(ctx context.Context, d cas.Digest, least Gain, hold *cas.Hold, gate Gate) (bool, error) {
	found, err := s.Match(ctx, d, gate)
	if found == nil || err != nil {
		return false, err
	}
	defer found.Close()
	if !found.frees(least) {
		return false, nil
	}
	if there, err := s.keepContainers(ctx, found.Plan.Containers, hold); !there || err != nil {
		return false, err // one went meanwhile: another time
	}
	whole, _ := cas.DiskBytesIn(s.dir, d) // of one that has just gone, none
	s.shrinks(whole)
	release, err := s.owner.Reserve(ctx, cas.OnDisk(found.Plan.LiteralSize())+cas.OnDisk(found.recipeBytes()), whole, AtOnce)
	if err != nil {
		return false, err
	}
	defer release()
	defer s.account.changed() // before the room is given back: what was written counts by then
	literals, err := s.keepLiterals(ctx, found, hold)
	if err != nil {
		return false, err
	}
	r, err := found.Plan.Recipe(d, literals)
	if err != nil {
		return false, err
	}
	if sound, err := s.tryRecipe(ctx, r); !sound || err != nil {
		return false, err // literals that are for nothing go with the hold
	}
	if !literals.IsZero() {
		_, err := s.sketchOf(ctx, literals, gate) // later recipes take from them, too
		return err == nil, err
	}
	return true, nil
}

// tryRecipe writes a recipe of a blob that is whole. One that does not give the blob, though that and the containers are as they were stored, is a fault
// of who made it and no damage: the blob stays whole, and it is noted that nothing is to be had of it.
func (s *Store) tryRecipe(ctx context.Context, r *dedupe.Recipe) (sound bool, err error) {
	err = s.writeRecipe(ctx, r)
	var other *cas.CorruptError
	if err == nil || !errors.As(err, &other) || other.Digest != r.Blob || s.anyDamaged(ctx, r) {
		return err == nil, err
	}
	s.log.Error("not packed: the recipe that was made does not give the file; please report this", "digest", r.Blob.String(), "error", err)
	return false, s.saveShare(r.Blob, Share{})
}

// anyDamaged reads a blob and all that its recipe takes from.
func (s *Store) anyDamaged(ctx context.Context, r *dedupe.Recipe) bool {
	if s.whole.Check(ctx, r.Blob) != nil {
		return true
	}
	return slices.ContainsFunc(r.Containers, func(one dedupe.Container) bool { return s.whole.Check(ctx, one.Digest) != nil })
}

// keepLiterals stores the bytes of the blob that stand nowhere else.
func (s *Store) keepLiterals(ctx context.Context, m *Matched, hold *cas.Hold) (cas.Digest, error) {
	size := m.Plan.LiteralSize()
	if size == 0 {
		return cas.Digest{}, nil
	}
	if err := s.owner.Fits(s.dir, "what the file does not share", size, m.Plan.Size); err != nil {
		return cas.Digest{}, err
	}
	d, _, err := hold.Put(ctx, io.NewSectionReader(m.Plan.Literals(m.target), 0, size))
	return d, err
}

// writeRecipe makes the recipe durable, reads it again, and proves that what was read gives the blob.
func (s *Store) writeRecipe(ctx context.Context, r *dedupe.Recipe) error {
	if err := s.putRecipe(r); err != nil {
		return errors.Join(err, ignoreNotFound(s.removeRecipe(r.Blob)))
	}
	if err := s.proveRecipe(ctx, r.Blob); err != nil {
		return errors.Join(err, ignoreNotFound(s.removeRecipe(r.Blob)))
	}
	return nil
}

// removeWhole removes the whole form of a blob that has a sound recipe.
func (s *Store) removeWhole(d cas.Digest) (freed int64, err error) {
	if err := s.owner.LetGo(d); err != nil {
		return 0, err
	}
	was, _ := cas.DiskBytesIn(s.dir, d) // of one that is gone already, none
	defer s.changes(d)()
	var p dedupe.Packed
	removed, err := s.whole.RemoveUnless(d, func() (bool, error) {
		if !s.shelf.Complete() {
			return true, nil // a recipe that cannot be read may take from it
		}
		var ok bool
		if p, ok = s.shelf.Has(d); !ok || len(s.shelf.Users(d)) > 0 || s.owner.InHand(d) {
			return true, nil // another recipe takes from it by now, or somebody is being given it
		}
		for _, container := range p.Containers {
			if !s.whole.Has(container.Digest) {
				return true, &dedupe.ContainerError{Digest: container.Digest, Err: cas.ErrNotFound}
			}
		}
		return false, nil
	})
	if !removed || err != nil {
		return 0, err
	}
	freed = was - p.Disk
	if p.Literals != dedupe.NoLiterals {
		own, _ := cas.DiskBytesIn(s.dir, p.Containers[p.Literals].Digest) // of one that has just gone, none
		freed -= own
	}
	s.account.changed()
	s.memory.DropShare(d)
	if err := s.memory.Remeasure(d); err != nil {
		s.log.Warn("space of a packed blob not accounted for", "digest", d.String(), "error", err)
	}
	s.log.Info("blob packed", "digest", d.String(), "bytes", p.Size, "containers", len(p.Containers), "freed", freed)
	return freed, nil
}

// allMay tells whether bytes may be taken of each container.
func allMay(may func(cas.Digest) (bool, error), all []dedupe.Container) bool {
	return !slices.ContainsFunc(all, func(one dedupe.Container) bool {
		ok, err := may(one.Digest)
		return err != nil || !ok
	})
}
