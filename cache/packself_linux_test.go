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
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/unixsock/wire"
)

// repeated is a request for a model that repeats the weights of variants, as the build of a
// weight-sharing group does if the execution provider stores them once for each member.
func (b *bench) repeated(times int) *request.Request {
	model := compilertest.DenseModel(7, 512, 1)
	for i := 1; i < times; i++ {
		again := model.Initializers[0]
		again.Name = string(rune('a' + i))
		model.Initializers = append(model.Initializers, again)
	}
	return b.requestOf(model)
}

// repeatedPart asks for a model of n² weights, the first part² of which it has a second time.
func (b *bench) repeatedPart(n, part int) *request.Request {
	model, again := compilertest.DenseModel(7, n, 1),
		compilertest.DenseModel(7, part, 1).Initializers[0]
	again.Name = "again"
	model.Initializers = append(model.Initializers, again)
	return b.requestOf(model)
}

func (b *bench) requestOf(model tinymodel.Model) *request.Request {
	path := filepath.Join(b.TempDir(), "model.onnx")
	require.NoError(b, os.WriteFile(path, model.Encode(), 0o644))
	return b.request(b.openFile(path))
}

// Bytes that a blob repeats are stored once when it is packed, whether there is another blob like
// it or not.
func TestABuildThatRepeatsItselfIsPacked(t *testing.T) {
	b := newBench(t)
	builds, files := b.stores([]*request.Request{b.repeated(3)})
	saving := b.cache.Store.Packer().PackSaving(builds[0].ID)
	require.Greater(t, saving, int64(19<<20/10), "two of the three")
	require.Equal(t, saving, b.packable())
	require.InDelta(t, saving, b.pack(builds[0]), 16<<10)
	require.Zero(t, b.packable())
	require.True(t, b.cache.packing.OnlyPacked(large(builds[0])))
	a, phases := b.phases(b.repeated(3))
	require.Contains(t, phases, lookup.Unpacking)
	require.Equal(t, files[0], b.read(a))

	// One that has the same takes from what is left of it.
	later, _ := b.stores([]*request.Request{b.variant(1)})
	require.Greater(t, b.pack(later[0]), int64(900<<10))
}

func (b *bench) packable() int64 {
	u, err := b.cache.Queries.Usage(context.Background(), b.self(), &wire.Usage{}, nil)
	require.NoError(b, err)
	return u.PackableBytes
}

// The recipe is on the disk beside the blob for a moment, and no build is evicted for that: the
// store exceeds its budget by as much as packing frees at the end.
func TestPackingEvictsNothing(t *testing.T) {
	b := newBench(t)
	builds, _ := b.stores([]*request.Request{b.repeated(3), b.request(b.model(1))})
	b.later.Add(int64(time.Hour))
	used, err := b.cache.Store.Account()
	require.NoError(t, err)
	tight := b.options()
	tight.Space.Budget = store.Amount{Bytes: used.Counted() + 8*cas.Block}
	require.NoError(t, b.cache.Reload(tight))
	most := int64(0)
	d := large(builds[0])
	freed, err := b.cache.packing.Pack(context.Background(), d, packing.Little,
		func(ctx context.Context) error {
			above, err := b.cache.Store.Collector().AboveBounds(ctx, false)
			require.False(t, above)
			now, err2 := b.cache.Store.Account()
			most = max(most, now.Counted()+b.reserved())
			return errors.Join(err, err2)
		})
	require.NoError(t, err)
	require.Positive(t, freed)
	require.Greater(t, most, tight.Space.Budget.Bytes, "the literals stood beside the whole form")
	require.Zero(t, b.cache.Store.Ledger().Reserved().Transient)
	require.Len(t, b.list(), 2)
}

// A base that repeats itself stays whole by itself, so that hits on it need not unpack it. By hand
// it is packed: its literals are the base then.
func TestABuildThatRepeatsItselfIsABase(t *testing.T) {
	b := newBench(t)
	asks := func() []*request.Request { return []*request.Request{b.repeated(3), b.variant(1)} }
	builds, files := b.stores(asks())
	require.Greater(t, b.pack(builds[1]), int64(900<<10))
	b.pass(60 * 24 * time.Hour)
	require.True(t, b.cache.cas.Has(large(builds[0])))
	results, err := b.cache.Pack(context.Background(), b.self(),
		[]string{builds[0].BuildKey.String()}, false, false, nil)
	require.NoError(t, err)
	require.Equal(t, store.PackedNow, results.Builds[0].Outcome)
	require.Greater(t, results.Builds[0].FreesBytes, int64(19<<20/10))
	require.True(t, b.cache.packing.OnlyPacked(large(builds[0])))
	require.Empty(t, b.cache.packing.Recipes.Users(large(builds[0])))
	b.exact()
	b.requireSound()
	for i, r := range asks() {
		a, phases := b.phases(r)
		require.Contains(t, phases, lookup.Unpacking)
		require.Equal(t, files[i], b.read(a))
		require.NoError(t, a.View.Close())
	}
}

// A blob that repeats little is packed by hand only, and is whole again after its first use,
// because it would be stored nearly twice otherwise.
func TestSmallSavingsArePackedByHand(t *testing.T) {
	b := newBench(t)
	ask := func() *request.Request { return b.repeatedPart(640, 200) }
	builds, files := b.stores([]*request.Request{ask()})
	d := large(builds[0])
	require.Positive(t, b.cache.Store.Packer().PackSaving(builds[0].ID))
	b.pass(60 * 24 * time.Hour)
	require.True(t, b.cache.cas.Has(d))
	require.Positive(t, b.pack(builds[0]))
	require.True(t, b.cache.packing.OnlyPacked(d))
	b.pass(time.Hour)
	require.True(t, b.cache.packing.OnlyPacked(d), "no application has used it")
	b.exact()
	a := b.acquire(ask())
	require.Equal(t, request.Hit, a.Outcome)
	require.Equal(t, files[0], b.read(a))
	require.NoError(t, a.View.Close())
	b.pass(time.Hour)
	require.True(t, b.cache.cas.Has(d))
	b.exact()
	b.requireSound()
}

// Matches that are outdated because a blob was packed meanwhile are compared again.
func TestOutdatedMatchesAreComparedAgain(t *testing.T) {
	b := newBench(t)
	builds, _ := b.stores([]*request.Request{b.repeated(3), b.variant(1)})
	d := large(builds[1])
	require.Positive(t, b.pack(builds[0]))
	require.Zero(t, b.cache.Store.Packer().PackSaving(builds[1].ID),
		"what it would take from is packed")
	b.pass(0)
	require.False(t, b.cache.packing.Sharing.IsKnown(d))
	// as the next time by itself
	_, err := b.cache.packing.Sharing.Examine(context.Background(), d, nil)
	require.NoError(t, err)
	b.pass(3 * time.Hour)
	require.True(t, b.cache.packing.OnlyPacked(d))
	require.Contains(t, b.cache.packing.Recipes.Users(b.literals(builds[0])), d)
}

// literals are what a packed build has of its own.
func (b *bench) literals(build *index.Build) cas.Digest {
	b.Helper()
	p, ok := b.cache.packing.Recipes.Has(large(build))
	require.True(b, ok && p.Literals != dedupe.NoLiterals)
	return p.Bases[p.Literals].Digest
}
