package match

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// Literals are the same wherever they are read from and however many stand close together.
func TestLiteralsFromAnyOffset(t *testing.T) {
	target := randomBytes(124, 400<<10)
	lengths := randomBytes(125, 2000)
	var ranges []dedupe.Extent
	var want []byte
	at := int64(0)
	for i := 0; i+1 < len(lengths); i += 2 {
		gap, n := 1+int64(lengths[i]), 1+int64(lengths[i+1])
		if i%400 == 0 {
			gap, n = 3<<10, 20<<10 // a long one, apart
		}
		at += gap
		if at+n > int64(len(target)) {
			break
		}
		ranges = append(ranges, dedupe.Extent{At: int64(len(want)), From: at, Length: n})
		want = append(want, target[at:at+n]...)
		at += n
	}
	l := (&Plan{literals: ranges}).Literals(source(target))
	require.Equal(t, int64(len(want)), l.Size())
	got := make([]byte, len(want))
	require.NoError(t, dedupe.ReadFull(l, got, 0))
	require.Equal(t, want, got)
	for _, n := range []int{1, 7, 300, 30 << 10} {
		for off := 0; off < len(want); off += max(97, n/3) {
			k, err := l.ReadAt(got[:n], int64(off))
			require.Equal(t, min(n, len(want)-off), k)
			require.Equal(t, want[off:off+k], got[:k], "%d bytes from %d on", n, off)
			if k < n {
				require.ErrorIs(t, err, io.EOF)
			}
		}
	}
}

// A plan becomes a recipe that contains the literals as frames, and is verified before it is
// published.
func TestAPlanBecomesARecipeWithFrames(t *testing.T) {
	ctx := context.Background()
	noise := func(seed byte, n int) []byte {
		b := make([]byte, n)
		_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
		return b
	}
	base, own := noise(1, 1<<20), bytes.Repeat([]byte("what stands nowhere else, "), 20000)
	plain := slices.Concat(own[:300000], base, own[300000:])
	target := bytes.NewReader(plain)
	candidate := Candidate{Digest: cas.Digest(blake3.Sum256(base)),
		Source: bytes.NewReader(base)}
	for _, candidates := range [][]Candidate{{candidate}, nil} {
		plan, err := Find(ctx, target, among(candidates...))
		require.NoError(t, err)
		r := plan.Framed(cas.Digest(blake3.Sum256(plain)))
		require.Len(t, r.Bases, len(candidates))
		dir := t.TempDir()
		s, err := dedupe.OpenRecipeStore(dir, nil)
		require.NoError(t, err)
		open := func(cas.Digest) (dedupe.Source, error) { return candidate.Source, nil }
		proven := false
		require.Error(t, s.Put(ctx, r, nil, nil), "the literals are missing")
		require.NoError(t, s.Put(ctx, r, plan.Literals(target), func(staged *dedupe.Recipe) error {
			a, err := dedupe.Assemble(staged, open)
			require.NoError(t, err)
			got, err := cas.Sum(ctx, a, 0, a.Size())
			require.NoError(t, err)
			require.Equal(t, r.Blob, got)
			_, there := s.Has(r.Blob)
			require.False(t, there, "it has its name before it is proven")
			proven = true
			return a.Close()
		}))
		require.True(t, proven)
		again, err := s.Get(r.Blob)
		require.NoError(t, err)
		require.True(t, again.Equal(r))
		a, err := dedupe.Assemble(again, open)
		require.NoError(t, err)
		for _, e := range again.Extents {
			got := make([]byte, e.Length)
			require.NoError(t, dedupe.ReadFull(a, got, e.At))
			require.True(t, bytes.Equal(plain[e.At:e.At+e.Length], got))
		}
		require.NoError(t, a.Close())
		for _, one := range r.Bases {
			require.Equal(t, []cas.Digest{r.Blob}, s.Users(one.Digest))
		}
	}
}
