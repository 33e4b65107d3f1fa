package match

import (
	"bytes"
	"context"
	"flag"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

var writeSketch = flag.Bool("write-sketch", false,
	"write the sample of a new format; never for one that was released")

func randomBytes(seed uint64, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b) // never fails
	return b
}

func sketchOf(t *testing.T, b []byte) Sketch {
	t.Helper()
	s, err := SketchOf(context.Background(), bytes.NewReader(b))
	require.NoError(t, err)
	return s
}

func TestCandidatesAreRankedByAddedBytes(t *testing.T) {
	a, b := randomBytes(1, 3<<20), randomBytes(2, 2<<20)
	target := bytes.Join([][]byte{a, []byte("shifted"), b}, nil)
	known := map[cas.Digest]Sketch{
		{1}: sketchOf(t, a),
		{2}: sketchOf(t, a[1<<20:]), // adds nothing to the first
		{3}: sketchOf(t, b[3:]),
		{4}: sketchOf(t, randomBytes(3, 4<<20)),
	}
	got := Candidates(sketchOf(t, target), maps.All(known), nil, 8)
	require.Equal(t, []cas.Digest{{1}, {3}}, got)
	got = Candidates(sketchOf(t, target), maps.All(known),
		func(d cas.Digest) bool { return d != cas.Digest{1} }, 8)
	require.Equal(t, []cas.Digest{{2}, {3}}, got, "one that may not does not stand for another")
}

func TestSketchCodec(t *testing.T) {
	s := sketchOf(t, randomBytes(4, 1<<20))
	require.Len(t, s.Keys, sketchKeys)
	b, err := s.AppendBinary(nil)
	require.NoError(t, err)
	got, err := DecodeSketch(b)
	require.NoError(t, err)
	require.Equal(t, s, got)

	var f *dedupe.FormatError
	_, err = DecodeSketch(b[:len(b)-1])
	require.ErrorAs(t, err, &f)
	b[sketchHead+7] = 0xff // the first key is now greater than the second
	_, err = DecodeSketch(b)
	require.ErrorAs(t, err, &f)
	b[0] = sketchVersion + 1
	_, err = DecodeSketch(b)
	require.ErrorIs(t, err, dedupe.ErrNewer)
	b[0] = sketchVersion - 1
	_, err = DecodeSketch(b)
	require.ErrorAs(t, err, &f)
	require.Equal(t, "version", f.Field)
}

// Sketches of version 1 are in indexes, and are compared with new ones. Where these keys come out
// otherwise sketchVersion has to be another one, and the sample is kept for as long as that one can
// be read.
func TestSketchOfVersion1(t *testing.T) {
	path := filepath.Join("..", "..", "testdata", "format", "v1", "sketch")
	got,
		err := sketchOf(t,
		bytes.Join([][]byte{randomBytes(51, segmentSize), make([]byte, 5000),
			bytes.Repeat([]byte("text, and "), 3000), randomBytes(52, segmentSize)}, nil)).
		AppendBinary(nil)
	require.NoError(t, err)
	if *writeSketch {
		require.NoError(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, want, got, "another definition of anchors, of keys, or of which are kept")
}

// Anchors are where the bytes say, whatever stands before them and however the blob is cut.
func TestAnchorsMoveWithTheBytes(t *testing.T) {
	b := randomBytes(5, 3*segmentSize+12345)
	scan := func(b []byte) map[int64]uint64 {
		all := segmentsOf(t, b, scanOptions{})
		found := map[int64]uint64{}
		for _, part := range all {
			for _, a := range part.anchors {
				found[a.at] = a.key
			}
		}
		return found
	}
	plain, shifted := scan(b), scan(append(make([]byte, 1001), b...))
	require.InDelta(t, len(b)/anchorEvery, len(plain), 300)
	for at, key := range plain {
		require.Equal(t, key, shifted[at+1001])
	}
}

func TestZerosHaveNoAnchors(t *testing.T) {
	require.Empty(t, sketchOf(t, make([]byte, 1<<20)).Keys)
}
