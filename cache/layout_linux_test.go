package cache

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/query"
	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/bytesize"
)

func (b *bench) layout(p request.Peer, most int, names ...string) *query.Layout {
	b.Helper()
	l, err := b.cache.Queries.Layout(context.Background(), p, names, most)
	require.NoError(b, err)
	return l
}

// A layout says where the bytes of each file stand, whether it is packed already or only could be.
func TestALayoutSaysWhereBytesStand(t *testing.T) {
	b := newBench(t)
	builds, _ := b.similar(3)
	check := func() {
		t.Helper()
		l := b.layout(b.self(), 0)
		require.Len(t, l.Files, 3, "graphs are too small to be listed")
		for i := range l.Files {
			f := &l.Files[i]
			at, others := int64(0), int64(0)
			for _, p := range f.Pieces {
				require.Equal(t, at, p.At)
				at += p.Length
				if p.Holder != f.Digest {
					require.Equal(t, large(builds[0]), p.Holder)
					others += p.Length
				}
			}
			require.Equal(t, f.Size, at)
			require.GreaterOrEqual(t, f.Text.SharedBytes, int64(1<<20), "the megabyte of weights")
			require.Less(t, f.Text.SharedBytes, f.Size)
			if f.Digest != large(builds[0]) {
				require.Equal(t, f.Text.SharedBytes, others)
			}
		}
	}
	check()
	require.Positive(t, b.pack(builds[2]))
	check()

	l := b.layout(b.self(), 1)
	require.Len(t, l.Files, 1)
	require.EqualValues(t, 2, l.More)
	require.Positive(t, l.MoreBytes)
	require.Empty(t, b.layout(request.Peer{UID: b.cache.uid + 1}, 0).Files,
		"others' are not listed")
	_, err := b.cache.Queries.Layout(context.Background(), b.self(), []string{"no such"}, 0)
	require.Equal(t, apierr.NotFound, apierr.ClassOf(err))
}

// Literals of a packed base are reported under the base, wherever in its literals they are, because
// a digest of literals means nothing to users.
func TestALayoutNamesThePackedBase(t *testing.T) {
	b := newBench(t)
	builds, _ := b.stores([]*request.Request{b.repeated(2), b.dense(300, 2)})
	content := make(map[cas.Digest][]byte)
	for _, one := range builds {
		whole, err := os.ReadFile(b.object(large(one)))
		require.NoError(t, err)
		content[large(one)] = whole
	}
	require.Positive(t, b.pack(builds[1]))
	require.Positive(t, b.pack(builds[0]))
	require.True(t, b.cache.packing.OnlyPacked(large(builds[0])))
	l := b.layout(b.self(), 2)
	require.Len(t, l.Files, 2, "the larger ones: no graphs")
	others := int64(0)
	for i := range l.Files {
		f := &l.Files[i]
		require.GreaterOrEqual(t, f.Text.SharedBytes, int64(300*300*4), f.Name)
		at := int64(0)
		for _, p := range f.Pieces {
			require.Equal(t, at, p.At)
			at += p.Length
			require.Contains(t, content, p.Holder)
			require.Equal(t, content[f.Digest][p.At:p.At+p.Length],
				content[p.Holder][p.From:p.From+p.Length])
			if p.Holder != f.Digest {
				others += p.Length
			}
		}
		require.Equal(t, f.Size, at)
	}
	require.GreaterOrEqual(t, others, int64(300*300*4))
}

// A packed file has as many bytes of its own in a layout as show says.
func TestALayoutCountsOwnBytesAsShowDoes(t *testing.T) {
	b, builds, _ := packedPair(t)
	for _, f := range b.layout(b.self(), 0).Files {
		if !f.Text.Packed {
			require.Equal(t, f.Size, f.Text.OwnBytes)
			continue
		}
		require.Equal(t, large(builds[1]), f.Digest)
		require.Less(t, f.Text.OwnBytes, f.Size/2)
		require.Contains(t, b.cache.Queries.FormText(builds[1]),
			fmt.Sprintf("packed: %s of %s are its own", bytesize.Text(f.Text.OwnBytes),
				bytesize.Text(f.Size)))
	}
}
