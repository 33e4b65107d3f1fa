package cas

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/blake3"
)

// random returns n bytes that depend on n only.
func random(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)})
	_, _ = r.Read(b) // never fails
	return b
}

func TestSumIsStandardBLAKE3(t *testing.T) {
	sizes := []int{0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 3000, 5 * 1024, groupSize - 1, groupSize, groupSize + 1,
		3*groupSize + 7, pieceSize - 1, pieceSize, pieceSize + 1, 2 * pieceSize, 3 * pieceSize, 3*pieceSize + 1,
		4 * pieceSize, 7*pieceSize + groupSize, 8*pieceSize + 5000}
	for _, n := range sizes {
		b := random(n)
		got, err := Sum(context.Background(), bytes.NewReader(b), 0, int64(n))
		require.NoError(t, err)
		require.Equal(t, Digest(blake3.Sum256(b)), got, "%d bytes", n)
	}
}

func TestSumOfARange(t *testing.T) {
	b := random(3*pieceSize + 99)
	got, err := Sum(context.Background(), bytes.NewReader(b), 77, 2*pieceSize+3)
	require.NoError(t, err)
	require.Equal(t, Digest(blake3.Sum256(b[77:77+2*pieceSize+3])), got)
}

func TestSumRefuses(t *testing.T) {
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	b := random(2*pieceSize + 5)
	for _, c := range []struct {
		name   string
		ctx    context.Context
		off, n int64
		want   error
	}{
		{"range beyond the end", context.Background(), 10, int64(len(b)), io.ErrUnexpectedEOF},
		{"offset beyond the end", context.Background(), int64(len(b)) + 1, 1, io.ErrUnexpectedEOF},
		{"cancelled", cancelled, 0, int64(len(b)), context.Canceled},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Sum(c.ctx, bytes.NewReader(b), c.off, c.n)
			require.ErrorIs(t, err, c.want)
		})
	}
	_, err := Sum(context.Background(), bytes.NewReader(b), -1, 1)
	require.Error(t, err)
	_, err = Sum(context.Background(), bytes.NewReader(b), 0, -1)
	require.Error(t, err)
}

type failingReader struct{}

func (failingReader) ReadAt([]byte, int64) (int, error) { return 0, errors.New("bad sector") }

func TestSumNamesTheReadError(t *testing.T) {
	_, err := Sum(context.Background(), failingReader{}, 5, 10)
	require.EqualError(t, err, "read at offset 5: bad sector")
}

func TestTreeTakesPiecesInAnyOrder(t *testing.T) {
	b := random(9*pieceSize + 1234)
	want := Digest(blake3.Sum256(b))
	for seed := range uint64(20) {
		var tr tree
		for _, i := range rand.New(rand.NewPCG(seed, 0)).Perm(10) {
			part := make([]byte, pieceSize)
			k := copy(part, b[i*pieceSize:])
			tr.add(int64(i), pieceNode(part[:k], uint64(i)))
		}
		require.Equal(t, want, tr.root(), "seed %d", seed)
	}
}

func BenchmarkSum(b *testing.B) {
	const size = 256 << 20
	data := random(size)
	b.Run("zeebo", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			blake3.Sum256(data)
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			if _, err := Sum(context.Background(), bytes.NewReader(data), 0, size); err != nil {
				b.Fatal(err)
			}
		}
	})
}
