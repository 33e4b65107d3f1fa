package portable

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
)

// stream returns bytes that do not compress, the same each time.
func stream(size int) []byte {
	b := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

func lengths(t testing.TB, data []byte) (all []int) {
	require.NoError(t, Split(bytes.NewReader(data), func(chunk []byte) error {
		all = append(all, len(chunk))
		return nil
	}))
	return all
}

// Stores of all machines share chunks as long as this does not change.
func TestCutPointsStayAsTheyAre(t *testing.T) {
	require.Equal(t, []int{81618, 87146, 144205, 92397, 69666, 49256}, lengths(t, stream(512<<10)))
	require.Equal(t, []int{ChunkMax, ChunkMax, 100}, lengths(t, make([]byte, 2*ChunkMax+100)))
	require.Empty(t, lengths(t, nil))
}

func TestChunksBehindAnInsertionAreTheSame(t *testing.T) {
	old := stream(4 << 20)
	inserted := append(append(bytes.Clone(old[:1<<20]), "some bytes"...), old[1<<20:]...)
	sums := make(map[ChunkSum]bool)
	require.NoError(t, Split(bytes.NewReader(old), func(chunk []byte) error {
		sums[SumChunk(chunk)] = true
		return nil
	}))
	fresh := 0
	require.NoError(t, Split(bytes.NewReader(inserted), func(chunk []byte) error {
		if !sums[SumChunk(chunk)] {
			fresh += len(chunk)
		}
		return nil
	}))
	require.Positive(t, fresh)
	require.Less(t, fresh, 2*ChunkMax)
}

func TestEachChunkIsReadByItself(t *testing.T) {
	for name, data := range map[string][]byte{"raw": stream(1 << 20),
		"text": bytes.Repeat([]byte("text "), 1<<18),
		"one":  {1}, "empty": nil} {
		t.Run(name, func(t *testing.T) {
			var layer bytes.Buffer
			list, err := compress(&layer, bytes.NewReader(data), int64(len(data)))
			require.NoError(t, err)
			plain, err := zstd.NewReader(nil)
			require.NoError(t, err)
			defer plain.Close()
			whole, err := plain.DecodeAll(layer.Bytes(), nil) // any decoder reads it
			require.NoError(t, err)
			require.Equal(t, len(data), len(whole))
			require.True(t, bytes.Equal(data, whole))
			if len(data) == 0 {
				return
			}
			chunks, err := ParseChunks(name, list, int64(layer.Len()), int64(len(data)))
			require.NoError(t, err)
			u, err := NewUnpacker()
			require.NoError(t, err)
			defer u.Close()
			for i := range chunks {
				c := &chunks[len(chunks)-1-i]
				got, err := u.Chunk(c, layer.Bytes()[c.FrameAt:c.FrameAt+c.Frame])
				require.NoError(t, err)
				require.True(t, bytes.Equal(data[c.PlainAt:c.PlainAt+c.Plain], got))
			}
		})
	}
}

func TestAFrameThatGrowsIsRefused(t *testing.T) {
	enc, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	bomb := enc.EncodeAll(make([]byte, 64<<20), nil)
	require.Less(t, len(bomb), maxFrame)
	u, err := NewUnpacker()
	require.NoError(t, err)
	defer u.Close()
	c := &Chunk{Frame: int64(len(bomb)), Plain: ChunkMax}
	_, err = u.Chunk(c, bomb)
	require.Error(t, err)
	require.LessOrEqual(t, cap(u.out), 4*ChunkMax)
}

func TestALargeFileHasAChunkList(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	w, err := Create(dir)
	require.NoError(t, err)
	b, data := build(nil), stream(ChunkedFrom)
	b.Files[1] = Source{"sub/a.bin", int64(len(data)), bytes.NewReader(data)}
	card, err := w.Add(context.Background(), b)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	layers, err := ParseLayers("manifest", encode(&card.Manifest))
	require.NoError(t, err)
	require.Len(t, layers, 3)
	require.Nil(t, layers[0].Chunks)
	require.Equal(t, MediaChunks, layers[1].Chunks.MediaType)
	list, err := os.ReadFile(filepath.Join(dir, blobsDir, layers[1].Chunks.Digest.Hex()))
	require.NoError(t, err)
	chunks, err := ParseChunks("list", list, layers[1].Blob.Size, layers[1].File.Size)
	require.NoError(t, err)
	require.Greater(t, len(chunks), 2)
}

// The digest of a chunk list is in the manifest, so that readers notice any other byte. The list is
// no danger without that either: it is refused, or a chunk of it is.
func TestEachFlippedByteOfAChunkListIsRefused(t *testing.T) {
	const size = 1 << 20
	var layer bytes.Buffer
	list, err := compress(&layer, bytes.NewReader(stream(size)), size)
	require.NoError(t, err)
	u, err := NewUnpacker()
	require.NoError(t, err)
	defer u.Close()
	read := func(list []byte) error {
		chunks, err := ParseChunks("list", list, int64(layer.Len()), size)
		for i := 0; err == nil && i < len(chunks); i++ {
			c := &chunks[i]
			_, err = u.Chunk(c, layer.Bytes()[c.FrameAt:][:c.Frame])
		}
		return err
	}
	require.NoError(t, read(list))
	for i := range list {
		for _, bit := range []byte{1, 0x20, 0x80} {
			flipped := bytes.Clone(list)
			flipped[i] ^= bit
			require.Error(t, read(flipped), "byte %d", i)
		}
	}
}

func FuzzChunkList(f *testing.F) {
	var layer bytes.Buffer
	list, err := compress(&layer, bytes.NewReader(stream(1<<20)), 1<<20)
	require.NoError(f, err)
	f.Add(list, layer.Bytes()[:1<<16], int64(layer.Len()), int64(1<<20))
	f.Add([]byte(chunkMagic), []byte{}, int64(0), int64(0))
	f.Fuzz(func(t *testing.T, list, frame []byte, size, plain int64) {
		chunks, err := ParseChunks("list", list, size, plain)
		if err != nil {
			return
		}
		var frames, bytes int64
		for _, c := range chunks {
			require.Equal(t, frames, c.FrameAt)
			require.Equal(t, bytes, c.PlainAt)
			frames, bytes = frames+c.Frame, bytes+c.Plain
		}
		require.Equal(t, size, frames)
		require.Equal(t, plain, bytes)
		if len(chunks) == 0 {
			return
		}
		u, err := NewUnpacker()
		require.NoError(t, err)
		defer u.Close()
		if got, err := u.Chunk(&chunks[0], frame); err == nil {
			require.Equal(t, chunks[0].Sum, SumChunk(got))
		}
	})
}
