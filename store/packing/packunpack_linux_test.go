package packing

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

const mib = 1 << 20

// A blob is packed, served from a copy, made whole again and removed, and each time has the forms
// that it should have and its own bytes.
func TestABlobIsPackedUnpackedAndMadeWhole(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(2, mib)
	require.Greater(t, b.Sharing.Saving(all[1]), int64(mib/2))
	require.Zero(t, b.Sharing.Saving(all[0]), "it stood alone")

	freed := b.pack(all[1])
	require.Greater(t, freed, int64(mib/2))
	require.Equal(t, []int64{int64(len(contents[1]))}, b.replacedBytes,
		"the bytes that the write replaces")
	require.Zero(t, b.user.transientBytes)
	require.True(t, b.OnlyPacked(all[1]))
	require.Equal(t, all[1], b.Recipes.Users(all[0])[0])
	require.NoError(t, b.Verify(ctx, all[1]))
	require.NoError(t, b.Check(ctx, all[1]))
	size, err := b.Size(all[1])
	require.NoError(t, err)
	require.EqualValues(t, len(contents[1]), size)
	whole, recipe, copied := b.Bytes(all[1])
	require.Zero(t, whole)
	require.Positive(t, recipe)
	require.Zero(t, copied)

	require.Equal(t, contents[1], b.read(all[1]))
	_, _, copied = b.Bytes(all[1])
	require.Positive(t, copied)
	space, err := b.Space(true)
	require.NoError(t, err)
	require.Equal(t, copied, space.Copies)
	require.Equal(t, recipe, space.Recipes)
	require.Zero(t, b.reserved, "what is written needs no place besides")

	require.NoError(t, b.DropCopy(all[1]))
	require.NoError(t, b.MakeWhole(ctx, all[1]))
	whole, recipe, copied = b.Bytes(all[1])
	require.Positive(t, whole)
	require.Zero(t, recipe+copied)
	require.Equal(t, contents[1], b.read(all[1]))
	require.Empty(t, b.Recipes.Users(all[0]))
	require.ElementsMatch(t, all, b.objects(), "no literals are left")

	for _, d := range all {
		delete(b.needed, d)
		freed, err := b.Remove(d)
		require.NoError(t, err)
		require.Positive(t, freed)
	}
	require.Empty(t, b.objects())
}

// The owner is asked before anything is removed: a blob that it needs, or that is in use, stays.
func TestRemovalAsksTheOwnerFirst(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(2, mib)
	b.held[all[1]] = true
	_, err := b.Pack(ctx, all[1], Worth, nil)
	require.ErrorIs(t, err, ErrInUse)
	require.True(t, b.whole.Has(all[1]))
	b.held[all[1]] = false
	require.Positive(t, b.pack(all[1]))
	require.Equal(t, contents[1], b.read(all[1]))
	b.held[all[1]] = true
	require.ErrorIs(t, b.DropCopy(all[1]), ErrInUse)
	_, _, copied := b.Bytes(all[1])
	require.Positive(t, copied)

	freed, err := b.Remove(all[1])
	require.NoError(t, err)
	require.Zero(t, freed)
	require.True(t, b.OnlyPacked(all[1]), "it is needed")
	delete(b.needed, all[0])
	_, err = b.Remove(all[0])
	require.NoError(t, err)
	require.True(t, b.whole.Has(all[0]), "a recipe needs it")
	delete(b.needed, all[1])
	_, err = b.Remove(all[1])
	require.NoError(t, err)
	require.Empty(t, b.objects(), "the last recipe takes its bases with it")
}

// The whole form stays when a base was lost since the recipe was proven.
func TestWholeFileStaysWhenItsRecipeIsNotVerified(t *testing.T) {
	b := newBench(t)
	all, contents := b.variants(2, mib)
	b.onDropViews = func() {
		require.NoError(t, b.whole.Quarantine(all[0], "its bytes are others"))
	}
	_, err := b.Pack(context.Background(), all[1], Worth, nil)
	require.ErrorIs(t, err, cas.ErrNotFound)
	var gone *dedupe.BaseError
	require.ErrorAs(t, err, &gone)
	require.Equal(t, all[0], gone.Digest)
	require.Equal(t, []cas.Digest{all[1]}, b.objects(), "nothing is left of the recipe")
	_, packed := b.Recipes.Has(all[1])
	require.False(t, packed)
	require.Equal(t, contents[1], b.read(all[1]))
}

// A recipe that does not give its blob gets no name, and takes no place.
func TestWrongRecipesAreNotStored(t *testing.T) {
	b := newBench(t)
	all, _ := b.variants(2, mib)
	b.pack(all[1])
	before, err := b.recipeStore.Get(all[1])
	require.NoError(t, err)
	wrong := *before
	wrong.Extents = slices.Clone(wrong.Extents)
	for i := range wrong.Extents {
		if e := &wrong.Extents[i]; e.Base != wrong.Literals && e.From >= 4 {
			e.From -= 4
		}
	}
	require.False(t, wrong.Equal(before))
	require.True(t, IsDamage(b.putRecipe(context.Background(), &wrong)))
	wrong = *before
	wrong.Blob[0] ^= 1
	require.True(t, IsDamage(b.putRecipe(context.Background(), &wrong)))
	_, there := b.recipeStore.Has(wrong.Blob)
	require.False(t, there)
	require.NotContains(t, b.Recipes.Users(all[0]), wrong.Blob)
	require.NoError(t, b.Check(context.Background(), all[1]), "the one that was there is as it was")
}

// halfPacked leaves a blob as a crash may: with a recipe, and whole.
func (b *bench) halfPacked(d cas.Digest) {
	b.Helper()
	hold, done := b.holdAccounted()
	defer done()
	require.NoError(b, b.makeRecipe(context.Background(), d, search{minGain: Little}, hold))
	require.True(b, b.whole.Has(d))
	_, packed := b.Recipes.Has(d)
	require.True(b, packed)
}

// A base that is removed with the last recipe that takes from it may have a recipe as well,
// where packing it was begun: its literals are removed, too.
func TestInterruptedPackingLeavesNoFiles(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	part := noise(3, mib)
	base, _ := b.looked(slices.Concat(part, noise(4, 300), part))
	taker := b.put(slices.Concat(noise(5, 4096), part, noise(4, 300), part))
	_, err := b.Sharing.Examine(ctx, taker, nil)
	require.NoError(t, err)
	require.Positive(t, b.pack(taker))
	b.halfPacked(base)

	delete(b.needed, base)
	delete(b.needed, taker)
	_, err = b.Remove(taker)
	require.NoError(t, err)
	require.Empty(t, b.objects())
	_, there := b.recipeStore.Has(base)
	require.False(t, there)
}

// A blob that a crash left whole and with a recipe is packed as if it had none, and is whole
// without it, durably before the recipe is removed: the crash may have come before it was.
func TestABlobInBothFormsLosesItsRecipe(t *testing.T) {
	ctx := context.Background()
	for name, remove := range map[string]func(b *bench, d cas.Digest) error{
		"at the start": func(b *bench, _ cas.Digest) error { return b.RemoveRecipesOfWhole(ctx) },
		"made whole":   func(b *bench, d cas.Digest) error { return b.MakeWhole(ctx, d) },
		"packed": func(b *bench, d cas.Digest) error {
			_, err := b.Pack(ctx, d, Worth, nil)
			return err
		},
	} {
		order := &inOrder{}
		b := newBenchOn(t, t.TempDir(), order)
		all, contents := b.variants(3, mib)
		b.halfPacked(all[1])
		order.done = nil
		require.NoError(t, remove(b, all[1]))
		if name == "packed" {
			require.True(t, b.OnlyPacked(all[1]))
		} else {
			require.ElementsMatch(t, all, b.objects())
		}
		synced := "sync " + filepath.Join(b.Store.dir, "objects", all[1].String()[:2])
		removed := slices.Index(order.done, "unlink "+dedupe.RecipePath(b.Store.dir, all[1]))
		require.Contains(t, order.done[:max(removed, 0)], synced, name)
		for i, d := range all {
			require.Equal(t, contents[i], b.read(d))
		}
		b.requireNothingLeft()
	}
}

// A wrong recipe of a blob that is sound is no damage: the blob stays whole, it is noted that
// nothing is to be had of it, and packing goes on. With a base whose bytes are others it is an
// error like any other.
func TestAWrongRecipeOfASoundBlobIsNoDamage(t *testing.T) {
	for _, damaged := range []bool{false, true} {
		b := newBench(t)
		ctx := context.Background()
		common, own := noise(0, mib), noise(7, mib/4)
		content := slices.Concat(common, own)
		base, d := b.put(common), b.put(content)
		for _, one := range []cas.Digest{base, d} {
			_, err := b.Sharing.Examine(ctx, one, nil)
			require.NoError(t, err)
		}
		path := filepath.Join(b.Store.dir, "objects", base.String()[:2], base.String())
		write := func(at []byte) {
			require.NoError(t, os.Chmod(path, 0o600))
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			require.NoError(t, err)
			_, err = f.WriteAt(at, mib/2)
			require.NoError(t, errors.Join(err, f.Close()))
		}
		reads := 0
		b.onReserve = func() { // it has been compared; later reads find what was stored
			if b.onReserve = nil; damaged {
				write(noise(8, mib/4))
			} else {
				write(common[mib/2 : mib*3/4])
			}
		}
		freed, err := b.Pack(ctx, d, Worth, func(context.Context) error {
			if reads++; reads == 2 { // the first one is of the blob itself
				write(own) // as if the comparison had found it there
			}
			return nil
		})
		require.Nil(t, b.onReserve)
		require.Zero(t, freed)
		require.True(t, b.whole.Has(d))
		_, there := b.recipeStore.Has(d)
		require.False(t, there)
		if damaged {
			require.True(t, IsMissingOrDamaged(err), err)
			continue
		}
		require.NoError(t, err)
		require.Zero(t, b.Sharing.Saving(d))
		require.True(t, b.Sharing.IsKnown(d))
		require.Equal(t, content, b.read(d))
	}
}

// Nothing is read, or stays, for the sake of a blob that may not take from it.
func TestABlobTakesOnlyFromWhereItMay(t *testing.T) {
	b := newBench(t)
	content := noise(0, mib)
	first := b.put(append(noise(1, 4096), content...))
	b.scopeOf[first] = "one"
	_, err := b.Sharing.Examine(context.Background(), first, nil)
	require.NoError(t, err)
	second := b.put(append(noise(2, 4096), content...))
	for whose, saves := range map[string]bool{"another": false, "": false, "one": true} {
		b.scopeOf[second] = whose
		found, err := b.Sharing.Examine(context.Background(), second, nil)
		require.NoError(t, err)
		require.Equal(t, saves, found.Saving > 0, whose)
	}
}

// A copy has a reservation while it is written. Where there is no space unused copies are removed
// first; where all are in use it fails. On a full disk it fails.
func TestACopyHasAPlace(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(4, mib)
	for _, d := range all[1:] {
		require.Positive(t, b.pack(d))
	}
	b.reserveCalls = 0
	require.Equal(t, contents[1], b.read(all[1]))
	require.Equal(t, 1, b.reserveCalls)
	b.held[all[1]], b.diskFull, b.reserveCalls = true, true, 0
	require.ErrorIs(t, b.Unpack(ctx, all[2], nil, nil), ErrNoSpace)
	require.Equal(t, 1, b.reserveCalls, "nothing was removed for it")
	_, _, first := b.Bytes(all[1])
	_, _, second := b.Bytes(all[2])
	require.True(t, first > 0 && second == 0, "the one that is held stays, and nothing goes beyond")
	require.Zero(t, b.reserved)
	b.diskFull = false
	require.NoError(t, b.Unpack(ctx, all[2], nil, nil))
	b.failOnce = true
	var told atomic.Int64
	require.NoError(t, b.Unpack(ctx, all[3], func() { told.Add(1) }, func(done, total int64) {
		if done == total {
			told.Add(1)
		}
	}))
	_, _, second = b.Bytes(all[2])
	require.Zero(t, second, "nobody had it")
	require.EqualValues(t, 2, told.Load(), "that it begins, and that all is there")
	require.Zero(t, b.reserved)

	b.fitsError = syscall.ENOSPC
	require.NoError(t, b.DropCopy(all[3]))
	b.reserveCalls = 0
	require.ErrorIs(t, b.Unpack(ctx, all[3], nil, nil), syscall.ENOSPC)
	require.Zero(t, b.reserveCalls)
}

// A blob without a known sketch is not read again for that: comparing it takes as many reads as
// with a known sketch.
func TestABlobIsReadOnceForSketchAndMatch(t *testing.T) {
	b := newBench(t)
	common := noise(0, mib)
	first, second := b.put(common), b.put(append(noise(1, 4096), common...))
	look := func(saves bool) (reads int64) {
		d := first
		if saves {
			d = second
		}
		var n atomic.Int64
		found, err := b.Sharing.Examine(context.Background(), d, func(context.Context) error {
			n.Add(1)
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, saves, found.Saving > 0)
		return n.Load()
	}
	look(false)
	unknown := look(true)
	require.Positive(t, unknown)
	require.Equal(t, look(true), unknown)
}

func (b *bench) bases(d cas.Digest) (all []cas.Digest) {
	b.Helper()
	p, ok := b.Recipes.Has(d)
	require.True(b, ok)
	for _, one := range p.Bases {
		all = append(all, one.Digest)
	}
	return all
}
