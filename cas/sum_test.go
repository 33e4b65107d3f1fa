package cas

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"
)

// random returns n bytes that depend on n only.
func random(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)})
	_, _ = r.Read(b) // never fails
	return b
}

func TestSumIsStandardBLAKE3(t *testing.T) {
	sizes := []int{0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 3000, 5 * 1024, groupSize - 1,
		groupSize, groupSize + 1,
		3*groupSize + 7, pieceSize - 1, pieceSize, pieceSize + 1, 2 * pieceSize, 3 * pieceSize,
		3*pieceSize + 1,
		4 * pieceSize, 7*pieceSize + groupSize, 8*pieceSize + 5000}
	for _, n := range sizes {
		b := random(n)
		got, err := Sum(context.Background(), bytes.NewReader(b), 0, int64(n))
		require.NoError(t, err)
		require.Equal(t, Digest(blake3.Sum256(b)), got, "%d bytes", n)
	}
}

// Test vectors of the BLAKE3 specification: byte i of an input is i modulo 251.
func TestSumGivesTheReferenceVectors(t *testing.T) {
	for n, want := range map[int]string{
		0:     "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
		1:     "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
		1023:  "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
		1024:  "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
		1025:  "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
		2048:  "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
		3073:  "7124b49501012f81cc7f11ca069ec9226cecb8a2c850cfe644e327d22d3e1cd3",
		4096:  "015094013f57a5277b59d8475c0501042c0b642e531b0a1c8f58d2163229e969",
		8193:  "bab6c09cb8ce8cf459261398d2e7aef35700bf488116ceb94a36d0f5f1b7bc3b",
		16384: "f875d6646de28985646f34ee13be9a576fd515f76b5b0a26bb324735041ddde4",
		31744: "62b6960e1a44bcc1eb1a611a8d6235b6b4b78f32e7abc4fb4c6cdcce94895c47",
	} {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(i % 251)
		}
		got, err := Sum(context.Background(), bytes.NewReader(b), 0, int64(n))
		require.NoError(t, err)
		require.Equal(t, want, got.String(), "%d bytes", n)
		require.Equal(t, want, SumBytes(b).String(), "%d bytes", n)
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

func BenchmarkSum(b *testing.B) {
	const size = 256 << 20
	data := random(size)
	b.Run("library", func(b *testing.B) {
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

// The gate is held while a piece is read and hashed, and no longer.
func TestSumHoldsTheGateForEachPiece(t *testing.T) {
	const count = 5
	data := make([]byte, count*pieceSize-1)
	var taken, held, most atomic.Int64
	ctx := WithPieceGate(t.Context(), func(ctx context.Context) (func(), error) {
		taken.Add(1)
		now := held.Add(1)
		for seen := most.Load(); now > seen && !most.CompareAndSwap(seen, now); seen = most.Load() {
		}
		return func() { held.Add(-1) }, ctx.Err()
	})
	got, err := Sum(ctx, bytes.NewReader(data), 0, int64(len(data)))
	require.NoError(t, err)
	require.Equal(t, SumBytes(data), got)
	require.EqualValues(t, count, taken.Load())
	require.Zero(t, held.Load())
	require.LessOrEqual(t, most.Load(), int64(runtime.GOMAXPROCS(0)))

	failed := errors.New("no entry")
	ctx = WithPieceGate(t.Context(), func(context.Context) (func(), error) { return nil, failed })
	_, err = Sum(ctx, bytes.NewReader(data), 0, int64(len(data)))
	require.ErrorIs(t, err, failed)
}
