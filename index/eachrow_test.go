package index

import (
	"bytes"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// Iterating over the whole store returns each row once, in order, and omits removed ones.
func TestEachRowIsGivenOnce(t *testing.T) {
	x := open(t, memoryDir(t))
	var ids []BuildID
	for i := range byte(5) {
		b := publish(t, x,
			func(b *Build) { b.Files = []File{{b.Graph, 100 + int64(i), cas.Digest{100 + i}}} })
		require.NoError(t, x.Views.Save(b.ID[:], []byte("view of "+b.ID.String())))
		require.NoError(t, x.Shares.Save(append([]byte{i + 1}, make([]byte, 31)...), []byte{i}))
		ids = append(ids, b.ID)
	}
	gone := ids[0]
	ids = ids[1:]
	require.NoError(t, x.Retract(ctx, gone, "a test"))
	slices.SortFunc(ids, func(a, b BuildID) int { return bytes.Compare(a[:], b[:]) })

	var after []BuildID
	require.NoError(t,
		x.EachAfter(ctx, ids[1], func(b Build) error { after = append(after, b.ID); return nil }))
	require.Equal(t, ids[2:], after)

	var viewed []BuildID
	require.NoError(t, x.Views.Each(ctx, func(key, path []byte) error {
		id := BuildID(key)
		require.Equal(t, "view of "+id.String(), string(path))
		viewed = append(viewed, id)
		return nil
	}))
	require.Equal(t, ids, viewed)

	var shares []byte
	require.NoError(t, x.Shares.Each(ctx, func(key, share []byte) error {
		require.Equal(t, cas.Digest{share[0] + 1}, cas.Digest(key))
		shares = append(shares, share...)
		return nil
	}))
	require.Equal(t, []byte{0, 1, 2, 3, 4}, shares)

	needs := make(map[cas.Digest]int)
	var last cas.Digest
	require.NoError(t, x.EachNeed(ctx, cas.Digest{}, func(n Need) error {
		d, size, id := n.Blob, n.Size, n.Build
		require.EqualValues(t, 4096, n.Disk)
		require.NotEqual(t, gone, id)
		require.LessOrEqual(t, bytes.Compare(last[:], d[:]), 0)
		b, err := x.Get(id)
		require.NoError(t, err)
		require.True(t,
			slices.ContainsFunc(b.Files,
				func(f File) bool { return f.Digest == d && f.Size == size }))
		needs[d]++
		last = d
		return nil
	}))
	require.Equal(t, 1, needs[cas.Digest{101}])
	there, err := x.NeededIn(ctx, 101)
	require.NoError(t, err)
	require.Len(t, there, 1, "none that begins otherwise")
	require.Contains(t, there, cas.Digest{101})
	require.Zero(t, needs[cas.Digest{100}])

	s, err := x.Survey(ctx, nil, nil)
	require.NoError(t, err)
	x.Views.Drop(ids[0][:])
	for _, b := range s.Builds {
		require.True(t, b.Viewed)
	}
	s, err = x.Survey(ctx, nil, nil)
	require.NoError(t, err)
	require.False(t, s.Builds[0].Viewed)
	require.True(t, s.Builds[1].Viewed)
}
