package packing

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// A blob stays whole, and nothing is left, where there is no space for its own bytes.
func TestPackingNeedsSpaceForLiterals(t *testing.T) {
	b := newBench(t)
	all, contents := b.variants(2, mib)
	b.fitsError = syscall.ENOSPC
	_, err := b.Pack(context.Background(), all[1], Worth, nil)
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.ElementsMatch(t, all, b.objects())
	_, packed := b.Recipes.Has(all[1])
	require.False(t, packed)
	require.Equal(t, contents[1], b.read(all[1]))
	require.Zero(t, b.reserved)
}

// A base that goes while a blob is compared with it is no error: there is nothing to pack the
// blob with, and it stays as it was.
func TestBaseIsRemovedDuringAComparison(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	all, contents := b.variants(2, mib)
	var last, reads atomic.Int64 // which several readers are at
	found, err := b.Sharing.Match(ctx, all[1], func(context.Context) error {
		last.Add(1)
		return nil
	})
	require.NoError(t, err)
	found.Close()
	freed, err := b.Pack(ctx, all[1], Worth, func(context.Context) error {
		if reads.Add(1) == last.Load() {
			require.NoError(t, b.whole.Quarantine(all[0], "test"))
		}
		return nil
	})
	require.GreaterOrEqual(t, reads.Load(), last.Load())
	require.NoError(t, err)
	require.Zero(t, freed)
	require.Equal(t, []cas.Digest{all[1]}, b.objects())
	_, packed := b.Recipes.Has(all[1])
	require.False(t, packed)
	require.Equal(t, contents[1], b.read(all[1]))
}

// opening is a file system that reports each file that is about to be opened for reading.
type opening struct {
	cas.OS
	tell func(path string)
}

func (o *opening) Open(path string) (*os.File, error) {
	if o.tell != nil {
		o.tell(path)
	}
	return o.OS.Open(path)
}

// A reader gets a blob although it becomes whole before its recipe is read, or its copy is removed
// before that is opened.
func TestABlobIsReadWhileItIsPackedOrUnpacked(t *testing.T) {
	ctx := context.Background()
	for _, read := range []func(*bench, cas.Digest) error{
		func(b *bench, d cas.Digest) error { return b.Verify(ctx, d) },
		func(b *bench, d cas.Digest) error { return b.Check(ctx, d) },
		func(b *bench, d cas.Digest) error {
			f, err := b.Store.Open(ctx, d)
			if err == nil {
				err = f.Close()
			}
			return err
		},
	} {
		files := &opening{}
		b := newBenchOn(t, inMemory(t), files)
		all, _ := b.variants(2, mib/2)
		require.Positive(t, b.pack(all[1]))
		files.tell = func(path string) {
			if path == dedupe.RecipePath(b.Store.dir, all[1]) {
				files.tell = nil
				require.NoError(t, b.MakeWhole(ctx, all[1]))
			}
		}
		require.NoError(t, read(b, all[1]))
		require.Nil(t, files.tell)

		require.Positive(t, b.pack(all[1]))
		copies := 0
		b.onNeeded = func(cas.Digest) {
			if _, _, unpacked := b.Bytes(all[1]); unpacked > 0 && copies == 0 {
				copies++
				require.NoError(t, b.DropCopy(all[1]))
			}
		}
		require.NoError(t, read(b, all[1]))
	}
}

// noRoom is a file system in which no file can be made in a directory while it has an error for
// that.
type noRoom struct {
	cas.OS
	dir  string
	full func() error
}

func (f *noRoom) Create(path string) (*os.File, error) {
	if err := f.full(); err != nil && strings.HasPrefix(path, f.dir+"/") {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return f.OS.Create(path)
}

// Unused copies make space for another, on a full disk and within a quota of the file system's.
func TestIdleCopiesAreDroppedForANewOne(t *testing.T) {
	for _, full := range []error{syscall.ENOSPC, syscall.EDQUOT} {
		t.Run(full.Error(), func(t *testing.T) {
			b := newBenchIn(t, inMemory(t))
			all, contents := b.variants(3, mib/2)
			require.Positive(t, b.pack(all[1]))
			require.Positive(t, b.pack(all[2]))
			f := &noRoom{dir: b.Copies.dir}
			f.full = func() error { // as long as the first one's copy is there
				if _, _, copied := b.Bytes(all[1]); copied > 0 {
					return full
				}
				return nil
			}
			var err error
			b.Store, err = Open(Options{Dir: b.Store.dir, FS: f,
				Whole: b.whole, Memory: b.memory, Sketches: b.sketches, Shares: b.shares,
				Owner: b.user, Log: b.log})
			require.NoError(t, err)
			require.Equal(t, contents[1], b.read(all[1]))
			require.Equal(t, contents[2], b.read(all[2]))
			_, _, copied := b.Bytes(all[1])
			require.Zero(t, copied)

			b.held[all[2]] = true
			f.full = func() error { return full }
			err = b.Unpack(context.Background(), all[1], nil, nil)
			require.ErrorIs(t, err, full)
			require.True(t, cas.IsDiskFull(err))
			require.Equal(t, contents[2], b.read(all[2]), "it is in use")
		})
	}
}

// The share of a blob that is evicted meanwhile is not kept.
func TestEvictionDuringAComparisonLeavesNoMatch(t *testing.T) {
	ctx := context.Background()
	b := newBenchIn(t, inMemory(t))
	common := noise(1, mib/2)
	first := b.put(common)
	for i, look := range []func(d cas.Digest, gate Gate) error{
		func(d cas.Digest, gate Gate) error {
			_, err := b.Sharing.Examine(ctx, d, gate)
			return err
		},
		func(d cas.Digest, gate Gate) error { _, err := b.Pack(ctx, d, Worth, gate); return err },
	} {
		d := b.put(slices.Concat(noise(uint64(10+i), 4096), common))
		var once sync.Once
		err := look(d, func(context.Context) error { once.Do(func() { b.evict(d) }); return nil })
		if err != nil {
			require.ErrorIs(t, err, cas.ErrNotFound)
		}
		require.NotContains(t, b.objects(), d)
		require.NotContains(t, b.sketches.rows, string(d[:]))
		require.NotContains(t, b.shares.rows, string(d[:]))
	}
	require.Equal(t, []cas.Digest{first}, b.objects())
}
