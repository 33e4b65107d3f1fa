package cache

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock/wire"
)

// The bytes that a removal would free are reported before it, for packed builds too, and match what
// it frees.
func TestRemovalFreesTheOwnBytes(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	builds, _ := b.similar(3)
	require.Positive(t, b.pack(builds[1]))
	a := b.acquire(b.variant(2)) // unpacked again: that goes as well
	require.NoError(t, a.View.Close())
	b.later.Add(int64(time.Hour))
	own := func() map[string]int64 {
		out, du := make(map[string]int64), make(map[string]int64)
		page, err := b.cache.Queries.List(ctx, b.self(), &wire.List{}, nil)
		require.NoError(t, err)
		for _, l := range page.Builds {
			out[l.Build] = l.OwnBytes
			shown, err := b.cache.Queries.Show(ctx, b.self(), l.Build)
			require.NoError(t, err)
			require.Equal(t, l.OwnBytes, shown.Builds[0].OwnBytes)
		}
		for _, u := range b.usage(b.self()).Builds {
			du[u.Build.Build] = u.OwnBytes
		}
		require.Equal(t, out, du, "list and du say the same")
		return out
	}
	said := own()
	require.Less(t, said[builds[0].BuildKey.String()], int64(8192), "the second takes from it")
	require.Greater(t, said[builds[2].BuildKey.String()], int64(1<<20))
	for _, i := range []int{1, 0, 2} {
		before, promised := b.plan(0).Used, own()[builds[i].BuildKey.String()]
		err := b.remove(builds[i])
		require.NoError(t, err)
		require.Equal(t, promised, before-b.plan(0).Used, "build %d", i)
		b.exact()
	}
}

// The bytes that rm reports are those of the account for all removed builds together, and match
// what it frees.
func TestRemovalOfSeveralFreesTheirCommonBytes(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	builds, _ := b.similar(3)
	require.Positive(t, b.pack(builds[1]))
	would := func(all bool, which ...int) int64 {
		var names []string
		for _, i := range which {
			names = append(names, builds[i].ID.String())
		}
		removed, err := b.cache.Remove(ctx, b.self(), names, all, true)
		require.NoError(t, err)
		return removed.FreedBytes
	}
	own := make([]int64, len(builds))
	for i := range builds {
		var err error
		own[i], err = b.cache.Queries.RemovalBytes(b.self(), builds[i])
		require.NoError(t, err)
		require.Equal(t, own[i], would(false, i), "build %d alone", i)
	}
	both := would(false, 0, 1)
	require.Greater(t, both, own[0]+own[1]+1<<20,
		"what the second takes from the first goes with both")
	require.Equal(t, b.plan(0).Used, would(true))
	before := b.plan(0).Used
	removed, err := b.cache.Remove(ctx, b.self(),
		[]string{builds[0].ID.String(), builds[1].ID.String()}, false, false)
	require.NoError(t, err)
	require.Equal(t, both, removed.FreedBytes)
	require.Equal(t, before-b.plan(0).Used, removed.FreedBytes)
	left := would(true)
	removed, err = b.cache.Remove(ctx, b.self(), nil, true, false)
	require.NoError(t, err)
	require.Equal(t, left, removed.FreedBytes)
	require.Zero(t, would(true))
}

// Lists say in a word how a build is kept, and so does what is said of a change; Show begins with
// it.
func TestHowABuildIsKeptIsListed(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	builds, _ := b.similar(2)
	key := builds[1].BuildKey.String()
	word := func() string {
		said := ""
		for _, l := range b.list() {
			if l.Build.BuildKey == builds[1].BuildKey {
				said = l.row.KeptAs
			}
		}
		for _, u := range b.usage(b.self(), key).Builds {
			require.Equal(t, said, u.Build.KeptAs)
		}
		changed, err := b.cache.Pin(ctx, b.self(), []string{key}, true)
		require.NoError(t, err)
		require.Equal(t, said, changed.Builds[0].KeptAs)
		require.Positive(t, changed.Builds[0].OwnBytes)
		return said
	}
	require.Equal(t, "whole", word())
	require.Positive(t, b.pack(builds[1]))
	require.Equal(t, "packed", word())
	require.NotContains(t, b.kept(key), "with a copy")
	require.NoError(t, b.acquire(b.variant(2)).View.Close())
	require.Equal(t, "packed, with a copy", word())
	require.Regexp(t, "^packed: .* are its own, with an unpacked copy in use$", b.kept(key))
	removed, err := b.cache.Remove(ctx, b.self(), []string{key}, false, true)
	require.NoError(t, err)
	require.Positive(t, removed.Builds[0].OwnBytes)
}

// Two models of one name are two, and what two builds share is found wherever it stands, packed or
// not.
func TestTwoEntriesAreCompared(t *testing.T) {
	b := newBench(t)
	builds, _ := b.similar(2)
	u := b.usage(b.self())
	require.Equal(t, u.Builds[0].Build.ModelName, u.Builds[1].Build.ModelName)
	require.NotEqual(t, u.Builds[0].Build.ModelDigest, u.Builds[1].Build.ModelDigest)
	two := func() *wire.UsageReply {
		return b.usage(b.self(), builds[0].ID.String(),
			builds[1].ID.String())
	}
	whole := two()
	require.Equal(t, large(builds[1]).String(), whole.Shared[0].Digest)
	require.GreaterOrEqual(t, whole.Shared[0].Bytes, int64(1<<20), "the megabyte of weights")
	require.Less(t, whole.Shared[0].Bytes, whole.Shared[0].Size, "but not the rest")
	sum := int64(0)
	for _, s := range whole.Shared {
		sum += s.Bytes
	}
	require.Equal(t, whole.SharedBytes, sum)
	require.Positive(t, b.pack(builds[1]))
	require.Equal(t, whole.SharedBytes, two().SharedBytes)
	require.Empty(t, b.usage(b.self(), builds[0].ID.String()).Shared)
}
