package cache

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/lookup"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/store"
	"github.com/epcached/epcached/store/packing"
	"github.com/epcached/epcached/store/views"
	"github.com/epcached/epcached/unixsock/wire"
)

// variant asks for a form of one model: all have the same megabyte of weights.
func (b *bench) variant(batch int) *request.Request { return b.dense(512, batch) }

// dense asks for a model of n² weights, which are the first of those of a larger one.
func (b *bench) dense(n, batch int) *request.Request {
	path := filepath.Join(b.TempDir(), "model.onnx")
	require.NoError(b, os.WriteFile(path, compilertest.Dense(7, n, batch), 0o644))
	return b.request(b.openFile(path))
}

// similar makes unleased builds of n variants, and surveys them; it returns them with their files'
// contents.
func (b *bench) similar(n int) (builds []*index.Build, files []map[string]string) {
	var asks []*request.Request
	for i := range n {
		asks = append(asks, b.variant(i+1))
	}
	return b.stores(asks)
}

func (b *bench) stores(asks []*request.Request) (builds []*index.Build, files []map[string]string) {
	for _, r := range asks {
		a := b.acquire(r)
		builds, files = append(builds, a.Build), append(files, b.read(a))
		require.NoError(b, a.View.Close())
	}
	b.later.Add(int64(time.Hour))
	for _, build := range builds {
		for d := range build.DistinctBlobs() {
			_, err := b.cache.packing.Sharing.Examine(context.Background(), d, nil)
			require.NoError(b, err)
		}
	}
	return builds, files
}

// large is the digest of a build's binary.
func large(build *index.Build) cas.Digest {
	d, most := cas.Digest{}, int64(0)
	for _, f := range build.Files {
		if f.Size > most {
			d, most = f.Digest, f.Size
		}
	}
	return d
}

func (b *bench) pack(build *index.Build) int64 {
	b.Helper()
	freed, err := b.cache.Store.Packer().PackBuild(context.Background(), build.ID)
	require.NoError(b, err)
	return freed
}

// packedPair is a bench with two variants, the second of them packed.
func packedPair(t *testing.T) (b *bench, builds []*index.Build, files []map[string]string) {
	b = newBench(t)
	builds, files = b.similar(2)
	require.Positive(t, b.pack(builds[1]))
	require.True(t, b.cache.packing.OnlyPacked(large(builds[1])))
	return b, builds, files
}

// packedPairs makes a packedPair once, and what it returns a copy of it at each call, which is not
// open.
func packedPairs(t *testing.T) func(t *testing.T) (*bench, []*index.Build, []map[string]string) {
	origin, builds, files := packedPair(t)
	again := origin.copies()
	return func(t *testing.T) (*bench, []*index.Build, []map[string]string) {
		return again(t), builds, files
	}
}

func (b *bench) phases(r *request.Request) (a *request.Answer, phases []string) {
	b.Helper()
	a, err := b.cache.Acquire(context.Background(), r,
		func(p request.Progress) { phases = append(phases, p.Phase) })
	require.NoError(b, err)
	b.Cleanup(func() { a.View.Close() })
	return a, phases
}

func TestAPackedBuildIsAHit(t *testing.T) {
	b := newBench(t)
	builds, files := b.similar(2)
	promised := b.cache.Store.Packer().PackSaving(builds[1].ID)
	require.Greater(t, promised, int64(900<<10), "nearly all of it stands in the other")
	require.Zero(t, b.cache.Store.Packer().PackSaving(builds[0].ID), "which is the base")
	before, err := b.cache.objectBytes(context.Background())
	require.NoError(t, err)
	freed := b.pack(builds[1])
	after, err := b.cache.objectBytes(context.Background())
	require.NoError(t, err)
	require.InDelta(t, promised, freed, 16<<10)
	require.InDelta(t, before-after, freed, 16<<10)
	whole, recipe, unpacked := b.cache.packing.Bytes(large(builds[1]))
	require.Zero(t, whole)
	require.Positive(t, recipe)
	require.Zero(t, unpacked)

	a, phases := b.phases(b.variant(2))
	require.Equal(t, request.Hit, a.Outcome)
	require.Contains(t, phases, lookup.Unpacking)
	require.Equal(t, files[1], b.read(a))
	again, phases := b.phases(b.variant(2))
	require.Equal(t, a.Graph, again.Graph)
	require.NotContains(t, phases, lookup.Unpacking, "unpacked once")
	base := b.acquire(b.variant(1))
	require.Equal(t, request.Hit, base.Outcome)
	require.Equal(t, files[0], b.read(base))
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
}

func TestAnUnpackedFormSurvivesARestartAndMayVanish(t *testing.T) {
	b, builds, files := packedPair(t)
	a, _ := b.phases(b.variant(2))
	require.NoError(t, a.View.Close())
	b.reopen()
	again, phases := b.phases(b.variant(2))
	require.NotContains(t, phases, lookup.Unpacking)
	require.Equal(t, a.Graph, again.Graph)
	require.NoError(t, again.View.Close())
	require.NoError(t, os.RemoveAll(filepath.Join(b.state, "unpacked")))
	after, phases := b.phases(b.variant(2))
	require.Contains(t, phases, lookup.Unpacking)
	require.Equal(t, files[1], b.read(after))
	require.NoError(t, after.View.Close())

	b.later.Add(int64(time.Hour))
	freed, err := b.cache.Store.Packer().DropCopies(builds[1].ID)
	require.NoError(t, err)
	require.Positive(t, freed)
	found, err := filepath.Glob(filepath.Join(b.state, "unpacked", "objects", "*", "*"))
	require.NoError(t, err)
	require.Empty(t, found)
	require.Equal(t, files[1], b.read(b.acquire(b.variant(2))))
	require.EqualValues(t, 2, b.compiler.Compiles.Load())
}

// A view with a vanished directory, as may happen to unpacked copies, is not in use: the build is
// served again, packed and evicted as any other.
func TestAViewThatVanishedIsInNoUse(t *testing.T) {
	b, builds, files := packedPair(t)
	vanish := func() {
		a := b.acquire(b.variant(2))
		require.Equal(t, files[1], b.read(a))
		require.NoError(t, a.View.Close())
		b.later.Add(int64(time.Hour))
		require.NoError(t, views.MakeTreeRemovable(a.Path))
		require.NoError(t, os.RemoveAll(a.Path))
		require.NoError(t, os.RemoveAll(filepath.Join(b.state, "unpacked")))
	}
	vanish()
	require.Empty(t, b.cache.Store.WhyInUse(builds[1]))
	require.Empty(t, b.cache.Store.Collector().WhyProtected(builds[1].ID, nil))
	vanish()
	b.collect(b.plan(0))
	require.Empty(t, b.list())
	b.cache.views.Sweep()
	for _, build := range builds {
		require.Nil(t, b.cache.views.CurrentView(build.ID))
	}
	left, err := filepath.Glob(filepath.Join(b.state, "views", "*", "*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// A leased build is neither packed nor dropped.
func TestLeasedBuildIsNotPacked(t *testing.T) {
	b := newBench(t)
	builds, _ := b.similar(2)
	held := b.acquire(b.variant(2))
	b.later.Add(int64(time.Hour)) // the lease alone keeps it
	_, err := b.cache.Store.Packer().PackBuild(context.Background(), builds[1].ID)
	require.ErrorIs(t, err, packing.ErrInUse)
	require.NoError(t, held.View.Close())
	require.Positive(t, b.pack(builds[1]))
	held = b.acquire(b.variant(2))
	b.later.Add(int64(time.Hour))
	_, err = b.cache.Store.Packer().DropCopies(builds[1].ID)
	require.ErrorIs(t, err, packing.ErrInUse)
	require.NoError(t, held.View.Close())
}

// Bases stay as long as a recipe needs them, and go with the last one.
func TestABaseOutlivesItsBuild(t *testing.T) {
	b, builds, files := packedPair(t)
	ctx := context.Background()
	base := large(builds[0])
	err := b.remove(builds[0])
	require.NoError(t, err)
	require.True(t, b.cache.cas.Has(base))
	b.reopen()
	b.requireSound()
	require.NoError(t, b.cache.Store.RemoveLeftovers(ctx))
	require.True(t, b.cache.cas.Has(base), "after a restart as well")
	a := b.acquire(b.variant(2))
	require.Equal(t, files[1], b.read(a))
	require.NoError(t, a.View.Close())
	b.later.Add(int64(time.Hour))
	err = b.remove(builds[1])
	require.NoError(t, err)
	left, err := b.cache.objectBytes(ctx)
	require.NoError(t, err)
	require.Zero(t, left, "nothing is left of either")
	recipes, err := filepath.Glob(filepath.Join(b.state, "recipes", "*", "*"))
	require.NoError(t, err)
	require.Empty(t, recipes)
}

// Blobs removed during a check, with all that needed them, are not missing: a build's own files,
// and a base that only recipes need.
func TestCheckIgnoresBuildsRemovedMeanwhile(t *testing.T) {
	ctx := context.Background()
	for name, at := range map[string]int{"the first file": 1, "the last, a base": 0} {
		t.Run(name, func(t *testing.T) {
			b, builds, _ := packedPair(t)
			b.later.Add(int64(time.Hour)) // no client was given them just now
			err := b.remove(builds[0])
			require.NoError(t, err)
			check := func(each func(files int)) *wire.CheckReply {
				files := 0
				result, err := b.cache.Check(ctx, b.self(), &wire.Check{Deep: true},
					func(p *wire.Progress) {
						if p.Phase == "checking files" {
							files++
							each(files)
						}
					})
				require.NoError(t, err)
				return result
			}
			last := 0
			require.Empty(t, check(func(files int) { last = files }).Findings)
			removed := false
			result := check(func(files int) {
				if files == cmp.Or(at, last) {
					err := b.remove(builds[1])
					require.NoError(t, err)
					removed = true
				}
			})
			require.True(t, removed)
			require.False(t, b.cache.cas.Has(large(builds[0])))
			require.Empty(t, result.Findings)
		})
	}
}

func TestDamageOfAPackedBuildIsNeverServed(t *testing.T) {
	flip := func(t *testing.T, path string) {
		raw, err := os.ReadFile(path)
		require.NoError(t, err)
		raw[len(raw)/2] ^= 1
		require.NoError(t, os.Chmod(path, 0o644))
		require.NoError(t, os.WriteFile(path, raw, 0o444))
	}
	object := func(b *bench, d cas.Digest) string {
		return filepath.Join(b.state, "objects", d.String()[:2], d.String())
	}
	recipe := func(b *bench, d cas.Digest) string {
		return filepath.Join(b.state, "recipes", d.String()[:2], d.String())
	}
	cases := []struct {
		name string
		harm func(t *testing.T, b *bench, builds []*index.Build)
		both bool // the build of the base is no good either
		fine bool // the packed one is served as ever
	}{
		{"base changed",
			func(t *testing.T, b *bench,
				builds []*index.Build) {
				flip(t, object(b, large(builds[0])))
			}, true, false},
		{"base gone", func(t *testing.T, b *bench, builds []*index.Build) {
			require.NoError(t, os.Remove(object(b, large(builds[0]))))
		}, true, false},
		{"base cut short", func(t *testing.T, b *bench, builds []*index.Build) {
			require.NoError(t, os.Chmod(object(b, large(builds[0])), 0o644))
			require.NoError(t, os.Truncate(object(b, large(builds[0])), 1000))
		}, true, false},
		{"recipe changed",
			func(t *testing.T, b *bench,
				builds []*index.Build) {
				flip(t, recipe(b, large(builds[1])))
			}, false, false},
		{"recipe gone", func(t *testing.T, b *bench, builds []*index.Build) {
			require.NoError(t, os.Remove(recipe(b, large(builds[1]))))
		}, false, false},
		{"another's recipe", func(t *testing.T, b *bench, builds []*index.Build) {
			raw, err := os.ReadFile(recipe(b, large(builds[1])))
			require.NoError(t, err)
			require.NoError(t, os.Remove(recipe(b, large(builds[1]))))
			other := recipe(b, large(builds[1]))
			raw[20] ^= 1
			require.NoError(t, os.WriteFile(other, raw, 0o444))
		}, false, false},
		{"literals gone", func(t *testing.T, b *bench, builds []*index.Build) {
			p, ok := b.cache.packing.Recipes.Has(large(builds[1]))
			require.True(t, ok)
			require.NotEqual(t, -1, p.Literals)
			require.NoError(t, os.Remove(object(b, p.Bases[p.Literals].Digest)))
		}, false, false},
		{"unpacked file changed", func(t *testing.T, b *bench, builds []*index.Build) {
			a := b.acquire(b.variant(2))
			require.NoError(t, a.View.Close())
			d := large(builds[1])
			flip(t, filepath.Join(b.state, "unpacked", "objects", d.String()[:2], d.String()))
		}, false, true},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			b, builds, files := packedPair(t)
			c.harm(t, b, builds)
			a := b.acquire(b.variant(2))
			require.Equal(t, files[1], b.read(a))
			if c.fine {
				require.Equal(t, request.Hit, a.Outcome)
				return
			}
			require.Equal(t, request.Compiled, a.Outcome)
			require.Contains(t, a.Why, "damaged")
			require.NotEqual(t, c.both, b.stateOf(builds[0]) == index.Current, b.stateOf(builds[0]))
			first := b.acquire(b.variant(1))
			require.Equal(t, files[0], b.read(first))
			if !c.both {
				require.Equal(t, request.Hit, first.Outcome)
			}
		})
	}
}

func (b *bench) stateOf(build *index.Build) string {
	if _, err := b.cache.index.Get(build.ID); err != nil {
		return "gone"
	}
	return b.cache.index.Journal.StateOf(build.ID).Name
}

// check finds what is wrong with bases and recipes, and repair withholds every build that
// needs them.
func TestCheckKnowsPackedBuilds(t *testing.T) {
	b, builds, _ := packedPair(t)
	ctx, self := context.Background(), request.Peer{UID: b.cache.uid}
	for _, deep := range []bool{false, true} {
		result, err := b.cache.Check(ctx, self, &wire.Check{Deep: deep}, nil)
		require.NoError(t, err)
		require.Empty(t, result.Findings)
	}
	d := large(builds[0])
	require.NoError(t, os.Remove(filepath.Join(b.state, "objects", d.String()[:2], d.String())))
	result, err := b.cache.Check(ctx, self, &wire.Check{Repair: true}, nil)
	require.NoError(t, err)
	var found []string
	for _, f := range result.Findings {
		found = append(found, f.Kind+" "+strings.SplitN(f.Object, " ", 2)[0])
		require.NotEmpty(t, f.Builds)
	}
	require.Contains(t, found, "missing "+d.String())
	require.Contains(t, found, "missing "+large(builds[1]).String())
	require.Equal(t, index.Damaged, b.stateOf(builds[0]))
	require.Equal(t, index.Damaged, b.stateOf(builds[1]))
}

// A user's private blob is no base for another's, nor for shared ones; a shared blob may be the
// base of a private one.
func TestScopesDoNotReachIntoEachOther(t *testing.T) {
	b := newBench(t)
	ask := func(uid uint32, batch int) *index.Build {
		r := b.variant(batch)
		if uid != 0 {
			r.Peer, r.Store = request.Peer{UID: uid}, "user"
		}
		a := b.acquire(r)
		require.NoError(t, a.View.Close())
		b.later.Add(int64(time.Hour))
		_, err := b.cache.packing.Sharing.Examine(context.Background(), large(a.Build), nil)
		require.NoError(t, err)
		return a.Build
	}
	one := b.cache.uid + 1
	first := ask(one, 1)
	other := ask(one+1, 2)
	require.Zero(t, b.cache.Store.Packer().PackSaving(other.ID), "another user's")
	same := ask(one, 3)
	require.Positive(t, b.cache.Store.Packer().PackSaving(same.ID), "the same user's")
	shared := ask(0, 4)
	require.Zero(t, b.cache.Store.Packer().PackSaving(shared.ID), "for all, with one user's")
	require.Zero(t, b.pack(shared))
	require.Positive(t, b.pack(same))
	p, _ := b.cache.packing.Recipes.Has(large(same))
	require.Equal(t, large(first), p.Bases[0].Digest)
	after := ask(one+2, 5)
	require.Positive(t, b.cache.Store.Packer().PackSaving(after.ID),
		"one user's, with what is for all")
	require.Positive(t, b.pack(after))
	p, _ = b.cache.packing.Recipes.Has(large(after))
	require.Equal(t, large(shared), p.Bases[0].Digest)
}

func TestPackAndUnpackByHand(t *testing.T) {
	b := newBench(t)
	ctx, self := context.Background(), b.self()
	var builds []*index.Build
	for i := range 2 {
		a := b.acquire(b.variant(i + 1))
		builds = append(builds, a.Build)
		require.NoError(t, a.View.Close())
	}
	results, err := b.cache.Pack(ctx, self, nil, true, true, nil)
	require.NoError(t, err)
	later := int64(0)
	for _, r := range results.Builds {
		said, ok := strings.CutPrefix(r.Outcome,
			"kept: it was served recently, perhaps by path: it is kept until ")
		require.True(t, ok, r.Outcome)
		until, err := time.Parse(time.RFC3339, said)
		require.NoError(t, err)
		require.WithinRange(t, until, b.cache.now(), b.cache.now().Add(views.PathGrace+time.Second))
		require.Zero(t, r.FreesBytes)
		if r.Build == builds[1].BuildKey.String() {
			later = r.LaterBytes
		}
	}
	b.later.Add(int64(time.Hour))
	name := builds[1].BuildKey.String()
	results, err = b.cache.Pack(ctx, self, []string{name}, false, true, nil)
	require.NoError(t, err)
	require.Equal(t, store.PackedNow, results.Builds[0].Outcome)
	require.False(t, b.cache.packing.OnlyPacked(large(builds[1])), "it was only asked")
	promised := results.Builds[0].FreesBytes
	require.Zero(t, results.Builds[0].LaterBytes)
	require.Equal(t, promised, later, "it was reported while it might not be packed yet")
	results, err = b.cache.Pack(ctx, self, nil, true, false, nil)
	require.NoError(t, err)
	outcomes := map[string]int64{}
	for _, r := range results.Builds {
		outcomes[r.Outcome] += r.FreesBytes
	}
	require.InDelta(t, promised, outcomes[store.PackedNow], 16<<10)
	require.Len(t, outcomes, 2, "the other is its base")
	_, err = b.cache.Pack(ctx, request.Peer{UID: b.cache.uid + 1}, []string{name}, false, false,
		nil)
	require.Error(t, err)
	_, err = b.cache.Pack(ctx, self, nil, false, false, nil)
	require.Equal(t, apierr.BadRequest, apierr.ClassOf(err))

	results, err = b.cache.Unpack(ctx, self, []string{name}, false, false, nil)
	require.NoError(t, err)
	require.Equal(t, store.UnpackedNow, results.Builds[0].Outcome)
	require.Negative(t, results.Builds[0].FreesBytes)
	whole, recipe, unpacked := b.cache.packing.Bytes(large(builds[1]))
	require.Positive(t, whole)
	require.Zero(t, recipe+unpacked)
	b.exact()
	b.requireSound()
	result, err := b.cache.Check(ctx, self, &wire.Check{Deep: true}, nil)
	require.NoError(t, err)
	require.Empty(t, result.Findings, "not even the literals are left")
	require.Equal(t, request.Hit, b.acquire(b.variant(2)).Outcome)
}

// A build that is removed while all are packed or unpacked is reported as gone, and the others are
// processed.
func TestBuildRemovedWhileAllArePacked(t *testing.T) {
	b, builds := stored(t, 2)
	own := request.Peer{UID: b.cache.uid}
	names := []string{builds[0].BuildKey.String(), builds[1].BuildKey.String()}
	results, err := b.cache.Pack(t.Context(), own, names, false, false, func(done, _ int64) {
		_, err := b.cache.Remove(t.Context(), own, names[done:done+1], false, false)
		require.NoError(t, err)
	})
	require.NoError(t, err)
	require.Len(t, results.Builds, 2)
	for _, r := range results.Builds {
		require.True(t, strings.HasPrefix(r.Outcome, "kept: "), r.Outcome)
	}
}

// onRemove is a file system that calls a function once before a file is removed.
type onRemove struct {
	cas.OS
	mu     sync.Mutex
	below  string // a directory of the store; guarded by mu
	before func() // guarded by mu; nil: it was done
}

func (f *onRemove) Remove(path string) error {
	f.mu.Lock()
	before := f.before
	if before != nil && strings.Contains(path, "/"+f.below+"/") {
		f.before = nil
		defer before()
	}
	f.mu.Unlock()
	return f.OS.Remove(path)
}

// A blob that is being made whole keeps its file from removal; if its build is removed meanwhile,
// no file of it stays.
func TestRemovalWhileBecomingWholeLeavesNothing(t *testing.T) {
	f := &onRemove{}
	b := newBenchWith(t, func(o *Options) { o.fs = f })
	builds, _ := b.similar(2)
	require.Positive(t, b.pack(builds[1]))
	f.mu.Lock()
	f.below, f.before = "recipes", func() {
		_, err := b.cache.Remove(context.Background(), b.self(),
			[]string{builds[1].BuildKey.String()}, false, false)
		require.NoError(t, err)
	}
	f.mu.Unlock()
	require.NoError(t, b.cache.packing.MakeWhole(context.Background(), large(builds[1])))
	require.Len(t, b.list(), 1)
	require.False(t, b.cache.cas.Has(large(builds[1])))
	found, err := b.cache.Check(context.Background(), b.self(), &wire.Check{Deep: true}, nil)
	require.NoError(t, err)
	require.Empty(t, found.Findings)
}

// A request for a packed build that becomes whole just before its recipe is read is served.
func TestBlobThatBecomesWholeWhileUnpackingIsServed(t *testing.T) {
	b := newBench(t)
	builds, files := b.similar(2)
	require.Positive(t, b.pack(builds[1]))
	d := large(builds[1])
	a, err := lookup.Lease(context.Background(), b.cache.Store, builds[1], func(phase string) {
		if phase == lookup.Unpacking {
			require.NoError(t, b.cache.packing.MakeWhole(context.Background(), d))
		}
	})
	require.NoError(t, err)
	require.Equal(t, files[1], b.read(a))
	require.NoError(t, a.View.Close())
}

// Unpack reports its bytes as the account has them, before and afterwards: an existing copy is
// removed, and so are recipes and the bases that only they use.
func TestUnpackReportsItsBytes(t *testing.T) {
	for name, removed := range map[string]bool{"what it takes from is a build": false,
		"what it takes from is no build's any more": true} {
		t.Run(name, func(t *testing.T) { unpackingTells(t, removed) })
	}
}

func unpackingTells(t *testing.T, removed bool) {
	b, builds, _ := packedPair(t)
	ctx := context.Background()
	if removed {
		_, err := b.cache.Remove(ctx, b.self(), []string{builds[0].BuildKey.String()}, false, false)
		require.NoError(t, err)
		require.True(t, b.cache.cas.Has(large(builds[0])), "it is taken from")
	}
	a := b.acquire(b.variant(2))
	require.NoError(t, a.View.Close())
	b.later.Add(int64(time.Hour))
	_, _, unpacked := b.cache.packing.Bytes(large(builds[1]))
	require.Positive(t, unpacked, "there is a copy")
	taken := func() int64 {
		s, err := b.cache.Queries.Space()
		require.NoError(t, err)
		return s.DiskBytes + s.UnpackedBytes
	}
	sum := func(dryRun bool) (frees int64) {
		results, err := b.cache.Unpack(ctx, b.self(), nil, true, dryRun, nil)
		require.NoError(t, err)
		for _, r := range results.Builds {
			frees += r.FreesBytes
		}
		return frees
	}
	before := taken()
	planned := sum(true)
	require.Equal(t, before, taken(), "it was only asked")
	require.Less(t, -planned, cas.RoundUpToBlock(builds[1].Files[1].Size), "the copy counts for it")
	require.Equal(t, planned, sum(false))
	require.Equal(t, taken()-before, -planned)
	require.Equal(t, !removed, b.cache.cas.Has(large(builds[0])))
	require.Zero(t, sum(true), "all are whole")
}

// A pinned build that is packed keeps what its recipe takes from: a status says so, and a plan, in
// which all that stays adds up.
func TestBaseOfAPinnedBuildIsKept(t *testing.T) {
	b, builds, _ := packedPair(t)
	ctx := context.Background()
	_, err := b.cache.Pin(ctx, b.self(), []string{builds[1].BuildKey.String()}, false)
	require.NoError(t, err)
	for _, removed := range []bool{false, true} {
		if removed {
			_, err := b.cache.Remove(ctx, b.self(), []string{builds[0].BuildKey.String()}, false,
				false)
			require.NoError(t, err)
		}
		plan, err := b.cache.PlanCollection(ctx, b.self(), store.Goal{}, nil)
		require.NoError(t, err)
		require.Empty(t, plan.Steps)
		sum := int64(0)
		for _, k := range plan.Kept {
			sum += k.Bytes
		}
		require.Equal(t, plan.Used, sum)
		pinned := plan.Kept[0]
		require.Equal(t, "pinned", pinned.Reason)
		require.Equal(t, []string{builds[1].BuildKey.String()},
			b.cache.CollectReply(plan).Kept[0].Keys)
		require.Greater(t, pinned.Bytes, builds[0].Files[1].Size,
			"with the file that it takes from, whoever else has it")
		s, err := b.cache.Queries.Space()
		require.NoError(t, err)
		require.Equal(t, pinned.Bytes, s.PinnedBytes)
	}
}
