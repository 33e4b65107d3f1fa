package packing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Of blobs that are alike the first one that was stored is the base. Later it may be idle, while
// one that is used every day is packed: that one has an unpacked form most of the time, so its
// bytes stand there twice, and it is unpacked again and again. Or no build needs the base any
// more. Then its family is compacted.

// Family is a blob that is used, and what it is to take the place of.
type Family struct {
	Hot  cas.Digest // is used, and becomes whole; zero: none
	Base cas.Digest // is idle, and is packed, or removed if only recipes need it; zero: none
}

// Families lists the families that are worth compacting, those first that have most in common.
// hot reports whether a blob is used, and idle whether none of its builds is.
func (s *Store) Families(ctx context.Context, hot, idle func(cas.Digest) bool) ([]Family, error) {
	found := make(map[Family]int64) // bytes in common
	look := func(f Family, taken int64) {
		size, err := s.whole.Size(f.Base)
		if err == nil && 2*taken >= size && hot(f.Hot) && idle(f.Base) && s.mayCompact(f) {
			found[f] = taken
		}
	}
	literals := make(map[cas.Digest]bool)
	err := s.shelf.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		own, best := p.Compressed, dedupe.NoLiterals
		for i, one := range p.Containers {
			if i == p.Literals {
				literals[one.Digest], own = true, one.Size
			} else if best < 0 || p.Taken[i] > p.Taken[best] {
				best = i
			}
		}
		if p.Size-own < Worth.of(p.Size) { // it would stand there twice
			if hot(d) && !s.whole.Has(d) {
				found[Family{Hot: d}] = 0
			}
		} else if best >= 0 {
			look(Family{d, p.Containers[best].Digest}, p.Taken[best])
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
	for _, base := range s.shelf.Containers() {
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
	others := slices.DeleteFunc(s.shelf.Users(f.Base), isHot)
	may, err := s.Sharing.mayTake(append(others, f.Base))
	if err != nil {
		return false
	}
	ok, err := may(f.Hot)
	return ok && err == nil
}

// Compact makes the blob that is used whole, packs its base and the blobs that take from that
// again, by matching, and removes what is not needed any more. Nothing is removed before all
// that needs it takes from elsewhere, durably and proven; a crash on the way leaves blobs that
// are whole without need, and Families lists them. ErrInUse: one of them is in use, or there
// is no free space for both just now.
func (s *Store) Compact(ctx context.Context, f Family, gate Gate) error {
	leave, err := s.TakeTurn(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if !f.Base.IsZero() && !s.whole.Has(f.Base) {
		return nil // it was packed or removed meanwhile
	}
	hold, done := s.hold()
	defer done()
	var also []cas.Digest
	if !f.Hot.IsZero() {
		if err := s.makeWhole(ctx, f.Hot, hold, gate); err != nil {
			return anotherTime(err)
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
			err = s.packAgain(ctx, f.Base, search{also: also, gate: gate})
		}
		if err != nil {
			return anotherTime(err)
		}
	}
	s.log.Info("family compacted", "used", f.Hot.String(), "base", f.Base.String())
	if f.Hot.IsZero() {
		return nil
	}
	return ignoreInUse(s.DropCopy(f.Hot)) // a client that has it open keeps it; it is removed later
}

// anotherTime makes ErrInUse of an error that says that there is no free space: there may be
// some when other builds were evicted.
func anotherTime(err error) error {
	if errors.Is(err, ErrNoRoom) || errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%w: %w", ErrInUse, err)
	}
	return err
}
