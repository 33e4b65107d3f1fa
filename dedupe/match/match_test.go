package match

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"
	"pgregory.net/rapid"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

type buffer []byte

func (b buffer) WriteAt(p []byte, off int64) (int, error) { return copy(b[off:], p), nil }

func source(b []byte) dedupe.Source { return bytes.NewReader(b) }

// among has a target compared with these candidates, whatever its sketch is.
func among(candidates ...Candidate) func(context.Context, Sketch) ([]Candidate, error) {
	return func(context.Context, Sketch) ([]Candidate, error) { return candidates, nil }
}

// pack matches, and checks that the recipe gives the target back.
func pack(t require.TestingT, target []byte, stored ...[]byte) *Plan {
	blobs := map[cas.Digest][]byte{}
	var candidates []Candidate
	for _, s := range stored {
		d := cas.Digest(blake3.Sum256(s))
		blobs[d] = s
		candidates = append(candidates, Candidate{Digest: d, Source: source(s)})
	}
	p, err := Find(context.Background(), source(target), among(candidates...))
	require.NoError(t, err)
	if !p.Shares() {
		return p
	}
	lit := make([]byte, p.LiteralSize())
	require.NoError(t, dedupe.ReadFull(p.Literals(source(target)), lit, 0))
	d := cas.Digest(blake3.Sum256(lit))
	blobs[d] = lit
	r, err := p.Recipe(cas.Digest(blake3.Sum256(target)), d)
	require.NoError(t, err)
	file, err := r.Encode()
	require.NoError(t, err)
	again, err := dedupe.DecodeRecipe(file)
	require.NoError(t, err)
	require.Equal(t, r, again)
	got := make(buffer, len(target))
	open := func(d cas.Digest) (dedupe.Source, error) { return source(blobs[d]), nil }
	require.NoError(t, dedupe.Apply(context.Background(), again, open, got, dedupe.ApplyOptions{}))
	require.True(t, bytes.Equal(target, got))
	return p
}

func TestMatch(t *testing.T) {
	a, b := randomBytes(11, 9<<20), randomBytes(12, 300<<10)
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	changed := bytes.Clone(a)
	for i := 700; i < len(changed); i += 50000 {
		changed[i] ^= 1
	}
	cases := map[string]struct {
		target   []byte
		stored   [][]byte
		literals int64 // at most
		extents  int   // at most
	}{
		"the same, shifted by 4": {join([]byte("1234"), a), [][]byte{a}, 4, 2},
		"shifted by 1, a gap": {join([]byte("1"), a[:5<<20], []byte("new"), a[5<<20:]),
			[][]byte{a}, 4, 4},
		// what stands before the first change is too short
		"one byte in 50,000 changed": {changed, [][]byte{a}, 189 + 700, 400},
		"from two, in another order": {join(b, a), [][]byte{a, b}, 0, 2},
		"the same tensor twice":      {join(a, []byte("x"), a), nil, 9<<20 + 1, 2},
		"twice, from a base":         {join(b, []byte("x"), b), [][]byte{b}, 1, 3},
		"the same tensor ten times":  {bytes.Repeat(b, 10), nil, 300 << 10, 10},
		"nothing shared":             {b, [][]byte{a}, 300 << 10, 1},
		"empty":                      {nil, [][]byte{a}, 0, 0},
		"shorter than a window":      {[]byte("x"), [][]byte{a}, 1, 1},
		"zeros":                      {make([]byte, 1<<20), [][]byte{a}, 64, 3},
		"a short period":             {bytes.Repeat(b[:3000], 1000), nil, 9000, 3},
		"behind zeros that both have": {join(make([]byte, 1<<20), b, []byte("y")),
			[][]byte{join([]byte("q"), make([]byte, 1<<20), b)}, 1, 2},
		"half of a tensor of another":  {a[3<<20 : 6<<20], [][]byte{a}, 0, 1},
		"a match over the parts' seam": {a[streamSize-5000 : streamSize+5000], [][]byte{a}, 0, 1},
		"a run begun by a base": {join(b, bytes.Repeat([]byte("12345678"), 1000)),
			[][]byte{join(b, []byte("1234"))}, 4 + 8, 3},
		"lone zeros": {join(b, make([]byte, 5000), []byte("z"), make([]byte, 2000),
			b[:9]), [][]byte{b}, 1 + 1 + 1 + 9, 6},
		"a word, 64 KiB of it": {join(b[:999], bytes.Repeat([]byte("12345678"), 8<<10)), nil,
			999 + 8, 2},
		"a period without anchors": {join(b[:999], bytes.Repeat([]byte("123456789"), 8<<10)), nil,
			999 + 9 + runStride, 3},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			p := pack(t, c.target, c.stored...)
			require.LessOrEqual(t, p.LiteralSize(), c.literals)
			require.LessOrEqual(t, len(p.Extents), c.extents)
		})
	}
}

// Where a candidate's parts are cut a match goes on, though there it has no anchor that the next
// part could begin with, and stands beside more that is new than gaps are filled of.
func TestMatchGoesOnOverTheSeamOfParts(t *testing.T) {
	const still = 20 << 10
	noise, before, behind, other := randomBytes(81, 200<<10), randomBytes(82, maxFillGap+1000),
		randomBytes(85, maxFillGap+1000), randomBytes(83, streamSize)
	quiet := randomBytes(84, still)
	for i := range quiet {
		quiet[i] &^= 3 // pairs that differ there are none
	}
	require.Empty(t, anchorsAll(quiet, 0, minProduct(denseLevel)))
	for name, shared := range map[string][]byte{
		"to the end":       bytes.Join([][]byte{noise, quiet}, nil),
		"to the beginning": bytes.Join([][]byte{quiet, noise}, nil),
	} {
		t.Run(name, func(t *testing.T) {
			seam := len(noise)
			if bytes.HasPrefix(shared, quiet) {
				seam = still
			}
			stored := bytes.Join([][]byte{other[:streamSize-seam], shared, other[:300<<10]}, nil)
			p := pack(t, bytes.Join([][]byte{before, shared, behind}, nil), stored)
			require.LessOrEqual(t, p.LiteralSize(), int64(len(before)+len(behind)))
		})
	}
}

// Any blob that is cut and joined is rebuilt, with linear work.
func TestMatchRandomly(t *testing.T) {
	parts := [][]byte{randomBytes(21, 40<<10), randomBytes(22, 3<<10), make([]byte, 20<<10),
		bytes.Repeat([]byte("period"), 2000), randomBytes(23, 100<<10)}
	piece := rapid.Custom(func(t *rapid.T) []byte {
		p := rapid.SampledFrom(parts).Draw(t, "part")
		from := rapid.IntRange(0, len(p)-1).Draw(t, "from")
		return p[from : from+rapid.IntRange(1, len(p)-from).Draw(t, "length")]
	})
	blob := rapid.Custom(func(t *rapid.T) []byte {
		return bytes.Join(rapid.SliceOfN(piece, 1, 8).Draw(t, "pieces"), nil)
	})
	rapid.Check(t, func(t *rapid.T) {
		target, stored := blob.Draw(t, "target"), blob.Draw(t, "stored")
		if bytes.Equal(target, stored) {
			t.Skip("the target itself is no candidate")
		}
		p := pack(t, target, stored)
		require.Less(t, p.stats.compared, int64(2*spareWork+8*(len(target)+len(stored))))
	})
}

// Bytes that one candidate has are not taken from another one too, even beside bytes that only the
// other one has.
func TestCandidatesWithEqualAndOtherBytes(t *testing.T) {
	a, b, c := randomBytes(91, 50<<10), randomBytes(92, 60<<10), randomBytes(93, 70<<10)
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	for name, stored := range map[string][][]byte{
		"behind": {join([]byte("1"), c), join(b, c[:5000]), a},
		"before": {join([]byte("1"), b), join(b[50<<10:], c), a},
		"on both sides": {join(a, []byte("2")), join(c, []byte("3")),
			join(a[40<<10:], b, c[:6000])},
		"around": {b[10<<10 : 50<<10], join(a, b, c, []byte("4"))},
	} {
		t.Run(name, func(t *testing.T) {
			p := pack(t, join(a, b, c), stored...)
			require.LessOrEqual(t, p.LiteralSize(), int64(minPiece))
		})
	}
}

func TestMatchWithAnchorsEverywhere(t *testing.T) {
	b := randomBytes(31, 1<<20)
	at, ok := nextAnchor(b, 0, minProduct(0))
	require.True(t, ok)
	dense := bytes.Clone(b)
	for i := 0; i+16 <= len(dense); i += 16 {
		copy(dense[i:], b[at:at+8]) // the rest is random, so that nothing is as long as the floor
	}
	other := randomBytes(32, 1<<20)
	for i := 0; i+16 <= len(other); i += 16 {
		copy(other[i:], b[at:at+8])
	}
	all := segmentsOf(t, dense, scanOptions{})
	require.Equal(t, denseSegment(0, 1), len(all[0].anchors))
	p := pack(t, dense, other)
	require.Less(t, p.stats.compared, int64(2*spareWork+8*(len(dense)+len(other))))
}
