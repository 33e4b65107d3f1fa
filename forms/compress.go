package forms

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// What has been cold for long, and stands nowhere else, is kept compressed where that gains by enough: the literals of a packed blob in the file
// of its recipe, and a blob that shares nothing as a recipe of nothing but literals. Who reads them decodes them, at some hundred megabytes a
// second, so it is nothing for what is used, and nobody else takes bytes from them: literals that another recipe takes from, or would, stay a
// container, and what is needed again becomes one.

// Compressible is something that may be compressed: the literals of a packed blob, or a whole blob that shares nothing.
type Compressible struct {
	Blob  cas.Digest // of a build
	Bytes cas.Digest // what is compressed: the blob, or the container of its literals
	Size  int64      // bytes of that
}

func (x *Compressible) alone() bool { return x.Blob == x.Bytes }

// worthCompressing tells whether compressing to so many bytes is worth it. It is the same bound as that of packing, for the same reason: coming back costs.
func worthCompressing(size, stored int64) bool {
	return cas.OnDisk(size)-cas.OnDisk(stored) >= max(minSaving, size/minSavingPart)
}

// Compressibles lists what may be compressed and was not found to gain nothing.
func (s *Store) Compressibles(ctx context.Context) (out []Compressible, err error) {
	wanted, err := s.wanted(ctx)
	if err != nil {
		return nil, err
	}
	var alone []cas.Digest
	err = s.memory.EachShare(ctx, func(d cas.Digest, raw []byte) error {
		if found, ok := decodeShare(raw); ok && !found.dense && (found.Saving == 0 || found.Little) {
			alone = append(alone, d)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, d := range alone {
		if size, err := s.whole.Size(d); err == nil && !wanted[d] {
			if x := (Compressible{d, d, size}); s.mayCompress(&x) {
				out = append(out, x)
			}
		}
	}
	err = s.shelf.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		if p.Literals == dedupe.NoLiterals {
			return nil
		}
		own := p.Containers[p.Literals]
		if x := (Compressible{d, own.Digest, own.Size}); !wanted[own.Digest] && !s.dense(own.Digest) && s.mayCompress(&x) {
			out = append(out, x)
		}
		return nil
	})
	return out, err
}

// wanted lists what others would take from.
func (s *Store) wanted(ctx context.Context) (map[cas.Digest]bool, error) {
	all := make(map[cas.Digest]bool)
	return all, s.memory.EachShare(ctx, func(_ cas.Digest, raw []byte) error {
		found, _ := decodeShare(raw)
		for _, from := range found.From {
			all[from] = true
		}
		return nil
	})
}

// mayCompress tells whether nobody but the blob itself needs those bytes to be whole.
func (s *Store) mayCompress(x *Compressible) bool {
	if !worthCompressing(x.Size, 0) || s.whole.Has(x.Blob) != x.alone() {
		return false
	}
	if needed, err := s.owner.Needed(x.Bytes); err != nil || needed != x.alone() {
		return false // somebody needs the literals as they are, or nobody the blob
	}
	users := s.shelf.Users(x.Bytes)
	_, packed := s.shelf.Has(x.Blob)
	if x.alone() {
		return len(users) == 0 && !packed
	}
	return packed && len(users) == 1 && users[0] == x.Blob
}

// dense tells whether it has been found that compressing a blob gains too little.
func (s *Store) dense(d cas.Digest) bool {
	found, ok := s.share(d)
	return ok && found.dense
}

func (s *Store) noteDense(d cas.Digest) error {
	found, _ := s.share(d)
	found.dense = true
	return s.saveShare(d, found)
}

// Compress does it if that gains by enough, and tells how many bytes on disk that freed; else it notes that it does not. ErrInUse: somebody has the
// blob, or it has changed meanwhile; ErrNoRoom: there is none for both. The order is what keeps it safe: the recipe with its compressed literals is durable, and proven to give the blob, before it
// gets its name, and only then does go what it replaces. The turn is taken for that alone, so that whoever changes forms, collects or asks
// meanwhile waits for none of it, and wins: what was made till then is dropped if it fits no more.
func (s *Store) Compress(ctx context.Context, x Compressible, gate Gate) (freed int64, err error) {
	defer func() {
		if errors.Is(err, cas.ErrNotFound) { // it was evicted, or has another form by now
			err = fmt.Errorf("%w: %w", ErrInUse, err)
		}
	}()
	f, err := s.openWhole(ctx, x.Bytes)
	if err != nil {
		return 0, err
	}
	defer f.Close() // read-only: nothing can be lost
	if expected, err := s.Expected(ctx, x, gate); expected == 0 || err != nil {
		return 0, err
	}
	was, r, err := s.compressedRecipe(&x)
	if err != nil {
		return 0, err
	}
	most := x.Size - Worth.of(x.Size)
	if err := s.owner.Fits(s.dir, "what is compressed", most, x.Size); err != nil {
		return 0, err
	}
	defer s.owner.Shrinks(cas.OnDisk(x.Size))()
	defer s.departs(x.Bytes)()
	release, err := s.owner.Reserve(ctx, cas.OnDisk(most), cas.OnDisk(x.Size), AtOnce)
	if err != nil {
		return 0, err
	}
	defer release()
	leave := func() {}
	defer func() { leave() }()
	hold, done := s.hold() // against who removes a container meanwhile
	defer done()
	before, _ := s.shelf.Has(x.Blob) // none, of a whole one
	_, err = s.shelf.PutCompressed(ctx, r, behind(ctx, f, gate), most, func(staged *dedupe.Recipe) error {
		if err := s.prove(ctx, staged); errors.Is(err, cas.ErrNotFound) {
			return ErrInUse // a container went: another time
		} else if err != nil {
			return err
		}
		taken, err := s.TakeTurn(ctx)
		if err != nil {
			return err
		}
		leave = taken
		return s.stillFits(ctx, &x, was, r, hold)
	})
	if errors.Is(err, dedupe.ErrNoGain) {
		return 0, s.noteDense(x.Bytes)
	}
	if err != nil {
		return 0, err
	}
	return s.takeThePlace(&x, r, before)
}

// compressedRecipe gives the recipe that is to be, and that which is, nil where the blob is whole.
func (s *Store) compressedRecipe(x *Compressible) (was, r *dedupe.Recipe, err error) {
	if x.alone() {
		return nil, dedupe.AllInward(x.Blob, x.Size), nil
	}
	if was, _, _, err = s.recipe(x.Blob); err != nil {
		return nil, nil, err
	}
	if was.Literals == dedupe.NoLiterals || was.Containers[was.Literals].Digest != x.Bytes {
		return nil, nil, ErrInUse // it is another one by now
	}
	r, err = was.Inward()
	return was, r, err
}

// stillFits is ErrInUse unless all is as it was when the recipe was begun. The caller has the turn.
func (s *Store) stillFits(ctx context.Context, x *Compressible, was, r *dedupe.Recipe, hold *cas.Hold) error {
	if !s.mayCompress(x) {
		return ErrInUse
	}
	if x.alone() {
		return s.owner.LetGo(x.Blob)
	}
	if now, _, _, err := s.recipe(x.Blob); err != nil || !now.Same(was) {
		return cmp.Or(err, ErrInUse)
	}
	there, err := s.keepContainers(ctx, r.Containers, hold)
	if err == nil && !there {
		err = ErrInUse // one went: another time
	}
	return err
}

// takeThePlace removes what the recipe, which has just got its name, is in the place of. The caller has the turn.
func (s *Store) takeThePlace(x *Compressible, r *dedupe.Recipe, before dedupe.Packed) (freed int64, err error) {
	s.account.changed()
	if written, stamp, _, err := s.recipe(x.Blob); err == nil && written.Same(r) { // else it is proven again when it is used
		s.provenAs(x.Blob, stamp)
	}
	s.settle(x.Blob) // see putRecipe
	if x.alone() {
		return s.removeWhole(x.Blob)
	}
	was, _ := cas.DiskBytesIn(s.dir, x.Bytes) // of one that is not there, none
	if _, err = s.Remove(x.Bytes); err != nil {
		return 0, err
	}
	now, _ := s.shelf.Has(x.Blob)
	freed = was + before.Disk - now.Disk
	s.log.Info("literals compressed", "digest", x.Blob.String(), "bytes", x.Size, "freed", freed)
	return freed, nil
}

// thawSimilar makes what a new blob shares its bytes with whole, where that is compressed: it is to be its container.
func (s *Store) thawSimilar(ctx context.Context, d cas.Digest, gate Gate) error {
	frozen, err := s.Compressed(ctx)
	if len(frozen) == 0 || err != nil {
		return err // mostly; and the blob is not read once more for nothing
	}
	own, err := s.sketchOf(ctx, d, gate)
	if err != nil || own.Size < Least {
		return err
	}
	may, err := s.owner.MayTake(d)
	if err != nil {
		return err
	}
	for _, other := range frozen {
		if known, ok := s.knownSketch(other); !ok || 2*inCommon(own.Keys, known.Keys) < min(len(own.Keys), len(known.Keys)) {
			continue
		}
		if ok, err := may(other); err != nil || !ok {
			continue
		}
		// The new one is looked at all the same where that one is no good, which who asks for it finds out, or there is no room.
		if err := s.Thaw(ctx, other, gate); ctx.Err() != nil {
			return ctx.Err()
		} else if _, still := s.shelf.Has(other); err != nil && still { // else it went meanwhile
			s.log.Warn("compressed blob not made whole for another one", "digest", other.String(), "for", d.String(), "error", err)
		}
	}
	return nil
}

// inCommon counts the keys that two ascending lists have in common.
func inCommon(a, b []uint64) (n int) {
	for len(a) > 0 && len(b) > 0 {
		switch {
		case a[0] < b[0]:
			a = a[1:]
		case a[0] > b[0]:
			b = b[1:]
		default:
			a, b = a[1:], b[1:]
			n++
		}
	}
	return n
}

// Thaw makes a blob whole again that MostlyOwn lists: a copy of it would be made anew whenever it is used, and stand beside nearly as many bytes.
// Errors are those of MakeWhole.
func (s *Store) Thaw(ctx context.Context, d cas.Digest, gate Gate) error {
	if gate != nil {
		if err := gate(ctx); err != nil {
			return err
		}
	}
	if err := s.MakeWhole(ctx, d); err != nil {
		return err
	}
	return ignoreInUse(s.DropCopy(d)) // who holds that has it still; it goes later
}

// MostlyOwn lists the packed blobs that have all but an eighth for themselves: what is nothing but compressed, and what has been packed for little.
func (s *Store) MostlyOwn(ctx context.Context) (all []cas.Digest, err error) {
	err = s.shelf.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		own := p.Compressed
		if p.Literals != dedupe.NoLiterals {
			own = p.Containers[p.Literals].Size
		}
		if p.Size-own < Worth.of(p.Size) && !s.whole.Has(d) {
			all = append(all, d)
		}
		return nil
	})
	return all, err
}

// Compressed lists the blobs that are nothing but compressed.
func (s *Store) Compressed(ctx context.Context) (all []cas.Digest, err error) {
	err = s.shelf.Walk(ctx, func(d cas.Digest, p dedupe.Packed) error {
		if p.Compressed > 0 && len(p.Containers) == 0 && !s.whole.Has(d) {
			all = append(all, d)
		}
		return nil
	})
	return all, err
}
