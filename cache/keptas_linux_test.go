package cache

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/index"
)

// A build is what is most changed of its files, and of several that are kept differently each is told, with its bytes, the most first.
func TestABuildIsKeptAsItsFilesAre(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	builds, _ := b.stores([]*Request{b.dense(512, 1), b.worded(512, 512, 2), b.dense(512, 3)})
	outcome, _ := b.verb(builds[1].BuildKey.String(), false)
	require.Equal(t, CompressedNow, outcome)
	require.Positive(t, b.pack(builds[2]))
	words := make(map[index.BuildKey]string)
	for _, l := range b.list() {
		words[l.Build.BuildKey] = l.KeptAs
	}
	require.Equal(t, []string{"whole", "compressed", "packed"}, []string{words[builds[0].BuildKey], words[builds[1].BuildKey], words[builds[2].BuildKey]})

	both := func(of ...*index.Build) *index.Build {
		one := &index.Build{}
		for _, build := range of {
			one.Files = append(one.Files, build.Files...)
		}
		return one
	}
	for range 16 { // in whatever order they come
		require.Equal(t, "packed", b.cache.formWord(both(builds[0], builds[2])))
		require.Equal(t, "compressed", b.cache.formWord(both(builds...)))
	}

	p, _ := b.cache.forms.Packed(large(builds[1]))
	info, err := os.Stat(b.recipePath(large(builds[1])))
	require.NoError(t, err)
	compressed := fmt.Sprintf("packed, %s of %s its own; compressed since %s, %[1]s to %[4]s, recipe included", bytesText(p.Compressed), bytesText(p.Size),
		info.ModTime().UTC().Format(time.RFC3339), bytesText(p.Stored))
	require.Equal(t, compressed, b.cache.keptAs(ctx, builds[1]))
	p, _ = b.cache.forms.Packed(large(builds[2]))
	require.Less(t, p.Containers[p.Literals].Size, p.Size/8)
	packed := fmt.Sprintf("packed, %s of %s its own; nothing of it is compressed", bytesText(p.Containers[p.Literals].Size), bytesText(p.Size))
	require.Equal(t, packed, b.cache.keptAs(ctx, builds[2]))
	texts := strings.Split(b.cache.keptAs(ctx, both(builds[1], builds[2])), "; ")
	require.Equal(t, strings.Split(bytesText(b.sizeOf(large(builds[1])))+" "+compressed+"; "+bytesText(b.sizeOf(large(builds[2])))+" "+packed, "; "), texts)

	small := b.acquire(b.request(b.model(1)))
	require.Equal(t, "whole", b.cache.keptAs(ctx, small.Build), "nothing more is to be said of what is small")
	require.True(t, slices.ContainsFunc(b.list(), func(l Listing) bool { return l.Build.BuildKey == small.Build.BuildKey && l.KeptAs == "whole" }))
}
