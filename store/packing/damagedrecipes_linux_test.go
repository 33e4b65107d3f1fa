package packing

import (
	"context"
	"encoding/binary"
	"os"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// forge puts a recipe that is sound in itself in the place of one, with other bytes of its
// base.
func (b *bench) forge(d cas.Digest) *dedupe.Recipe {
	b.Helper()
	r, err := b.recipeStore.Get(d)
	require.NoError(b, err)
	for i := range r.Extents {
		if e := &r.Extents[i]; e.Base != r.Literals && e.From >= 4 {
			e.From -= 4
		}
	}
	require.NoError(b, b.recipeStore.Put(r, nil))
	return r
}

// A recipe that gives other bytes is found when its blob is made whole, and when its family is
// compacted; it stays as it is, for inspection.
func TestARecipeThatGivesOtherBytesIsMovedNowhere(t *testing.T) {
	ctx := context.Background()
	b := newBench(t)
	all, contents := b.variants(3, mib)
	require.Positive(t, b.pack(all[1]))
	require.Positive(t, b.pack(all[2]))
	forged := b.forge(all[1])
	require.True(t, IsDamage(b.MakeWhole(ctx, all[1])))
	require.True(t, b.OnlyPacked(all[1]))
	require.True(t, IsDamage(b.Compact(ctx, Family{Hot: all[2], Base: all[0]}, nil)))
	now, err := b.recipeStore.Get(all[1])
	require.NoError(t, err)
	require.True(t, now.Equal(forged))
	require.True(t, b.whole.Has(all[0]), "it takes from there")
	require.True(t, IsDamage(b.Check(ctx, all[1])))
	for _, i := range []int{0, 2} {
		require.Equal(t, contents[i], b.read(all[i]))
	}
}

// As long as there is a recipe that a newer epcached wrote, its needs are unknown, and nothing is
// removed.
func TestUnreadableRecipesPreventRemovals(t *testing.T) {
	b := newBench(t)
	all, contents := b.variants(2, mib)
	require.Positive(t, b.pack(all[1]))
	path := dedupe.RecipePath(b.Store.dir, all[1])
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	newer := append([]byte(nil), raw...)
	binary.LittleEndian.PutUint32(newer[8:], 9)
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.WriteFile(path, newer, 0o444))
	b.reopen()
	before := b.objects()
	delete(b.needed, all[0])
	freed, err := b.Remove(all[0])
	require.NoError(t, err)
	require.Zero(t, freed)
	require.Equal(t, before, b.objects())
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.WriteFile(path, raw, 0o444))
	b.reopen() // as the newer one does
	require.Equal(t, contents[1], b.read(all[1]))
}

// noReads is a file system that does not give the bytes of one recipe while it has an error for
// that.
type noReads struct {
	cas.OS
	path string
	err  atomic.Pointer[syscall.Errno]
}

func (f *noReads) ReadAt(file *os.File, p []byte, off int64) (int, error) {
	if err := f.err.Load(); err != nil && file.Name() == f.path {
		return 0, *err
	}
	return f.OS.ReadAt(file, p, off)
}

// A base of a recipe that could not be read at the start stays, whole, though its users are
// unknown, and its blob is there again with it.
func TestBasesOfUnreadRecipesStay(t *testing.T) {
	ctx := context.Background()
	b := newBench(t)
	all, contents := b.variants(3, mib)
	require.Positive(t, b.pack(all[1]))
	fs := &noReads{path: dedupe.RecipePath(b.Store.dir, all[1])}
	for _, err := range []syscall.Errno{syscall.EIO, syscall.EMFILE} {
		fs.err.Store(&err)
		var err2 error
		b.Store, err2 = Open(Options{Dir: b.Store.dir, FS: fs, Whole: b.whole,
			Memory: b.memory, Sketches: b.sketches, Shares: b.shares, Owner: b.user, Log: b.log})
		require.NoError(t, err2)
		require.False(t, b.Recipes.Complete())
		b.shares.Drop(all[2][:]) // it is to be a base as well
		require.Zero(t, b.pack(all[0]), "nobody knows that the unread one takes from it")
		require.True(t, b.whole.Has(all[0]))
		delete(b.needed, all[0])
		_, err2 = b.Remove(all[0])
		require.NoError(t, err2)
		require.True(t, b.whole.Has(all[0]))
		b.needed[all[0]] = int64(len(contents[0]))
		require.True(t, b.OnlyPacked(all[1]))
		_, err2 = b.Size(all[1])
		require.ErrorIs(t, err2, err)
		require.ErrorIs(t, b.Verify(ctx, all[1]), err)
		require.Equal(t, err == syscall.EIO, len(b.DamageOf(ctx, all[1])) == 1,
			"only what the disk does not give to who asks for it is as good as damaged")
		fs.err.Store(nil)
		require.Equal(t, contents[1], b.read(all[1]))
		require.True(t, b.Recipes.Complete())
		require.Contains(t, b.Recipes.Users(all[0]), all[1])
		require.NoError(t, b.DropCopy(all[1]))
	}
}
