package cache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/tinymodel"
	"github.com/epcached/epcached/forms"
)

// verb does what epcachectl pack --compress does with a build.
func (b *bench) verb(name string, dryRun bool) (string, int64) {
	b.Helper()
	results, err := b.cache.Compress(context.Background(), b.self(), []string{name}, false, dryRun, nil)
	require.NoError(b, err)
	require.Len(b, results, 1)
	return results[0].Outcome, results[0].Frees
}

// kept is what show and why say of how a build is kept.
func (b *bench) kept(name string) string {
	b.Helper()
	shown, _, err := b.cache.Show(context.Background(), b.self(), name)
	require.NoError(b, err)
	why, err := b.cache.Why(context.Background(), b.self(), name)
	require.NoError(b, err)
	require.Equal(b, shown[0].KeptText, why.Candidates[0].Listing.KeptText)
	require.Contains(b, []string{"whole", "packed", "compressed", "packed, with a copy", "compressed, with a copy"}, shown[0].KeptAs, "a word, as in listings")
	require.Equal(b, shown[0].KeptAs, why.Candidates[0].Listing.KeptAs)
	return shown[0].KeptText
}

func (b *bench) compressing() Compressing {
	b.Helper()
	x, err := b.cache.Compressing(context.Background(), b.self())
	require.NoError(b, err)
	return x
}

// By hand a build is compressed at once, pinned or not, and not while somebody has it; what is said of it before and after is true.
func TestABuildIsCompressedByHand(t *testing.T) {
	b := newBench(t)
	ask := func() *Request { return b.worded(32, 512, 1) }
	builds, files := b.stores([]*Request{ask()})
	name, d := builds[0].BuildKey.String(), large(builds[0])
	require.Contains(t, b.kept(name), "whole; not compressed by itself: that is switched off")
	require.True(t, b.compressing().Next.IsZero())
	off := b.cache.settings.Load()
	on := *off
	on.pack.when = PackCold
	b.cache.settings.Store(&on) // it does nothing by itself before there is another build
	last := b.cache.lastNeeded(d)
	require.Contains(t, b.kept(name), "whole; to be compressed from "+last.Add(defaultCompressAfter).UTC().Format(time.RFC3339)+" on, unless")
	x := b.compressing()
	require.EqualValues(t, 1, x.Waiting)
	require.Zero(t, x.Files)
	require.True(t, last.Add(defaultCompressAfter).Equal(x.Next))
	b.later.Add(int64(defaultCompressAfter))
	require.Contains(t, b.kept(name), "whole; to be compressed soon, where")
	b.later.Add(int64(-defaultCompressAfter))

	outcome, promised := b.verb(name, true)
	require.Equal(t, CompressedNow, outcome)
	require.Greater(t, promised, int64(200<<10))
	require.True(t, b.cache.cas.Has(d))

	a := b.acquire(ask())
	outcome, _ = b.verb(name, false)
	require.Equal(t, "kept: in use", outcome)
	require.NoError(t, a.View.Close())
	b.later.Add(int64(time.Hour))
	_, err := b.cache.Pin(context.Background(), b.self(), []string{name}, false)
	require.NoError(t, err)
	require.Contains(t, b.kept(name), "it is pinned")
	require.Zero(t, b.compressing().Waiting)
	b.cache.settings.Store(off)
	outcome, freed := b.verb(name, false)
	require.Equal(t, CompressedNow, outcome)
	require.InDelta(t, promised, freed, 16<<10)
	require.True(t, b.compressed(d))
	require.Contains(t, b.kept(name), "compressed since ")
	x = b.compressing()
	require.EqualValues(t, 1, x.Files)
	require.Equal(t, b.sizeOf(d), x.Bytes)
	require.Less(t, x.Stored, x.Bytes*6/10)
	b.exact()
	outcome, _ = b.verb(name, false)
	require.Equal(t, "kept: it is compressed already", outcome)

	b.pass(time.Minute)
	require.True(t, b.compressed(d), "nobody has used it since")
	a = b.acquire(ask())
	require.Equal(t, files[0], b.read(a))
	require.NoError(t, a.View.Close())
}

func (b *bench) sizeOf(d [32]byte) int64 {
	b.Helper()
	size, err := b.cache.forms.Size(d)
	require.NoError(b, err)
	return size
}

// By hand a build is packed first, and then what it has of its own is compressed; of what cannot be it is said why.
func TestWhatIsPackedIsCompressedByHand(t *testing.T) {
	b := newBench(t)
	builds, _ := b.stores([]*Request{b.dense(512, 1), b.worded(512, 512, 2)})
	d := large(builds[1])
	require.Contains(t, b.kept(builds[0].BuildKey.String()), "others take bytes of it")
	outcome, freed := b.verb(builds[1].BuildKey.String(), false)
	require.Equal(t, CompressedNow, outcome)
	require.Greater(t, freed, int64(1200<<10), "what it shares, and a half of the rest")
	require.True(t, b.compressed(d))
	require.Contains(t, b.kept(builds[1].BuildKey.String()), "packed, ")
	outcome, freed = b.verb(builds[0].BuildKey.String(), false)
	require.Equal(t, "kept: others take bytes of it, or would when they are packed", outcome)
	require.Zero(t, freed)
	state, _, err := b.cache.forms.CompressingOf(context.Background(), d)
	require.NoError(t, err)
	require.Equal(t, forms.IsCompressed, state)

	alone, _ := b.stores([]*Request{b.requestOf(tinymodel.DenseModel(8, 512, 1))})
	outcome, _ = b.verb(alone[0].BuildKey.String(), false)
	require.Equal(t, "kept: compressing was tried, and gains too little", outcome)
	require.Contains(t, b.kept(alone[0].BuildKey.String()), "gains too little")
}
