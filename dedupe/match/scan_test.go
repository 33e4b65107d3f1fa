package match

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/dedupe"
)

// segmentsOf is what scanAll hands on, all of it.
func segmentsOf(t *testing.T, b []byte, o scanOptions) (all []segment) {
	t.Helper()
	o.each = func(s segment) error { all = append(all, s); return nil }
	require.NoError(t, scanAll(context.Background(), source(b), o))
	return all
}

// One pass finds the sketch and all anchors, also where a window lies over the seam of two
// segments.
func TestMatchFindsTheSketchAsWell(t *testing.T) {
	noise := randomBytes(61, segmentSize)
	at, ok := nextAnchor(noise, 0, minProduct(0))
	require.True(t, ok)
	over := noise[at : at+windowSize]
	for _, size := range []int{0, 1, windowSize, segmentSize - 1, segmentSize, segmentSize + 1,
		segmentSize + windowSize, 3*segmentSize + 5000} {
		b := bytes.Repeat(randomBytes(62, 5000), size/5000+1)[:size]
		if size > segmentSize+windowSize {
			copy(b[segmentSize-1:], over) // an anchor at the last byte of a segment
			copy(b[2*segmentSize-windowSize+1:], over)
		}
		var all []int
		for _, s := range segmentsOf(t, b, scanOptions{level: denseLevel}) {
			for _, a := range s.anchors {
				all = append(all, int(a.at))
			}
		}
		require.Equal(t, anchorsAll(b, 0, minProduct(denseLevel)), all, "%d bytes", size)
		sketch, err := SketchOf(context.Background(), source(b))
		require.NoError(t, err)
		plan, err := Find(context.Background(), source(b),
			func(_ context.Context, found Sketch) ([]Candidate, error) {
				require.Equal(t, sketch, found)
				return nil, nil
			})
		require.NoError(t, err)
		require.Equal(t, sketch, plan.Sketch)
	}
	bad := errors.New("no candidates")
	_, err := Find(context.Background(), source(noise),
		func(context.Context, Sketch) ([]Candidate, error) { return nil, bad })
	require.ErrorIs(t, err, bad)
}

// Of a small target every byte is read once, however much of it is compared.
func TestASmallTargetIsReadOnce(t *testing.T) {
	b := randomBytes(123, 900<<10)
	for i := 0; i < len(b); i += 20 << 10 {
		copy(b[i:], b[:5<<10])
	}
	stored := Candidate{Digest: cas.Digest{1}, Source: source(b[300<<10:])}
	counted := &countedSource{Source: source(b)}
	_, err := Find(context.Background(), counted, among(stored))
	require.NoError(t, err)
	require.Equal(t, int64(len(b)), counted.bytes.Load())

	bad := errors.New("bad sector")
	_, err = Find(context.Background(), &failingFrom{source(b), 600 << 10, bad}, among())
	require.ErrorIs(t, err, bad)
}

// A candidate that cannot be read is named.
func TestMatchNamesTheUnreadableBlob(t *testing.T) {
	b, bad := randomBytes(124, 900<<10), errors.New("bad sector")
	_, err := Find(context.Background(), source(b),
		among(Candidate{cas.Digest{1}, &failingFrom{source(b[5:]), 600 << 10, bad}}))
	require.ErrorIs(t, err, bad)
	var c *dedupe.BaseError
	require.ErrorAs(t, err, &c)
	require.Equal(t, cas.Digest{1}, c.Digest)
}

// countedSource counts what is read.
type countedSource struct {
	dedupe.Source
	bytes atomic.Int64
}

func (c *countedSource) ReadAt(p []byte, off int64) (int, error) {
	c.bytes.Add(int64(len(p)))
	return c.Source.ReadAt(p, off)
}

// failingFrom cannot be read in the 64 KiB from an offset on.
type failingFrom struct {
	dedupe.Source
	from int64
	err  error
}

func (f *failingFrom) ReadAt(p []byte, off int64) (int, error) {
	if off < f.from+64<<10 && off+int64(len(p)) > f.from {
		return 0, f.err
	}
	return f.Source.ReadAt(p, off)
}
