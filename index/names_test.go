package index

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

func named(t *testing.T, x *Index, name string) (ids []BuildID) {
	require.NoError(t, x.EachNamed(context.Background(), name, func(b Build) error {
		require.True(t, b.MatchesName(name), name)
		ids = append(ids, b.ID)
		return nil
	}))
	return ids
}

// A build is found by whatever it may be called, by eight digits or more of what has digits, and by
// nothing else; also after a rebuild, and not once it is gone.
func TestBuildsAreFoundByAllTheirNames(t *testing.T) {
	dir := memoryDir(t)
	x := open(t, dir)
	one := publish(t, x, func(b *Build) {
		b.RequestKey, b.BuildKey, b.ModelDigest, b.ModelName = RequestKey{0xab, 0xcd, 0xef, 0x12,
			0x34}, BuildKey{0x55, 1, 2, 3, 4}, cas.Digest{0x66, 1, 2, 3, 4}, "one.onnx"
	})
	other := publish(t, x, func(b *Build) { // which begins as the first, and is called as it is
		b.RequestKey, b.BuildKey, b.ModelDigest, b.ModelName = RequestKey{0xab, 0xcd, 0xef, 0x12,
			0x44}, BuildKey{0x55, 1, 2, 3, 4, 0, 0, 0, 0, 9}, cas.Digest{0x67}, "one.onnx"
	})
	several := publish(t, x, group,
		func(b *Build) { b.RequestKey, b.BuildKey = RequestKey{7}, BuildKey{7} })
	both := []BuildID{one.ID, other.ID}
	if string(one.ID[:]) > string(other.ID[:]) {
		both = []BuildID{other.ID, one.ID}
	}
	check := func() {
		t.Helper()
		for name, want := range map[string][]BuildID{
			"one.onnx": both, "decoder.onnx": {several.ID}, "two.onnx": nil, "": nil,
			"abcdef1": nil, "abcdef12": both, "abcdef123": {one.ID}, "abcdef1244": {other.ID},
			"ABCDEF12": nil, "abcdef12g": nil,
			one.RequestKey.String(): {one.ID}, one.RequestKey.String() + "0": nil,
			one.BuildKey.String(): {one.ID}, other.BuildKey.String(): {other.ID},
			one.BuildKey.String()[:16]: both, one.BuildKey.String()[:20]: {one.ID},
			"66010203": {one.ID}, one.ID.String(): {one.ID}, one.ID.String()[:9]: {one.ID},
			several.Members[1].ModelDigest.String()[:8]: {several.ID},
			several.Members[1].AloneKey.String():        nil,
		} {
			require.Equal(t, want, named(t, x, name), name)
		}
	}
	check()
	closeSound(t, x)
	require.NoError(t, os.Remove(filepath.Join(dir, "index.db")))
	x = open(t, dir)
	require.NotEmpty(t, x.Rebuilt())
	check()
	require.NoError(t, x.Retract(context.Background(), one.ID, "test"))
	both = []BuildID{other.ID}
	require.Equal(t, both, named(t, x, "one.onnx"))
	require.Len(t, bucketRows(t, x, bucketNames), 3+5,
		"those of the other and of the group are left")
	closeSound(t, x)
}
