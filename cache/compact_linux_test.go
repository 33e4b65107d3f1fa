package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
)

// family is a bench with variants of one model, the first of them the base of the others; none was
// requested for a day.
func family(t *testing.T, n int) (b *bench, builds []*index.Build, files []map[string]string) {
	b = newBench(t)
	builds, files = b.similar(n)
	for _, build := range builds[1:] {
		require.Positive(t, b.pack(build))
	}
	b.later.Add(int64(25 * time.Hour))
	return b, builds, files
}

// askFor asks for a variant as an application does that is closed soon.
func (b *bench) askFor(variant int, want map[string]string) {
	b.Helper()
	r := b.variant(variant)
	r.KeepsView = true
	a := b.acquire(r)
	require.Equal(b, request.Hit, a.Outcome)
	require.Equal(b, want, b.read(a))
	require.NoError(b, a.View.Close())
}

func (b *bench) packCold(after time.Duration) {
	b.Helper()
	require.NoError(b, b.cache.Store.Packer().
		Pack(context.Background(), store.Packing{When: store.PackCold, After: after}))
}

func (b *bench) objects() int64 {
	b.Helper()
	n, err := b.cache.objectBytes(context.Background())
	require.NoError(b, err)
	return n
}

// The variant that is used becomes the base of the unused one.
func TestTheBaseIsTheOneThatIsUsed(t *testing.T) {
	b, builds, files := family(t, 3)
	before := b.objects()
	b.askFor(2, files[1])
	b.packCold(2 * time.Hour)
	require.True(t, b.cache.cas.Has(large(builds[1])), "it is used, and whole")
	require.True(t, b.cache.packing.OnlyPacked(large(builds[0])),
		"it was the base, and nobody uses it")
	require.True(t, b.cache.packing.OnlyPacked(large(builds[2])))
	_, recipe, unpacked := b.cache.packing.Bytes(large(builds[1]))
	require.Zero(t, recipe)
	require.Zero(t, unpacked, "the whole form does for that")
	require.InDelta(t, before, b.objects(), 32<<10, "one variant is whole, as before")
	proven, ok := b.cache.index.RecipeStamps().LoadStamp(large(builds[2]))
	require.True(t, ok)
	now, err := cas.StampPath(filepath.Join(b.state, "recipes", large(builds[2]).String()[:2],
		large(builds[2]).String()))
	require.NoError(t, err)
	require.True(t, proven.Holds(now), "it need not be hashed when it is unpacked")
	_, phases := b.phases(b.variant(2))
	require.NotContains(t, phases, lookup.Unpacking)
	b.askFor(1, files[0])
	b.askFor(3, files[2])
	require.EqualValues(t, 3, b.compiler.Compiles.Load())

	b.reopen()
	b.later.Add(int64(3 * time.Hour))
	b.packCold(2 * time.Hour)
	for i, build := range builds {
		_, _, unpacked := b.cache.packing.Bytes(large(build))
		require.Zero(t, unpacked, "variant %d was not used for three hours", i+1)
		b.askFor(i+1, files[i])
	}
}

// A variant that was never packed, because it is used all the time, replaces the base as well.
func TestAVariantThatWasNeverPackedBecomesTheBase(t *testing.T) {
	b := newBench(t)
	builds, files := b.similar(3)
	require.Positive(t, b.pack(builds[2]))
	b.later.Add(int64(25 * time.Hour))
	b.askFor(2, files[1])
	b.packCold(2 * time.Hour)
	require.True(t, b.cache.cas.Has(large(builds[1])))
	require.True(t, b.cache.packing.OnlyPacked(large(builds[0])))
	for i := range builds {
		b.askFor(i+1, files[i])
	}
}

// A client that has the unpacked copy open keeps it, and it is removed when none has.
func TestCompactingLeavesViewsAlone(t *testing.T) {
	b, builds, files := family(t, 2)
	a := b.acquire(b.variant(2))
	b.packCold(2 * time.Hour)
	require.True(t, b.cache.packing.OnlyPacked(large(builds[0])))
	require.Equal(t, files[1], b.read(a))
	_, _, unpacked := b.cache.packing.Bytes(large(builds[1]))
	require.Positive(t, unpacked)
	require.NoError(t, a.View.Close())
	b.later.Add(int64(time.Hour)) // it was given out by path
	b.packCold(2 * time.Hour)
	_, _, unpacked = b.cache.packing.Bytes(large(builds[1]))
	require.Zero(t, unpacked)
	b.askFor(2, files[1])
}

func TestCompactionSkips(t *testing.T) {
	for name, c := range map[string]func(b *bench, builds []*index.Build,
		files []map[string]string){
		"nobody uses the other": func(*bench, []*index.Build, []map[string]string) {},
		"the base is used today": func(b *bench, _ []*index.Build, files []map[string]string) {
			b.askFor(1, files[0])
			b.later.Add(int64(20 * time.Hour))
		},
		"the base is pinned": func(b *bench, builds []*index.Build, _ []map[string]string) {
			_, err := b.cache.Pin(context.Background(), b.self(),
				[]string{builds[0].BuildKey.String()}, false)
			require.NoError(b, err)
		},
		"the base is held": func(b *bench, _ []*index.Build, _ []map[string]string) {
			b.acquire(b.variant(1))
			b.later.Add(int64(25 * time.Hour))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, builds, files := family(t, 2)
			c(b, builds, files)
			if name != "nobody uses the other" {
				b.askFor(2, files[1])
			}
			b.packCold(2 * time.Hour)
			require.True(t, b.cache.cas.Has(large(builds[0])))
			require.True(t, b.cache.packing.OnlyPacked(large(builds[1])))
			b.askFor(2, files[1])
		})
	}
}

// A private blob of one user never becomes the base of shared blobs.
func TestPrivateBlobsNeverReplaceSharedBases(t *testing.T) {
	b := newBench(t)
	own := b.variant(2)
	own.Store = "user"
	builds, files := b.stores([]*request.Request{b.variant(1), own})
	require.NotEqual(t, builds[0].Scope, builds[1].Scope)
	require.Positive(t, b.pack(builds[1]))
	b.later.Add(int64(25 * time.Hour))
	own = b.variant(2)
	own.Store, own.KeepsView = "user", true
	a := b.acquire(own)
	require.Equal(t, files[1], b.read(a))
	require.NoError(t, a.View.Close())
	b.packCold(2 * time.Hour)
	require.True(t, b.cache.cas.Has(large(builds[0])))
	require.True(t, b.cache.packing.OnlyPacked(large(builds[1])))
}

// Compacting that was interrupted goes on after a restart, though no build of the two is used any
// more.
func TestInterruptedCompactingContinues(t *testing.T) {
	b, builds, files := family(t, 3)
	stopped := errors.New("stopped")
	base := large(builds[0])
	err := b.cache.packing.Compact(context.Background(),
		packing.Family{Hot: large(builds[1]), Base: base}, func(context.Context) error {
			if b.cache.cas.Has(large(builds[1])) {
				return stopped
			}
			return nil
		})
	require.ErrorIs(t, err, stopped)
	require.True(t, b.cache.cas.Has(base) && b.cache.cas.Has(large(builds[1])))
	b.reopen()
	for _, build := range builds[:2] { // as is done by itself
		_, err := b.cache.packing.Sharing.Examine(context.Background(), large(build), nil)
		require.NoError(t, err)
	}
	b.packCold(2 * time.Hour)
	require.NotEqual(t, b.cache.cas.Has(base), b.cache.cas.Has(large(builds[1])),
		"one of them is packed with the other")
	for i := range builds {
		b.askFor(i+1, files[i])
	}
}

// A base that no build needs any more is removed: a build that took from it becomes whole.
func TestABaseThatNoBuildNeedsIsRemoved(t *testing.T) {
	b, builds, files := family(t, 3)
	before := b.objects()
	require.NoError(t, b.remove(builds[0]))
	require.True(t, b.cache.cas.Has(large(builds[0])), "others take from it")
	b.packCold(2 * time.Hour)
	require.False(t, b.cache.cas.Has(large(builds[0])))
	require.NotEqual(t, b.cache.cas.Has(large(builds[1])), b.cache.cas.Has(large(builds[2])))
	require.InDelta(t, before, b.objects(), 32<<10, "one variant is whole, as before")
	b.exact()
	for i := range 2 {
		b.askFor(i+2, files[i+1])
	}
	require.EqualValues(t, 3, b.compiler.Compiles.Load())
}

// A blob that a crash left both whole and with a recipe has no recipe after the start.
func TestARecipeOfABlobThatIsWholeIsRemoved(t *testing.T) {
	b, builds, files := family(t, 2)
	d := large(builds[1])
	recipe := b.recipePath(d)
	raw, err := os.ReadFile(recipe)
	require.NoError(t, err)
	require.NoError(t, b.cache.packing.MakeWhole(context.Background(), d))
	b.close()
	require.NoError(t, os.WriteFile(recipe, raw, 0o444))
	b.open()
	require.NoError(t, b.cache.Store.RemoveLeftovers(context.Background()))
	require.True(t, b.cache.cas.Has(d))
	require.Empty(t, b.cache.packing.Recipes.Users(large(builds[0])))
	_, packed := b.cache.packing.Recipes.Has(d)
	require.False(t, packed)
	b.exact()
	b.askFor(2, files[1])
}
