package dedupe

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/blake3"
	"pgregory.net/rapid"

	"github.com/epcached/epcached/cas"
)

// blobs are found by their digests.
type blobs map[cas.Digest][]byte

func (b blobs) add(p []byte) Container {
	d := cas.Digest(blake3.Sum256(p))
	b[d] = p
	return Container{d, int64(len(p))}
}

func (b blobs) assemble(t require.TestingT, r *Recipe) []byte {
	a, err := Assemble(r, func(d cas.Digest) (Source, error) {
		p, ok := b[d]
		if !ok {
			return nil, cas.ErrNotFound
		}
		return NewSource(bytes.NewReader(p), int64(len(p))), nil
	})
	require.NoError(t, err)
	out := make([]byte, r.Size)
	require.NoError(t, readFull(a, out, 0))
	return out
}

// drawn is a recipe of pieces of the containers, and its blob. At least one piece is of each.
func (b blobs) drawn(t *rapid.T, containers ...Container) *Recipe {
	r := &Recipe{Containers: containers, Literals: NoLiterals}
	n := rapid.IntRange(len(containers), 8).Draw(t, "extents")
	for i := range n {
		e := Extent{At: r.Size, Container: i}
		if i >= len(containers) {
			e.Container = rapid.IntRange(0, len(containers)-1).Draw(t, "container")
		}
		size := containers[e.Container].Size
		e.From = rapid.Int64Range(0, size-1).Draw(t, "from")
		e.Length = rapid.Int64Range(1, size-e.From).Draw(t, "length")
		if rapid.Bool().Draw(t, "repeated") {
			e.Period = e.Length
			e.Length = rapid.Int64Range(e.Period+1, 5*e.Period+1).Draw(t, "repeated for")
		}
		r.Extents, r.Size = append(r.Extents, e), r.Size+e.Length
	}
	r.Tensors = []Tensor{{"weight", 0, r.Size}}
	plain := b.assemble(t, &Recipe{Blob: cas.Digest{1}, Size: r.Size, Containers: r.Containers, Literals: NoLiterals, Extents: r.Extents})
	r.Blob = b.add(plain).Digest
	return r
}

// A recipe whose container was packed gives the same blob without it.
func TestThroughGivesTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := make(blobs)
		draw := func(label string) Container {
			return all.add(append([]byte(label), rapid.SliceOfN(rapid.Byte(), 1, 50).Draw(t, label)...))
		}
		first, second, other := draw("first"), draw("second"), draw("other")
		made := all.drawn(t, first, second)
		r := all.drawn(t, Container{made.Blob, made.Size}, other)
		r.Literals = 1
		want := all.assemble(t, r)

		moved, err := r.Through(made)
		require.NoError(t, err)
		for _, c := range moved.Containers {
			require.NotEqual(t, made.Blob, c.Digest)
		}
		require.Equal(t, other.Digest, moved.Containers[moved.Literals].Digest)
		require.Equal(t, r.Tensors, moved.Tensors)
		require.Equal(t, want, all.assemble(t, moved))
	})
}

// Who took from a blob's literals can take from the blob, wherever its extents have them, once or more often.
func TestLiteralsStandInTheirBlob(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := make(blobs)
		other := all.add([]byte("what stands elsewhere"))
		own := all.add(append([]byte("own"), rapid.SliceOfN(rapid.Byte(), 1, 50).Draw(t, "literals")...))
		var parts []Extent // of the literals, all of them, some twice
		for at := int64(0); at < own.Size; {
			from := rapid.Int64Range(0, at).Draw(t, "from")
			end := rapid.Int64Range(at+1, own.Size).Draw(t, "end")
			e := Extent{From: from, Length: end - from, Container: 1}
			if rapid.Bool().Draw(t, "repeated") {
				e.Period, e.Length = e.Length, 3*e.Length+1
			}
			parts, at = append(parts, e), end
		}
		r := &Recipe{Containers: []Container{other, own}, Literals: 1}
		for _, e := range append(rapid.Permutation(parts).Draw(t, "order"), Extent{Length: 4}) {
			e.At = r.Size
			r.Extents, r.Size = append(r.Extents, e), r.Size+e.Length
		}
		r.Blob = cas.Digest{1}
		r.Blob = all.add(all.assemble(t, r)).Digest
		in, err := r.LiteralsIn()
		require.NoError(t, err)
		require.Equal(t, own.Digest, in.Blob)
		require.Equal(t, []Container{{r.Blob, r.Size}}, in.Containers)
		require.Equal(t, all[own.Digest], all.assemble(t, in))
	})
	r, _ := sampleRecipe()
	_, err := r.LiteralsIn()
	require.ErrorContains(t, err, "extents", "byte 17 of its literals is in none of its extents")
	r.Literals = NoLiterals
	in, err := r.LiteralsIn()
	require.NoError(t, err)
	require.Nil(t, in)
}

func TestThroughRefuses(t *testing.T) {
	all := make(blobs)
	one, two := all.add([]byte("one")), all.add([]byte("two"))
	made := &Recipe{Blob: all.add([]byte("onetwo")).Digest, Size: 6, Containers: []Container{one, two}, Literals: NoLiterals,
		Extents: []Extent{{At: 0, Length: 3}, {At: 3, Length: 3, Container: 1}}}
	of := func(c Container, e Extent) *Recipe {
		return &Recipe{Blob: cas.Digest{1}, Size: e.Length, Containers: []Container{c}, Literals: NoLiterals, Extents: []Extent{e}}
	}
	_, err := of(one, Extent{Length: 3}).Through(made)
	require.ErrorContains(t, err, "none of them")
	_, err = of(Container{made.Blob, 7}, Extent{Length: 7}).Through(made)
	require.ErrorContains(t, err, "7 bytes")
	_, err = of(Container{made.Blob, 6}, Extent{Length: 6 * maxRepeats, Period: 6}).Through(made)
	require.ErrorContains(t, err, "2 places")
}
