package dedupe

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cas"
)

// countedSource counts what is read.
type countedSource struct {
	Source
	bytes, reads atomic.Int64
}

func (c *countedSource) ReadAt(p []byte, off int64) (int, error) {
	c.bytes.Add(int64(len(p)))
	c.reads.Add(1)
	return c.Source.ReadAt(p, off)
}

// Of a small target every byte is read once, however much of it is compared.
func TestASmallTargetIsReadOnce(t *testing.T) {
	b := randomBytes(123, 900<<10)
	for i := 0; i < len(b); i += 20 << 10 {
		copy(b[i:], b[:5<<10])
	}
	stored := Candidate{Digest: cas.Digest{1}, Source: source(b[300<<10:])}
	counted := &countedSource{Source: source(b)}
	_, err := Match(context.Background(), counted, []Candidate{stored}, Options{})
	require.NoError(t, err)
	require.Equal(t, int64(len(b)), counted.bytes.Load())

	counted = &countedSource{Source: source(b)}
	s, err := Scan(context.Background(), counted, Options{})
	require.NoError(t, err)
	_, err = s.Match(context.Background(), []Candidate{stored})
	require.NoError(t, err)
	require.Equal(t, int64(len(b)), counted.bytes.Load())

	bad := errors.New("bad sector")
	_, err = Scan(context.Background(), &failingFrom{source(b), 600 << 10, bad}, Options{})
	require.ErrorIs(t, err, bad)
	_, err = Match(context.Background(), &failingFrom{source(b), 600 << 10, bad}, nil, Options{})
	require.ErrorIs(t, err, bad)
}
