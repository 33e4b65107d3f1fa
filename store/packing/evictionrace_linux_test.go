package packing

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// inMemory is a directory for files that are made again many times; power cuts are tested
// elsewhere.
func inMemory(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "epcached")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

// evict removes blobs that are not needed any more, at once.
func (b *bench) evict(all ...cas.Digest) {
	b.Helper()
	r := b.Removal()
	for _, d := range all {
		disk, _ := cas.DiskBytesIn(b.Store.dir, d) // of one that is not whole, none
		done := b.user.startEviction(disk)
		delete(b.needed, d)
		_, err := r.Remove(d)
		require.NoError(b, err)
		done()
	}
	_, err := r.End()
	require.NoError(b, err)
}

// requireNothingLeft requires that nothing is there but what the needed blobs are made of, and
// nothing at all when they are evicted.
func (b *bench) requireNothingLeft() {
	b.Helper()
	var recipes []cas.Digest
	require.NoError(b, b.recipeStore.Walk(context.Background(),
		func(d cas.Digest, _ dedupe.Packed) error {
			recipes = append(recipes, d)
			return nil
		}))
	for _, d := range append(b.objects(), recipes...) {
		if _, needed := b.needed[d]; !needed {
			require.NotEmpty(b, b.recipeStore.Users(d), "%s stays for nobody", d)
		}
	}
	for d := range b.needed {
		require.NoError(b, b.Check(context.Background(), d))
	}
	for len(b.needed) > 0 {
		for d := range b.needed {
			b.evict(d)
			break
		}
	}
	require.Empty(b, b.objects())
	require.Empty(b, b.recipeStore.Bases())
	require.NoError(b, b.Copies.Each(context.Background(), func(d cas.Digest, _ int64) error {
		return fmt.Errorf("a copy of %s stays", d)
	}))
}

// formChange is something that gives a blob another form.
type formChange struct {
	name string
	n    int // blobs
	do   func(b *bench, all []cas.Digest, gate Gate) error
}

func formChanges(ctx context.Context) []formChange {
	return []formChange{
		{name: "pack", n: 2, do: func(b *bench, all []cas.Digest, gate Gate) error {
			_, err := b.Pack(ctx, all[1], Worth, gate)
			return err
		}},
		{name: "pack a base", n: 2, do: func(b *bench, all []cas.Digest, gate Gate) error {
			b.pack(all[1])
			_, err := b.Pack(ctx, all[0], Worth, gate)
			return err
		}},
		{name: "compact", n: 3, do: func(b *bench, all []cas.Digest, gate Gate) error {
			b.pack(all[1])
			b.pack(all[2])
			return b.Compact(ctx, Family{Hot: all[1], Base: all[0]}, gate)
		}},
		{name: "compact what no build needs", n: 3,
			do: func(b *bench, all []cas.Digest, gate Gate) error {
				b.pack(all[1])
				b.pack(all[2])
				b.evict(all[0])
				return b.Compact(ctx, Family{Base: all[0]}, gate)
			}},
		{name: "make whole", n: 3, do: func(b *bench, all []cas.Digest, gate Gate) error {
			require.Positive(b, b.pack(all[2]))
			return b.Compact(ctx, Family{Hot: all[1]}, gate)
		}},
	}
}

// blobs stores what the change is made with.
func (c *formChange) blobs(ctx context.Context, b *bench) (all []cas.Digest) {
	const part = 256 << 10
	shared := noise(1, part)
	for i := range c.n {
		content := slices.Concat(noise(uint64(10+i), 4096), shared,
			noise(uint64(20+i), 300), shared)
		switch {
		case c.name == "compact what no build needs" && i == 0:
			content = slices.Concat(noise(3, 2*part), shared, noise(4, part))
		case c.name == "make whole" && i > 0:
			// the last one takes from what the other has of its own
			content = slices.Concat(noise(uint64(20+i), 300), noise(5, part), shared[:part*(2-i)])
		case c.name != "pack" && i == c.n-1:
			content = slices.Concat(shared, shared) // has nothing of its own, that would go with it
		}
		d := b.put(content)
		_, err := b.Sharing.Examine(ctx, d, nil)
		require.NoError(b, err)
		if all = append(all, d); c.name == "make whole" && i == 1 {
			b.pack(d)
		}
	}
	return all
}

// At whichever step of a change of form a blob that it concerns is evicted, that blob is removed
// completely, and no other is lost.
func TestEvictionDuringAChangeLeavesNothing(t *testing.T) {
	ctx := context.Background()
	for _, c := range formChanges(ctx) {
		t.Run(c.name, func(t *testing.T) {
			// of which the last ones are those after what takes most time: reading and
			// comparing
			steps := 0
			for victim := range c.n {
				for step := steps - 1; step >= max(0, steps-4) || steps == 0; step-- {
					b := newBenchIn(t, inMemory(t))
					all := c.blobs(ctx, b)
					taken := 0
					var mu sync.Mutex // several readers are at the gate
					err := c.do(b, all, func(context.Context) error {
						mu.Lock()
						defer mu.Unlock()
						if taken == step {
							b.evict(all[victim])
						}
						taken++
						return nil
					})
					if err != nil {
						require.True(t, IsMissingOrDamaged(err) || errors.Is(err, ErrInUse) ||
							errors.Is(err, errSavesTooLittle), "%v", err)
					}
					b.requireNothingLeft()
					if steps == 0 {
						steps, step = taken, taken // none was evicted
						require.Positive(t, steps)
					}
				}
			}
		})
	}
}

// A recipe that packing writes between the eviction and the removal of a blob is removed with it,
// and so are its bases; also where the packer releases its hold before the removal of the
// recipe is durable.
func TestEvictionBeforeTheRemovalLeavesNothing(t *testing.T) {
	b := newBenchIn(t, inMemory(t))
	all, _ := b.variants(2, mib)
	ctx := context.Background()
	packing := b.whole.Hold()
	require.NoError(t, b.makeRecipe(ctx, all[1], search{}, packing))
	made, err := b.Recipes.Get(all[1])
	require.NoError(t, err)
	// packing is as far as to have stored its literals
	require.NoError(t, b.recipeStore.Remove(all[1]))
	b.onNeeded = func(d cas.Digest) {
		if d == all[1] {
			b.onNeeded = nil
			require.NoError(t, b.recipeStore.Put(made, nil))
		}
	}
	delete(b.needed, all[1])
	r := b.Removal()
	_, err = r.Remove(all[1])
	require.NoError(t, err)
	require.Nil(t, b.onNeeded)
	b.Release(packing)
	_, err = r.End()
	require.NoError(t, err)
	require.Equal(t, all[:1], b.objects())
	b.requireNothingLeft()
}

// Nor does anything stay of what is evicted right before its recipe gets its name.
func TestEvictionBeforeTheNameLeavesNothing(t *testing.T) {
	order := &inOrder{}
	b := newBenchOn(t, inMemory(t), order)
	common := noise(1, mib/2)
	b.looked(common)
	d, _ := b.looked(slices.Concat(noise(9, mib/4), common))
	order.names = func() { b.evict(d) }
	_, err := b.Pack(context.Background(), d, Worth, nil)
	require.True(t, err == nil || errors.Is(err, cas.ErrNotFound), "%v", err)
	require.Nil(t, order.names)
	b.requireNothingLeft()
}

// A base can be packed while it is not yet durable that the last recipe that takes from it has
// gone: it is when that is.
func TestBaseIsPackedWhileItsUserIsRemoved(t *testing.T) {
	b := newBenchIn(t, inMemory(t))
	part := noise(3, mib)
	base, _ := b.looked(slices.Concat(part, noise(4, 300), part))
	taker, _ := b.looked(slices.Concat(part, part))
	require.Positive(t, b.pack(taker))
	r := b.Removal()
	delete(b.needed, taker)
	_, err := r.Remove(taker)
	require.NoError(t, err)
	require.Zero(t, b.pack(base))
	require.True(t, b.whole.Has(base), "the recipe may come back")
	_, err = r.End()
	require.NoError(t, err)
	require.Positive(t, b.pack(base))
	require.True(t, b.OnlyPacked(base))
	b.requireNothingLeft()
}

// A blob that a failed put stored whole, and that others need and keep packed, is accounted for as
// whole.
func TestUnreferencedWholeBlobIsMeasured(t *testing.T) {
	b := newBenchIn(t, inMemory(t))
	all, contents := b.variants(2, mib)
	require.Positive(t, b.pack(all[1]))
	var measured []cas.Digest
	b.remeasured = func(d cas.Digest) {
		require.True(t, b.whole.Has(d))
		measured = append(measured, d)
	}
	hold := b.whole.Hold()
	_, _, err := hold.Put(context.Background(), bytes.NewReader(contents[1]))
	require.NoError(t, err)
	b.Release(hold)
	require.Equal(t, all[1:], measured)
}

// inOrder notes what was unlinked, and which directories were synced.
type inOrder struct {
	cas.OS
	mu   sync.Mutex
	done []string // guarded by mu

	names func() // is called before something gets a name, once; may be nil
}

func (o *inOrder) Rename(from, to string) error {
	if names := o.names; names != nil {
		o.names = nil
		names()
	}
	return o.OS.Rename(from, to)
}

func (o *inOrder) note(what, path string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.done = append(o.done, what+" "+path)
}

func (o *inOrder) Remove(path string) error {
	o.note("unlink", path)
	return o.OS.Remove(path)
}

func (o *inOrder) SyncDir(path string) error {
	o.note("sync", path)
	return o.OS.SyncDir(path)
}

// A recipe that a power cut brings back finds its bases: these go when it is durable that it
// has gone, also where they are evicted together, whichever is the first.
func TestBasesAreRemovedAfterRecipesDurably(t *testing.T) {
	for _, first := range []int{0, 1} {
		order := &inOrder{}
		b := newBenchOn(t, inMemory(t), order)
		all, _ := b.variants(2, mib)
		require.Positive(t, b.pack(all[1]))
		bases := b.bases(all[1])
		require.Contains(t, bases, all[0])
		recipe := dedupe.RecipePath(b.Store.dir, all[1])
		order.done = nil
		b.evict(all[first], all[1-first])
		require.Empty(t, b.objects())
		synced := slices.Index(order.done, "sync "+filepath.Dir(recipe))
		require.Less(t, slices.Index(order.done, "unlink "+recipe), synced)
		for _, d := range bases {
			require.Greater(t, slices.IndexFunc(order.done, func(one string) bool {
				return strings.HasPrefix(one, "unlink ") && strings.HasSuffix(one, d.String())
			}), synced)
		}
	}
}
