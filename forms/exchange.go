package forms

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

// Of blobs that are alike the one that was stored first is the container. It may be the one that nobody uses, while one that is used
// every day is packed: that has an unpacked form most of the time, so its bytes stand there twice, and it is unpacked again and
// again. Then the two change places: what is used becomes whole, what is not is packed with bytes of that, and whatever else was packed
// with the former container takes from where those bytes stand now. Recipes keep depth one.

// Pair are two blobs that share most of the bytes of the second.
type Pair struct {
	Used cas.Digest // by somebody, lately: packed, or it would be packed when it were cold
	Idle cas.Digest // the container of the other
}

// Exchangeable lists the pairs that want, which knows who uses what, lets through: those first of which the container has most in common with
// what is used.
func (s *Store) Exchangeable(ctx context.Context, want func(Pair) bool) ([]Pair, error) {
	found := make(map[Pair]int64)
	look := func(used, idle cas.Digest, taken int64) {
		p := Pair{used, idle}
		if size, err := s.whole.Size(idle); err == nil && 2*taken >= size && want(p) && s.MayExchange(p) {
			found[p] = taken
		}
	}
	err := s.shelf.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		best := dedupe.NoLiterals
		for i := range p.Containers {
			if i != p.Literals && (best < 0 || p.Taken[i] > p.Taken[best]) {
				best = i
			}
		}
		if best >= 0 {
			look(d, p.Containers[best].Digest, p.Taken[best])
		}
		return nil
	})
	if err == nil {
		err = s.EachShare(ctx, func(d cas.Digest, share Share) error {
			if len(share.From) > 0 && !share.Little && s.whole.Has(d) {
				look(d, share.From[0], share.Saving)
			}
			return nil
		})
	}
	pairs := make([]Pair, 0, len(found))
	for p := range found {
		pairs = append(pairs, p)
	}
	slices.SortFunc(pairs, func(a, b Pair) int {
		return cmp.Or(cmp.Compare(found[b], found[a]), slices.Compare(a.Used[:], b.Used[:]), slices.Compare(a.Idle[:], b.Idle[:]))
	})
	return pairs, err
}

// MayExchange tells whether the container is there, and whoever takes bytes of it may take them of the other.
func (s *Store) MayExchange(p Pair) bool {
	if !s.whole.Has(p.Idle) {
		return false
	}
	for _, d := range append(s.shelf.Users(p.Idle), p.Idle) {
		if d == p.Used {
			continue
		}
		may, err := s.owner.MayTake(d)
		if err != nil || !allMay(may, []dedupe.Container{{Digest: p.Used}}) {
			return false
		}
	}
	return true
}

// Exchange makes what is used whole, and packs its former container. The order is what keeps it safe: nothing goes before all that needs it
// has been given something else, durably and proven. A crash on the way leaves blobs that are whole without need, and FinishExchange, or
// the next exchange, goes on. ErrInUse: somebody has one of them, or there is no room for both just now.
func (s *Store) Exchange(ctx context.Context, p Pair, gate Gate) error {
	leave, err := s.TakeTurn(ctx)
	if err != nil {
		return err
	}
	defer leave()
	hold, done := s.hold()
	defer done()
	if err := s.becomeWhole(ctx, p.Used, hold, gate); err != nil {
		return anotherTime(err)
	}
	if !s.whole.Has(p.Idle) { // nobody needed it but what is whole now
		return ignoreInUse(s.DropCopy(p.Used))
	}
	s.memory.DropShare(p.Used) // it has nobody to take from any more
	s.memory.DropShare(p.Idle) // and this one has
	if worth, err := s.ensureRecipe(ctx, p.Idle, Worth, hold, gate); !worth || err != nil {
		return cmp.Or(anotherTime(err), errNotWorth)
	}
	if _, err := s.giveWay(ctx, p.Idle, gate); err != nil {
		return err
	}
	s.log.Info("container exchanged", "used", p.Used.String(), "container", p.Idle.String())
	return ignoreInUse(s.DropCopy(p.Used)) // who holds that has it still; it goes later
}

var errNotWorth = errors.New("packing the container with what is used saves too little")

// anotherTime makes ErrInUse of an error that says that there is no room: there may be some when others have gone.
func anotherTime(err error) error {
	if errors.Is(err, ErrNoRoom) || errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%w: %w", ErrInUse, err)
	}
	return err
}

// giveUpLiterals has whoever takes from the literals of a packed blob, which is whole as well, take from the blob.
func (s *Store) giveUpLiterals(ctx context.Context, d cas.Digest, gate Gate) error {
	r, _, _, err := s.recipe(d)
	if err != nil {
		return err
	}
	literals, err := r.LiteralsIn()
	if literals == nil || err != nil {
		return err
	}
	return s.takeThrough(ctx, literals, d, gate)
}

// giveWay has whoever takes bytes of a blob take them from where its own recipe has them, and removes its whole form; and the recipe as well, if the
// blob was there for those alone. After errLimits the blob has no recipe any more. The caller has the turn.
func (s *Store) giveWay(ctx context.Context, d cas.Digest, gate Gate) (freed int64, err error) {
	defer s.departs(d)()
	r, _, _, err := s.recipe(d)
	if err == nil {
		err = s.takeThrough(ctx, r, d, gate)
	}
	if errors.Is(err, errLimits) && s.whole.Has(d) { // nor would they take from elsewhere another time
		err = errors.Join(err, ignoreNotFound(s.removeRecipe(d)))
	}
	if err == nil {
		freed, err = s.removeWhole(d)
	}
	s.settle(d)
	return freed, err
}

var errLimits = errors.New("what others take from a blob cannot be taken from elsewhere")

// takeThrough puts another recipe in the place of each that takes from the blob of made, but that of one blob. All of them are composed before the
// first is written, so that limits are met for all or for none, and none takes from where its owner may not: errLimits, and nothing was changed.
func (s *Store) takeThrough(ctx context.Context, made *dedupe.Recipe, but cas.Digest, gate Gate) error {
	var moved []*dedupe.Recipe
	for _, user := range s.shelf.Users(made.Blob) {
		if user == but {
			continue
		}
		r, _, _, err := s.recipe(user)
		if _, there := s.shelf.Has(user); !there {
			continue // it was removed, and keeps what it took from until that is durable
		}
		// One that takes nothing from there any more was written, and it is not certain that it stays: it is written again.
		if err == nil && slices.ContainsFunc(r.Containers, func(one dedupe.Container) bool { return one.Digest == made.Blob }) {
			was := r
			if r, err = was.Through(made); err != nil {
				err = fmt.Errorf("%w: %w", errLimits, err)
			} else {
				err = s.mayMove(was, r, made)
			}
		}
		if err != nil {
			return err
		}
		moved = append(moved, r)
	}
	for _, r := range moved {
		if gate != nil {
			if err := gate(ctx); err != nil {
				return err
			}
		}
		if err := s.prove(ctx, r); err != nil {
			return err
		}
		if err := s.putRecipe(r); err != nil {
			return err
		}
		if written, stamp, _, err := s.recipe(r.Blob); err == nil && written.Same(r) { // else it is proven again when it is used
			s.provenAs(r.Blob, stamp)
		}
	}
	return nil
}

// mayMove is errLimits unless the blob of two recipes may take from whatever the second takes from and the first does not. The literals of made are
// bytes that it takes already.
func (s *Store) mayMove(was, r, made *dedupe.Recipe) error {
	may, err := s.owner.MayTake(r.Blob)
	if err != nil {
		return err
	}
	for _, from := range r.Containers {
		if slices.Contains(was.Containers, from) || made.Literals != dedupe.NoLiterals && from == made.Containers[made.Literals] {
			continue
		}
		if ok, err := may(from.Digest); err != nil {
			return err
		} else if !ok {
			return fmt.Errorf("%w: %s may not take from %s", errLimits, r.Blob, from.Digest)
		}
	}
	return nil
}

// Unfinished lists what a crash has left of exchanges, or somebody who had a view just then: whole blobs that have a recipe, and perhaps are
// containers. Both are sound, and all that is wrong is the space.
func (s *Store) Unfinished(ctx context.Context) (left []cas.Digest, err error) {
	err = s.shelf.Walk(ctx, func(d cas.Digest, _ dedupe.Packed) error {
		if s.whole.Has(d) {
			left = append(left, d)
		}
		return nil
	})
	return left, err
}

// FinishExchange removes the whole form of one of them, after others have been given what they took from it. ErrInUse: somebody has it, or there is no
// room just now.
func (s *Store) FinishExchange(ctx context.Context, d cas.Digest, gate Gate) error {
	leave, err := s.TakeTurn(ctx)
	if err != nil {
		return err
	}
	defer leave()
	hold, done := s.hold()
	defer done()
	if sound, err := s.ensureRecipe(ctx, d, Worth, hold, gate); !sound || err != nil {
		return cmp.Or(anotherTime(err), errNotWorth)
	}
	_, err = s.giveWay(ctx, d, gate)
	return err
}
