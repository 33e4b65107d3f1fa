package cache

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/bytesize"
)

// kept is what show and why say of how a build is kept.
func (b *bench) kept(name string) string {
	b.Helper()
	shown, err := b.cache.Queries.Show(context.Background(), b.self(), name)
	require.NoError(b, err)
	why, err := b.cache.Queries.Why(context.Background(), b.self(), name)
	require.NoError(b, err)
	require.Equal(b, shown.Builds[0].KeptText, why.Candidates[0].Build.KeptText)
	require.Contains(b, []string{"whole", "packed", "packed, with a copy"}, shown.Builds[0].KeptAs,
		"a word, as in listings")
	require.Equal(b, shown.Builds[0].KeptAs, why.Candidates[0].Build.KeptAs)
	require.Equal(b, shown.Builds[0].OwnBytes, why.Candidates[0].Build.OwnBytes)
	return shown.Builds[0].KeptText
}

// A build is packed if some file of it is, and of several that are kept differently each is listed,
// with its bytes, the most first.
func TestABuildIsKeptAsItsFilesAre(t *testing.T) {
	b := newBench(t)
	builds, files := b.stores([]*request.Request{b.dense(512, 1), b.eventTexts(512, 512, 2),
		b.dense(512, 3)})
	require.Positive(t, b.pack(builds[1]))
	require.Positive(t, b.pack(builds[2]))
	words := make(map[index.BuildKey]string)
	for _, l := range b.list() {
		words[l.Build.BuildKey] = l.row.KeptAs
	}
	require.Equal(t, []string{"whole", "packed", "packed"},
		[]string{words[builds[0].BuildKey], words[builds[1].BuildKey], words[builds[2].BuildKey]})

	both := func(of ...*index.Build) *index.Build {
		one := &index.Build{}
		for _, build := range of {
			one.Files = append(one.Files, build.Files...)
		}
		return one
	}
	require.Equal(t, "packed", b.cache.Queries.Representation(both(builds[0], builds[2])))
	require.Equal(t, "packed", b.cache.Queries.Representation(both(builds[2], builds[0])))

	p, _ := b.cache.packing.Recipes.Has(large(builds[1]))
	mostlyOwn := fmt.Sprintf("packed: %s of %s are its own", bytesize.Text(p.Own),
		bytesize.Text(p.Size))
	require.Equal(t, mostlyOwn, b.kept(builds[1].BuildKey.String()))
	q, _ := b.cache.packing.Recipes.Has(large(builds[2]))
	require.Less(t, q.Bases[q.Literals].Size, q.Size/8)
	packed := fmt.Sprintf("packed: %s of %s are its "+
		"own", bytesize.Text(q.Bases[q.Literals].Size),
		bytesize.Text(q.Size))
	require.Equal(t, packed, b.kept(builds[2].BuildKey.String()))
	require.Equal(t, bytesize.Text(p.Size)+" "+mostlyOwn+"; "+bytesize.Text(q.Size)+" "+packed,
		b.cache.Queries.FormText(both(builds[1], builds[2])))
	require.Equal(t, "whole", b.kept(builds[0].BuildKey.String()))

	a := b.acquire(b.dense(512, 3))
	require.Equal(t, files[2], b.read(a))
	require.Equal(t, packed+", with an unpacked copy in use", b.kept(builds[2].BuildKey.String()))

	small := b.acquire(b.request(b.model(1)))
	require.Equal(t, "whole", b.cache.Queries.FormText(small.Build),
		"nothing more is to be said of what is small")
	require.True(t,
		slices.ContainsFunc(b.list(),
			func(l listed) bool {
				return l.Build.BuildKey == small.Build.BuildKey &&
					l.row.KeptAs == "whole"
			}))
}
