package dedupe

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/blake3"

	"github.com/epcached/epcached/cas"
)

// variant is a stored blob and one that has it nearly all, as another batch size has: tables grow, bytes of a header change, and what
// is new stands between.
func variant() (stored, target []byte) {
	stored = randomBytes(111, 6<<20)
	target = bytes.Join([][]byte{
		randomBytes(112, 4000), stored[:2<<20], randomBytes(113, 100<<10), stored[2<<20 : 4<<20], stored[4<<20+30<<10:], randomBytes(114, 700),
	}, nil)
	for i := 3 << 20; i < 5<<20; i += 300 << 10 {
		target[i] ^= 1
	}
	return stored, target
}

// What an expected candidate has is compared and not searched for, whoever tells of it, and what is found is the same.
func TestAGuideSavesLookingForAnchors(t *testing.T) {
	stored, target := variant()
	plain := packWith(t, Options{}, target, stored)
	p := packWith(t, Options{guideFrom: 1 << 20}, target, stored)
	require.LessOrEqual(t, p.LiteralSize(), plain.LiteralSize()+leastPiece)
	require.Greater(t, plain.Stats.Scanned, int64(len(target)))
	// Of the segment in which the bytes move by what is new, that; and the beginning and end.
	require.Less(t, p.Stats.Scanned, int64(1<<20))
	// Each byte once, those of the two segments in which they move up to twice, and the gaps there.
	require.Less(t, p.Stats.Compared, int64(len(target)+3*segmentSize))

	ctx := context.Background()
	sketch, err := SketchOf(ctx, source(stored))
	require.NoError(t, err)
	c := Candidate{Digest: cas.Digest{1}, Source: source(stored)}
	asked := 0
	s, err := Scan(ctx, source(target), Options{guideFrom: 1 << 20, Similar: func(_ context.Context, parts Sketch) ([]Similar, error) {
		asked++
		require.Equal(t, int64(len(target)), parts.Size)
		// A blob of random bytes in its place is not expected from so few parts.
		other, err := SketchOf(ctx, source(randomBytes(115, 6<<20)))
		ranked := Candidates(parts, func(yield func(cas.Digest, Sketch) bool) {
			_ = yield(cas.Digest{2}, other) && yield(c.Digest, sketch)
		}, 2)
		require.Len(t, ranked, 1)
		require.Equal(t, c.Digest, ranked[0].Digest)
		return []Similar{{c, sketch}}, err
	}})
	require.NoError(t, err)
	require.Equal(t, 1, asked)
	require.Equal(t, cas.Digest(blake3.Sum256(target)), s.Digest)
	// The sketch is nearly that of the whole target, of which most was not searched.
	whole, err := SketchOf(ctx, source(target))
	require.NoError(t, err)
	ranked := Candidates(whole, func(yield func(cas.Digest, Sketch) bool) { yield(cas.Digest{3}, s.Sketch) }, 1)
	require.Greater(t, ranked[0].Share, 0.95)
	got, err := s.Match(ctx, nil) // and it is a candidate though nobody says so any more
	require.NoError(t, err)
	require.Equal(t, p.Extents, got.Extents)
	require.Equal(t, c.Digest, got.Containers[0].Digest)
}

// Nothing is lost for what the target has once more, though nearly all anchors of what the guide has found are unknown.
func TestWhatAGuideHasFoundIsFoundOnceMore(t *testing.T) {
	stored := randomBytes(116, 5<<20)
	more := stored[3<<20+12345:][:sure+sure/2]
	for name, target := range map[string][]byte{
		"behind": bytes.Join([][]byte{stored, []byte("x"), more, randomBytes(117, 500)}, nil),
		"before": bytes.Join([][]byte{[]byte("x"), more, randomBytes(117, 500), stored}, nil),
	} {
		t.Run(name, func(t *testing.T) {
			p := packWith(t, Options{guideFrom: 1 << 20}, target, stored)
			require.Less(t, p.Stats.Scanned, int64(1<<20), "there is a guide")
			require.LessOrEqual(t, p.LiteralSize(), int64(1+500+leastPiece))
		})
	}
}

// A candidate that is not what was expected costs little, and changes nothing.
func TestAGuideThatKnowsNothing(t *testing.T) {
	stored, target := variant()
	other := Candidate{Digest: cas.Digest{2}, Source: source(randomBytes(118, 6<<20))}
	s, err := Scan(context.Background(), source(target), Options{guideFrom: 1 << 20, Similar: func(context.Context, Sketch) ([]Similar, error) {
		return []Similar{{Candidate: other}}, nil
	}})
	require.NoError(t, err)
	whole, err := SketchOf(context.Background(), source(target))
	require.NoError(t, err)
	require.Equal(t, whole, s.Sketch)
	got, err := s.Match(context.Background(), []Candidate{{Digest: cas.Digest{1}, Source: source(stored)}})
	require.NoError(t, err)
	require.Equal(t, packWith(t, Options{}, target, stored).Extents, got.Extents)
}

func TestAGuideSaysWhoseBytesCannotBeRead(t *testing.T) {
	stored, target := variant()
	bad := errors.New("bad sector")
	for name, from := range map[string]int64{"while it is looked for": 0, "while it is compared": 1<<20 + 200<<10} {
		t.Run(name, func(t *testing.T) {
			src := &failingFrom{source(stored), from, bad}
			_, err := Match(context.Background(), source(target), []Candidate{{Digest: cas.Digest{1}, Source: src}}, Options{guideFrom: 1 << 20})
			require.ErrorIs(t, err, bad)
			var c *ContainerError
			require.ErrorAs(t, err, &c)
			require.Equal(t, cas.Digest{1}, c.Digest)
		})
	}
	_, err := Scan(context.Background(), source(target), Options{guideFrom: 1 << 20, Similar: func(context.Context, Sketch) ([]Similar, error) { return nil, bad }})
	require.ErrorIs(t, err, bad)
}

// failingFrom cannot be read in the 64 KiB from an offset on.
type failingFrom struct {
	Source
	from int64
	err  error
}

func (f *failingFrom) ReadAt(p []byte, off int64) (int, error) {
	if off < f.from+64<<10 && off+int64(len(p)) > f.from {
		return 0, f.err
	}
	return f.Source.ReadAt(p, off)
}

// The candidate that parts were compared with while the target was read may stand at any place among the candidates: what was found is taken from it and from no other one.
func TestAGuideNeedNotBeTheFirstCandidate(t *testing.T) {
	stored, target := variant()
	guide := Candidate{Digest: blake3.Sum256(stored), Source: source(stored)}
	others := [][]byte{randomBytes(119, 7<<20), target[:5000]}
	blobs := map[cas.Digest][]byte{guide.Digest: stored}
	var candidates []Candidate
	for _, b := range others {
		d := cas.Digest(blake3.Sum256(b))
		blobs[d] = b
		candidates = append(candidates, Candidate{Digest: d, Source: source(b)})
	}
	for name, all := range map[string][]Candidate{"among them": {candidates[0], guide, candidates[1]}, "not named again": candidates} {
		t.Run(name, func(t *testing.T) {
			s, err := Scan(context.Background(), source(target), Options{guideFrom: 1 << 20, Similar: func(context.Context, Sketch) ([]Similar, error) {
				return []Similar{{Candidate: guide}}, nil
			}})
			require.NoError(t, err)
			p, err := s.Match(context.Background(), all)
			require.NoError(t, err)
			require.Less(t, p.Stats.Scanned, int64(9<<20), "there is a guide: of the other one all is looked at")
			require.Less(t, p.LiteralSize(), int64(110<<10))
			lit := make([]byte, p.LiteralSize())
			require.NoError(t, readFull(p.Literals(source(target)), lit, 0))
			blobs[blake3.Sum256(lit)] = lit
			r, err := p.Recipe(s.Digest, blake3.Sum256(lit))
			require.NoError(t, err)
			got := make(buffer, len(target))
			open := func(d cas.Digest) (Source, error) { return source(blobs[d]), nil }
			require.NoError(t, Apply(context.Background(), r, open, got, ApplyOptions{}))
			require.True(t, bytes.Equal(target, got))
		})
	}
}
