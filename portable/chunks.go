package portable

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"lukechampine.com/blake3"
)

// A layer is one frame of zstd for each content-defined chunk of the file, so that equal bytes of
// two builds are equal chunks wherever they are, and a reader that has some of them reads the rest
// by range. The chunk list is its index:
//
//	8 bytes   "epchunk1"
//	24 bytes  for each chunk, in order: length of its frame and of its bytes, each 4 bytes and
//	          little-endian; the first 16 bytes of the BLAKE3 of its bytes
//
// Readers accept any cut points, but only builds that are cut in the same way share chunks.
const (
	chunkMin  = 16 << 10
	chunkMean = 64 << 10
	ChunkMax  = 256 << 10 // bytes of one chunk

	chunkMagic = "epchunk1"
	chunkEntry = 24

	// ChunkedFrom is the least size of files with a chunk list, because a request costs as much
	// time as so many bytes.
	ChunkedFrom = 512 << 10
)

// Chunk is one chunk of a file, with the offsets of its frame and its bytes.
type Chunk struct {
	Frame, Plain     int64 // lengths
	FrameAt, PlainAt int64
	Sum              ChunkSum
}

// ChunkSum is the first half of a BLAKE3 digest. It only finds chunks; the digest of the whole file
// is verified.
type ChunkSum [16]byte

// SumChunk returns the sum of a chunk.
func SumChunk(b []byte) ChunkSum {
	sum := blake3.Sum256(b)
	return ChunkSum(sum[:16])
}

// gear has a random number for each byte: the cut points follow from it.
var gear = func() (table [256]uint64) {
	x := uint64(0x65706361636865) // splitmix64
	for i := range table {
		x += 0x9e3779b97f4a7c15
		z := x
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		table[i] = z ^ z>>31
	}
	return table
}()

// cut returns the length of the first chunk of b, which has ChunkMax bytes or is the end of the
// file. As in FastCDC, a cut is less likely before the mean length than behind it.
func cut(b []byte) int {
	const before, behind = uint64(1<<18-1) << 46, uint64(1<<14-1) << 50
	n := min(len(b), ChunkMax)
	var h uint64
	i := min(chunkMin, n)
	for mean := min(chunkMean, n); i < mean; i++ {
		if h = h<<1 + gear[b[i]]; h&before == 0 {
			return i + 1
		}
	}
	for ; i < n; i++ {
		if h = h<<1 + gear[b[i]]; h&behind == 0 {
			return i + 1
		}
	}
	return n
}

// Split calls each with the chunks of a file, in order. The bytes are valid during the call.
func Split(from io.Reader, each func(chunk []byte) error) error {
	buf, start, end, done := make([]byte, 4*ChunkMax), 0, 0, false
	for {
		if end-start < ChunkMax && !done {
			end, start = copy(buf, buf[start:end]), 0
			n, err := io.ReadFull(from, buf[end:])
			end += n
			if done = errors.Is(err, io.EOF) ||
				errors.Is(err, io.ErrUnexpectedEOF); err != nil && !done {
				return err
			}
		}
		if start == end {
			return nil
		}
		n := cut(buf[start:end])
		if err := each(buf[start : start+n]); err != nil {
			return err
		}
		start += n
	}
}

// packer makes the frames of chunks, which are the same for the same bytes.
type packer struct {
	enc *zstd.Encoder
	out []byte
}

func newPacker() (*packer, error) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithSingleSegment(true),
		zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithZeroFrames(true),
		zstd.WithEncoderCRC(false))
	return &packer{enc: enc}, err
}

// frame compresses a chunk. If that saves less than a sixteenth, the frame is uncompressed, so that
// readers need no time.
func (p *packer) frame(chunk []byte) []byte {
	p.out = p.enc.EncodeAll(chunk, p.out[:0])
	if len(chunk) >= 1<<10 && len(p.out) > len(chunk)-len(chunk)/16 {
		p.out = rawFrame(chunk, p.out[:0])
	}
	return p.out
}

// rawFrame makes a frame of zstd of blocks that are not compressed.
func rawFrame(chunk, out []byte) []byte {
	const magic, single4, block = 0xfd2fb528, 0b10_1_00000, 128 << 10
	out = binary.LittleEndian.AppendUint32(out, magic)
	out = append(out, single4)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(chunk)))
	for {
		n := min(len(chunk), block)
		head := uint32(n) << 3
		if n == len(chunk) {
			head |= 1 // the last one
		}
		out = append(out, byte(head), byte(head>>8), byte(head>>16))
		out, chunk = append(out, chunk[:n]...), chunk[n:]
		if len(chunk) == 0 {
			return out
		}
	}
}

// compress writes the frames of a file, and returns its chunk list.
func compress(to io.Writer, from io.Reader, size int64) (list []byte, err error) {
	p, err := newPacker()
	if err != nil {
		return nil, err
	}
	list = []byte(chunkMagic)
	var n int64
	err = Split(io.LimitReader(from, size+1), func(chunk []byte) error {
		n += int64(len(chunk))
		frame, sum := p.frame(chunk), SumChunk(chunk)
		list = binary.LittleEndian.AppendUint32(list, uint32(len(frame)))
		list = binary.LittleEndian.AppendUint32(list, uint32(len(chunk)))
		list = append(list, sum[:]...)
		_, err := to.Write(frame)
		return err
	})
	if err == nil && size == 0 {
		_, err = to.Write(p.frame(nil))
	}
	if err == nil && n != size {
		err = fmt.Errorf("its size is not %d", size)
	}
	return list, err
}

// MaxChunkList bounds the chunk list of a file of that size.
func MaxChunkList(plain int64) int64 {
	return int64(len(chunkMagic)) + chunkEntry*(plain/chunkMin+1)
}

// ParseChunks reads a chunk list. Frames and chunks have to add up to the layer and the file.
func ParseChunks(file string, raw []byte, layer, plain int64) ([]Chunk, error) {
	body, ok := bytes.CutPrefix(raw, []byte(chunkMagic))
	if !ok || len(body)%chunkEntry != 0 || int64(len(raw)) > MaxChunkList(plain) {
		return nil, wrong(file, "", "%d bytes: not a chunk list of a file of %d bytes",
			len(raw), plain)
	}
	all := make([]Chunk, 0, len(body)/chunkEntry)
	var at Chunk
	for i := 0; len(body) > 0; i, body = i+1, body[chunkEntry:] {
		c := Chunk{Frame: int64(binary.LittleEndian.Uint32(body)), FrameAt: at.FrameAt,
			Plain: int64(binary.LittleEndian.Uint32(body[4:])), PlainAt: at.PlainAt,
			Sum: ChunkSum(body[8:chunkEntry])}
		if c.Plain == 0 || c.Plain > ChunkMax || c.Frame == 0 || c.Frame > maxFrame {
			return nil, wrong(file, fmt.Sprintf("chunk %d", i), "%d bytes in a frame of %d",
				c.Plain, c.Frame)
		}
		at.FrameAt, at.PlainAt = at.FrameAt+c.Frame, at.PlainAt+c.Plain
		all = append(all, c)
	}
	if at.FrameAt != layer || at.PlainAt != plain {
		return nil, wrong(file, "", "its chunks add up to %d bytes in %d, not %d in %d", at.PlainAt,
			at.FrameAt, plain, layer)
	}
	return all, nil
}

// maxFrame bounds the frame of a chunk: one that is not compressed, and its headers.
const maxFrame = ChunkMax + 64

// Unpacker decompresses the frames of chunks. It is for one goroutine.
type Unpacker struct {
	dec *zstd.Decoder
	out []byte
}

// NewUnpacker returns an unpacker, which is closed after use.
func NewUnpacker() (*Unpacker, error) {
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxMemory(2*ChunkMax), zstd.WithDecoderMaxWindow(2*ChunkMax))
	return &Unpacker{dec: dec}, err
}

// Close releases memory.
func (u *Unpacker) Close() { u.dec.Close() }

// Chunk returns the bytes of a chunk, which are valid until the next call, or an error unless they
// are those that the list states.
func (u *Unpacker) Chunk(c *Chunk, frame []byte) ([]byte, error) {
	var err error
	u.out, err = u.dec.DecodeAll(frame, u.out[:0])
	switch {
	case err != nil:
		return nil, err
	case int64(len(u.out)) != c.Plain:
		return nil, fmt.Errorf("%d bytes, not %d", len(u.out), c.Plain)
	case SumChunk(u.out) != c.Sum:
		return nil, errors.New("its BLAKE3 differs")
	}
	return u.out, nil
}
