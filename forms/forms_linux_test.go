package forms

import (
	"context"
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

// A blob is packed, served from a copy, made whole again and removed, and each time has the forms that it should have and its own bytes.
func TestABlobGoesThroughAllItsForms(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(2, mib)
	require.Greater(t, b.Saving(all[1]), int64(mib/2))
	require.Zero(t, b.Saving(all[0]), "it stood alone")

	freed := b.pack(all[1])
	require.Greater(t, freed, int64(mib/2))
	require.Equal(t, []int64{int64(len(contents[1]))}, b.goes, "what is written makes room")
	require.Zero(t, b.user.passing)
	require.True(t, b.OnlyPacked(all[1]))
	require.Equal(t, all[1], b.Users(all[0])[0])
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
	require.Empty(t, b.Users(all[0]))
	require.ElementsMatch(t, all, b.objects(), "no literals are left")

	for _, d := range all {
		delete(b.needed, d)
		freed, err := b.Remove(d)
		require.NoError(t, err)
		require.Positive(t, freed)
	}
	require.Empty(t, b.objects())
}

// The owner is asked before anything goes: what it needs, or somebody has, stays.
func TestTheOwnerIsAskedBeforeAnythingGoes(t *testing.T) {
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
	require.Empty(t, b.objects(), "the last recipe takes its containers with it")
}

// The whole form stays when a container has gone since the recipe was proven.
func TestAWholeFormThatTheRecipeIsNoSubstituteForStays(t *testing.T) {
	b := newBench(t)
	all, contents := b.variants(2, mib)
	hold := b.whole.Hold()
	worth, err := b.ensureRecipe(context.Background(), all[1], Worth, hold, nil)
	require.NoError(t, err)
	require.True(t, worth)
	b.Release(hold)
	require.True(t, b.whole.Has(all[0]))
	require.NoError(t, b.whole.Quarantine(all[0], "its bytes are others"))
	_, err = b.removeWhole(all[1])
	require.ErrorIs(t, err, cas.ErrNotFound)
	var gone *dedupe.ContainerError
	require.ErrorAs(t, err, &gone)
	require.Equal(t, all[0], gone.Digest)
	require.True(t, b.whole.Has(all[1]))
	require.Equal(t, contents[1], b.read(all[1]))
}

// A recipe that does not give its blob is not kept, whatever it was made of.
func TestARecipeThatGivesOtherBytesIsNotKept(t *testing.T) {
	b := newBench(t)
	all, _ := b.variants(2, mib)
	b.pack(all[1])
	r, err := b.shelf.Get(all[1])
	require.NoError(t, err)
	r.Blob[0] ^= 1
	require.Error(t, b.writeRecipe(context.Background(), r))
	_, there := b.shelf.Has(r.Blob)
	require.False(t, there)
	require.NotContains(t, b.Users(all[0]), r.Blob)
	require.NoError(t, b.Check(context.Background(), all[1]), "the other one is as it was")
}

// A container that goes with the last recipe that takes from it may have a recipe as well, where packing it was begun: its literals go, too.
func TestNothingStaysOfAContainerThatWasBeingPacked(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	part := noise(3, mib)
	container, _ := b.looked(slices.Concat(part, noise(4, 300), part))
	taker := b.put(slices.Concat(noise(5, 4096), part, noise(4, 300), part))
	_, err := b.LookAt(ctx, taker, nil)
	require.NoError(t, err)
	require.Positive(t, b.pack(taker))
	hold := b.whole.Hold()
	worth, err := b.ensureRecipe(ctx, container, Little, hold, nil)
	require.NoError(t, err)
	require.True(t, worth)
	b.Release(hold)
	require.True(t, b.whole.Has(container), "it was only begun")

	delete(b.needed, container)
	delete(b.needed, taker)
	_, err = b.Remove(taker)
	require.NoError(t, err)
	require.Empty(t, b.objects())
	_, there := b.shelf.Has(container)
	require.False(t, there)
}

// A wrong recipe of a blob that is sound is no damage: the blob stays whole, it is noted that nothing is to be had of it, and packing goes on. With a container
// whose bytes are others it is an error like any other.
func TestAWrongRecipeOfASoundBlobIsNoDamage(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(3, mib)
	require.Positive(t, b.Saving(all[1]))
	wrong := &dedupe.Recipe{Blob: all[1], Size: int64(len(contents[1])), Literals: dedupe.NoLiterals, Containers: []dedupe.Container{{Digest: all[0], Size: int64(len(contents[0]))}},
		Extents: []dedupe.Extent{{Length: int64(len(contents[1]))}}}
	require.Equal(t, len(contents[0]), len(contents[1]))

	sound, err := b.tryRecipe(ctx, wrong)
	require.NoError(t, err)
	require.False(t, sound)
	require.Zero(t, b.Saving(all[1]))
	require.True(t, b.whole.Has(all[1]))
	_, there := b.shelf.Has(all[1])
	require.False(t, there)
	require.Equal(t, contents[1], b.read(all[1]))
	require.Positive(t, b.pack(all[2]))

	path := filepath.Join(b.Store.dir, "objects", all[0].String()[:2], all[0].String())
	require.NoError(t, os.Chmod(path, 0o600))
	contents[0][0] ^= 1
	require.NoError(t, os.WriteFile(path, contents[0], 0o600))
	wrong.Extents[0].Length-- // the last byte stands elsewhere: another recipe
	wrong.Extents = append(wrong.Extents, dedupe.Extent{At: wrong.Size - 1, Length: 1})
	_, err = b.tryRecipe(ctx, wrong)
	require.True(t, Lost(err), err)
}

// Nothing is read, or stays, for the sake of a blob that may not take from it.
func TestABlobTakesOnlyFromWhereItMay(t *testing.T) {
	b := newBench(t)
	content := noise(0, mib)
	first := b.put(append(noise(1, 4096), content...))
	b.of[first] = "one"
	_, err := b.LookAt(context.Background(), first, nil)
	require.NoError(t, err)
	second := b.put(append(noise(2, 4096), content...))
	for whose, saves := range map[string]bool{"another": false, "": false, "one": true} {
		b.of[second] = whose
		found, err := b.LookAt(context.Background(), second, nil)
		require.NoError(t, err)
		require.Equal(t, saves, found.Saving > 0, whose)
	}
}

// A copy has its place while it is written. Where there is none copies that nobody has go first; where somebody has all of them there is none. A disk
// that is full is full.
func TestACopyHasAPlace(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(4, mib)
	for _, d := range all[1:] {
		require.Positive(t, b.pack(d))
	}
	b.asked = nil
	require.Equal(t, contents[1], b.read(all[1]))
	require.Equal(t, []Urgency{Wait}, b.asked)
	b.held[all[1]], b.full, b.asked = true, true, nil
	require.ErrorIs(t, b.Unpack(ctx, all[2], nil, nil), ErrNoRoom)
	require.Equal(t, []Urgency{Wait, AtOnce}, b.asked, "whoever makes room is waited for once")
	_, _, first := b.Bytes(all[1])
	_, _, second := b.Bytes(all[2])
	require.True(t, first > 0 && second == 0, "the one that is held stays, and nothing goes beyond")
	require.Zero(t, b.reserved)
	b.full = false
	require.NoError(t, b.Unpack(ctx, all[2], nil, nil))
	b.once = true
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

	b.fits = syscall.ENOSPC
	require.NoError(t, b.DropCopy(all[3]))
	b.asked = nil
	require.ErrorIs(t, b.Unpack(ctx, all[3], nil, nil), syscall.ENOSPC)
	require.Empty(t, b.asked)
}

// What is used becomes whole, and its container is packed with what it has; where there is no room for both for a moment, another time.
func TestContainersAreExchanged(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(3, mib)
	require.Positive(t, b.pack(all[1]))
	require.Positive(t, b.pack(all[2]))
	pairs, err := b.Exchangeable(ctx, func(p Pair) bool { return p.Used == all[2] })
	require.NoError(t, err)
	require.Equal(t, []Pair{{all[2], all[0]}}, pairs)

	b.full = true
	require.ErrorIs(t, b.Exchange(ctx, pairs[0], nil), ErrInUse)
	require.True(t, b.OnlyPacked(all[2]))
	b.full = false
	require.NoError(t, b.Exchange(ctx, pairs[0], nil))
	require.True(t, b.whole.Has(all[2]))
	require.True(t, b.OnlyPacked(all[0]) && b.OnlyPacked(all[1]))
	left, err := b.Unfinished(ctx)
	require.NoError(t, err)
	require.Empty(t, left)
	for i, d := range all {
		require.NoError(t, b.Check(ctx, d))
		require.Equal(t, contents[i], b.read(d))
	}
}

// Of a container that nobody needs any more nothing stays when another one has taken its place.
func TestNothingStaysOfAContainerThatIsNotNeeded(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(3, mib)
	require.Positive(t, b.pack(all[1]))
	require.Positive(t, b.pack(all[2]))
	delete(b.needed, all[0])
	require.NoError(t, b.Exchange(ctx, Pair{Used: all[2], Idle: all[0]}, nil))
	require.True(t, b.whole.Has(all[2]))
	_, packed := b.Packed(all[0])
	require.False(t, packed || b.whole.Has(all[0]))
	for _, i := range []int{1, 2} {
		require.NoError(t, b.Check(ctx, all[i]))
		require.Equal(t, contents[i], b.read(all[i]))
	}
	for _, d := range b.objects() {
		_, needed := b.needed[d]
		require.True(t, needed || len(b.shelf.Users(d)) > 0, "%s", d)
	}
}

// A blob whose sketch is not known is not read once more for that: it is looked at with as many reads as when the sketch is known.
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
		found, err := b.LookAt(context.Background(), d, func(context.Context) error { n.Add(1); return nil })
		require.NoError(t, err)
		require.Equal(t, saves, found.Saving > 0)
		return n.Load()
	}
	look(false)
	unknown := look(true)
	require.Positive(t, unknown)
	require.Equal(t, look(true), unknown)
}

// A container that nobody but recipes needs any more keeps only what these need of it.
func TestADeadContainerIsRewritten(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	large := noise(0, 2*mib)
	container := b.put(large)
	_, err := b.LookAt(ctx, container, nil)
	require.NoError(t, err)
	content := slices.Concat(large[:mib/2], noise(1, 4096), large[mib:mib+mib/4])
	small := b.put(content)
	require.Positive(t, b.pack(small))
	require.NoError(t, b.RewriteDead(ctx, nil))
	require.True(t, b.whole.Has(container), "all of it is needed")
	delete(b.needed, container)
	require.NoError(t, b.RewriteDead(ctx, nil))
	require.False(t, b.whole.Has(container))
	require.True(t, b.OnlyPacked(small))
	var left int64
	for _, d := range b.objects() {
		whole, _, _ := b.Bytes(d)
		left += whole
	}
	require.InDelta(t, mib*3/4, left, 64<<10)
	require.Equal(t, content, b.read(small))
}

// A container of which more than half is needed stays as it is: to write most of it once more frees too little.
func TestAContainerThatIsMostlyNeededIsNotRewritten(t *testing.T) {
	b := newBench(t)
	large := noise(0, 2*mib)
	container := b.put(large)
	_, err := b.LookAt(context.Background(), container, nil)
	require.NoError(t, err)
	small := b.put(slices.Concat(large[:mib+mib/4], noise(1, 4096)))
	require.Positive(t, b.pack(small))
	delete(b.needed, container)
	require.NoError(t, b.RewriteDead(context.Background(), nil))
	require.True(t, b.whole.Has(container))
}

// A recipe is not replaced by one that takes other bytes.
func TestARecipeMovesOnlyToTheSameBytes(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, _ := b.variants(2, mib)
	b.pack(all[1])
	r, err := b.shelf.Get(all[1])
	require.NoError(t, err)
	recipes := []*dedupe.Recipe{r}
	ranges := dedupe.Needed(all[0], recipes)
	live := int64(0)
	for _, one := range ranges {
		live += one.Length
	}
	other := b.put(noise(9, int(live)))
	require.Error(t, b.moveAll(ctx, recipes, all[0], dedupe.Container{Digest: other, Size: live}, ranges))
	require.Contains(t, b.Users(all[0]), all[1], "it takes from where it did")
	require.NoError(t, b.Check(ctx, all[1]))
}

// Where a blob is all that is needed of such a container it becomes whole, and what else takes from there takes from it.
func TestABlobThatIsAllThatIsNeededOfAContainerBecomesWhole(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	large := noise(0, 2*mib)
	container := b.put(large)
	_, err := b.LookAt(ctx, container, nil)
	require.NoError(t, err)
	part, other := b.put(large[:mib/2]), b.put(append(noise(1, 4096), large[:mib/2]...))
	require.Positive(t, b.pack(part))
	require.Positive(t, b.pack(other))
	require.Equal(t, []cas.Digest{container}, b.containers(part))
	require.Contains(t, b.containers(other), container)
	delete(b.needed, container)
	require.NoError(t, b.RewriteDead(ctx, nil))
	require.False(t, b.whole.Has(container))
	require.True(t, b.whole.Has(part))
	_, packed := b.Packed(part)
	require.False(t, packed)
	require.Contains(t, b.containers(other), part)
	require.Equal(t, large[:mib/2], b.read(part))
	require.NoError(t, b.Check(ctx, other))
}

func (b *bench) containers(d cas.Digest) (all []cas.Digest) {
	b.Helper()
	p, ok := b.Packed(d)
	require.True(b, ok)
	for _, one := range p.Containers {
		all = append(all, one.Digest)
	}
	return all
}
