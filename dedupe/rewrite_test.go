package dedupe

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/blake3"

	"github.com/epcached/epcached/cas"
)

// What a container is rewritten to gives the same blobs, and has nothing that none of them needs.
func TestARewrittenContainerGivesTheSame(t *testing.T) {
	first, _ := sampleRecipe()
	container := first.Containers[1].Digest
	second := &Recipe{Blob: blake3.Sum256(base[200000:210000]), Size: 10000, Literals: NoLiterals,
		Containers: []Container{first.Containers[1]}, Extents: []Extent{{Length: 10000, From: 200000}}}
	both := []*Recipe{first, second}
	ranges := Needed(container, both)
	require.Equal(t, []Range{{3, 209997}}, ranges, "3 to 70003, 1003 to 201003 and 200000 to 210000 are one")
	ranges = Needed(container, both[1:])
	require.Equal(t, []Range{{200000, 10000}}, ranges)

	far := &Recipe{Blob: blake3.Sum256([]byte("far")), Size: 20, Literals: NoLiterals, Containers: []Container{first.Containers[1]},
		Extents: []Extent{{Length: 10, From: 300000}, {At: 10, Length: 10, From: 7}}}
	ranges = Needed(container, []*Recipe{second, far})
	require.Equal(t, []Range{{7, 10}, {200000, 10000}, {300000, 10}}, ranges)
	kept := Kept(NewSource(bytes.NewReader(base), int64(len(base))), ranges)
	require.EqualValues(t, 10020, kept.Size())
	rewritten := make([]byte, kept.Size())
	require.NoError(t, readFull(kept, rewritten, 0))
	to := Container{blake3.Sum256(rewritten), kept.Size()}
	for _, r := range []*Recipe{second, far} {
		moved, err := r.Moved(container, to, ranges)
		require.NoError(t, err)
		require.Equal(t, []Container{to}, moved.Containers)
		a, err := Assemble(moved, func(cas.Digest) (Source, error) { return NewSource(bytes.NewReader(rewritten), to.Size), nil })
		require.NoError(t, err)
		got := make([]byte, moved.Size)
		require.NoError(t, readFull(a, got, 0))
		want, err := Assemble(r, openSample)
		require.NoError(t, err)
		before := make([]byte, r.Size)
		require.NoError(t, readFull(want, before, 0))
		require.Equal(t, before, got)
	}
	_, err := first.Moved(container, to, ranges)
	require.ErrorContains(t, err, "are not kept")
	for _, cut := range [][]Range{{{7, 10}, {300001, 9}}, {{7, 10}, {300000, 9}}, {{7, 9}, {300000, 10}}, {{7, 10}}, nil} {
		_, err = far.Moved(container, Container{to.Digest, 1000}, cut)
		require.ErrorContains(t, err, "are not kept", "%v", cut)
	}
	_, err = far.Moved(cas.Digest{1}, to, ranges)
	require.ErrorContains(t, err, "none of them")
}
