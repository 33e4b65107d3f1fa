package dedupe

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/blake3"

	"github.com/epcached/epcached/cas"
)

// One pass finds what the single steps find, also where a window lies over the seam of two segments.
func TestScanIsDigestSketchAndMatch(t *testing.T) {
	noise := randomBytes(61, segmentSize)
	at, ok := nextAnchor(noise, 0, leastProduct(0))
	require.True(t, ok)
	over := noise[at : at+windowSize]
	for _, size := range []int{0, 1, windowSize, segmentSize - 1, segmentSize, segmentSize + 1, segmentSize + windowSize, 3*segmentSize + 5000} {
		b := bytes.Repeat(randomBytes(62, 5000), size/5000+1)[:size]
		if size > segmentSize+windowSize {
			copy(b[segmentSize-1:], over) // an anchor at the last byte of a segment
			copy(b[2*segmentSize-windowSize+1:], over)
		}
		ctx := context.Background()
		opts := scanOptions{level: denseLevel, least: 1024, sketch: newSketcher()}
		all, digest, err := scanAndSum(ctx, source(b), opts)
		require.NoError(t, err)
		require.Equal(t, cas.Digest(blake3.Sum256(b)), digest)
		want, err := scanAll(ctx, source(b), scanOptions{level: denseLevel, least: 1024})
		require.NoError(t, err)
		for i := range want {
			require.Equal(t, want[i].anchors, all[i].anchors, "segment %d of %d bytes", i, size)
		}
		s, err := Scan(ctx, source(b), Options{})
		require.NoError(t, err)
		sketch, err := SketchOf(ctx, source(b))
		require.NoError(t, err)
		require.Equal(t, sketch, s.Sketch)
		stored := append([]byte("before"), b...)
		candidates := []Candidate{{Digest: cas.Digest{1}, Source: source(stored)}}
		got, err := s.Match(ctx, candidates)
		require.NoError(t, err)
		plan, err := Match(ctx, source(b), candidates, Options{})
		require.NoError(t, err)
		require.Equal(t, plan.Extents, got.Extents)
		_, err = s.Match(ctx, nil)
		require.ErrorContains(t, err, "matched before")
	}
}
