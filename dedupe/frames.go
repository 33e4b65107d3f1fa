package dedupe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/klauspost/compress/zstd"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/parallel"
)

// Limits of frames. To read one byte, its whole frame must be decoded, so the size of frames bounds
// the memory and time of a read.
const (
	MinFrame     = 64 << 10
	MaxFrame     = 1 << 20
	MaxFrames    = 1 << 20
	frameSumSize = 16 // bytes of the BLAKE3 of a stored frame
)

// Frames are literals in the recipe's own file: pieces of equal size, which are compressed
// separately, so that any range can be read without the rest. Extents refer to them with the Base
// len(Recipe.Bases).
type Frames struct {
	Size int64 // decompressed bytes of all frames
	// Each is the decompressed bytes of each frame but the last: a power of two from MinFrame to
	// MaxFrame.
	Each  int64
	Table []Frame

	file *framedFile // the file with the frames; nil: not stored yet
}

// Frame is one frame. If its stored size equals the decompressed one, it is uncompressed; otherwise
// it is a Zstandard frame (RFC 8878) that states its size and needs no dictionary.
type Frame struct {
	Stored int64              // bytes
	Sum    [frameSumSize]byte // half of the BLAKE3 of the stored bytes
}

type framedFile struct {
	fs   cas.FS
	path string
	head int64         // offset of the frames
	sum  [sumSize]byte // checksum of the bytes before; if it differs, the recipe was replaced
}

func (f *Frames) plain(i int) int64 { return min(f.Each, f.Size-int64(i)*f.Each) }

func (f *Frames) stored() (sum int64) {
	if f == nil {
		return 0
	}
	for _, one := range f.Table {
		sum += one.Stored
	}
	return sum
}

func (f *Frames) validate() error {
	switch {
	case f.Size <= 0 || f.Size > MaxSize:
		return invalid("literals", "%d bytes", f.Size)
	case f.Each < MinFrame || f.Each > MaxFrame || f.Each&(f.Each-1) != 0:
		return invalid("frame size", "%d bytes", f.Each)
	case f.count() > MaxFrames:
		return invalid("frames", "%d of them, more than %d", f.count(), MaxFrames)
	case int64(len(f.Table)) != f.count():
		return invalid("frames", "%d of them, and %d bytes need %d", len(f.Table), f.Size,
			f.count())
	}
	for i, one := range f.Table {
		if one.Stored <= 0 || one.Stored > f.plain(i) {
			return invalid(fmt.Sprintf("frame %d", i), "%d bytes stored, %d when "+
				"decompressed", one.Stored,
				f.plain(i))
		}
	}
	return nil
}

func (f *Frames) count() int64 { return (f.Size + f.Each - 1) / f.Each }

// open returns the decompressed bytes as a Source, which is an io.Closer. It fails with
// cas.ErrNotFound, as for a removed base, if another recipe has replaced the file; callers then
// read the recipe again.
func (f *Frames) open() (*framedSource, error) {
	if f.file == nil {
		return nil, invalid("frames", "not stored yet")
	}
	in, err := f.file.fs.Open(f.file.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, cas.ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	var sum [sumSize]byte
	if _, err := f.file.fs.ReadAt(in, sum[:], f.file.head-sumSize); err != nil && err != io.EOF ||
		sum != f.file.sum {
		if err == io.EOF || err == nil {
			err = cas.ErrNotFound
		}
		return nil, errors.Join(err, in.Close())
	}
	s := &framedSource{frames: f, in: in, starts: make([]int64, len(f.Table))}
	at := f.file.head
	for i, one := range f.Table {
		s.starts[i] = at
		at += one.Stored
	}
	return s, nil
}

// number of decoded frames kept, because consecutive small extents use the same ones
const keptFrames = 8

// framedSource reads the decompressed bytes of frames, after checking their checksums.
type framedSource struct {
	frames *Frames
	in     *os.File
	starts []int64
	stored sync.Pool // of *[]byte, buffers for stored frames

	mu      sync.Mutex // guards the fields below
	decoded [keptFrames]keptFrame
	next    int // index in kept of the next one to replace
}

type keptFrame struct {
	bytes []byte // nil: none
	index int
}

// Size returns the number of decompressed bytes.
func (s *framedSource) Size() int64 { return s.frames.Size }

// Close closes the file.
func (s *framedSource) Close() error { return s.in.Close() }

// ReadAt implements io.ReaderAt. It returns a *FormatError for a damaged frame.
func (s *framedSource) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read at offset %d", off)
	}
	n := 0
	for n < len(p) && off < s.frames.Size {
		i, skip := int(off/s.frames.Each), off%s.frames.Each
		part := p[n:min(int64(len(p)), int64(n)+s.frames.plain(i)-skip)]
		if err := s.part(part, i, skip); err != nil {
			return n, err
		}
		n += len(part)
		off += int64(len(part))
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (s *framedSource) part(p []byte, i int, skip int64) error {
	if int64(len(p)) == s.frames.plain(i) {
		return s.decode(p, i)
	}
	b := s.remembered(i)
	if b == nil {
		b = make([]byte, s.frames.plain(i))
		if err := s.decode(b, i); err != nil {
			return err
		}
		s.remember(i, b)
	}
	copy(p, b[skip:])
	return nil
}

func (s *framedSource) remembered(i int) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.decoded {
		if one.bytes != nil && one.index == i {
			return one.bytes
		}
	}
	return nil
}

func (s *framedSource) remember(i int, b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.decoded[s.next] = keptFrame{b, i}
	s.next = (s.next + 1) % keptFrames
}

func (s *framedSource) decode(p []byte, i int) error {
	frame := s.frames.Table[i]
	if frame.Stored == int64(len(p)) {
		return s.read(p, i)
	}
	buf, _ := s.stored.Get().(*[]byte)
	if buf == nil {
		b := make([]byte, s.frames.Each)
		buf = &b
	}
	defer s.stored.Put(buf)
	b := (*buf)[:frame.Stored]
	if err := s.read(b, i); err != nil {
		return err
	}
	if err := decodeFrame(p, b); err != nil {
		return &FormatError{s.starts[i], fmt.Sprintf("frame %d", i), err.Error()}
	}
	return nil
}

func (s *framedSource) read(b []byte, i int) error {
	if n, err := s.frames.file.fs.ReadAt(s.in, b, s.starts[i]); n < len(b) {
		if err == nil || err == io.EOF {
			return &FormatError{s.starts[i], fmt.Sprintf("frame %d", i),
				fmt.Sprintf("the file ends after %d of %d bytes", n, len(b))}
		}
		return fmt.Errorf("read frame %d at offset %d: %w", i, s.starts[i], err)
	}
	if truncatedSum(b) != s.frames.Table[i].Sum {
		return &FormatError{s.starts[i], fmt.Sprintf("frame %d", i), "its checksum does not match"}
	}
	return nil
}

func truncatedSum(b []byte) (half [frameSumSize]byte) {
	sum := blake3.Sum256(b)
	copy(half[:], sum[:])
	return half
}

// frameDecoder returns a decoder with bounded memory, regardless of the size that a frame states.
var frameDecoder = sync.OnceValue(func() *zstd.Decoder {
	d,
		err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(MaxFrame),
		zstd.WithDecoderMaxWindow(MaxFrame), zstd.WithDecoderLowmem(true),
		zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderConcurrency(parallel.Processors()))
	if err != nil {
		panic(err) // the options are constants
	}
	return d
})

// decodeFrame decompresses a Zstandard frame into p, which it must fill exactly.
func decodeFrame(p, frame []byte) error {
	out, err := frameDecoder().DecodeAll(frame, p[:0:len(p)])
	if err == nil && len(out) != len(p) {
		err = fmt.Errorf("%d bytes when decompressed, not %d", len(out), len(p))
	}
	return err
}

// FrameSize is the size of frames before they are compressed. Larger frames compress headers and
// tables by one or two per cent better, but reading single ranges is slower; smaller ones compress
// that much worse.
const FrameSize = 256 << 10

const sampleFrames = 16

// newFrameEncoder returns an encoder for one goroutine. Its level is slow, because cold builds are
// compressed only once, and that level finds redundancy in weights that the default does not.
func newFrameEncoder() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBetterCompression),
		zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(FrameSize),
		zstd.WithSingleSegment(true), zstd.WithEncoderCRC(false), zstd.WithLowerEncoderMem(true))
}

// Compressed estimates how many bytes a source takes as frames, by compressing 16 frames that are
// spread over it, or all if there are fewer.
func Compressed(ctx context.Context, s Source) (int64, error) {
	f := &Frames{Size: s.Size(), Each: FrameSize}
	c, err := newFrameEncoder()
	if err != nil || f.Size == 0 {
		return 0, err
	}
	step := max(1, int(f.count())/sampleFrames)
	plain, stored := int64(0), int64(0)
	b, out := make([]byte, FrameSize), []byte(nil)
	for i := 0; i < int(f.count()); i += step {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		p := b[:f.plain(i)]
		if err := ReadFull(s, p, int64(i)*f.Each); err != nil {
			return 0, err
		}
		out = c.EncodeAll(p, out[:0])
		plain += int64(len(p))
		stored += min(int64(len(out)), int64(len(p)))
	}
	return int64(float64(stored) / float64(plain) * float64(f.Size)), nil
}

func (f *Frames) compressTo(ctx context.Context, s Source, at int64, write func(p []byte,
	off int64) error) error {
	c, err := newFrameEncoder()
	if err != nil {
		return err
	}
	f.Table = make([]Frame, f.count())
	b, out := make([]byte, f.Each), []byte(nil)
	for i := range f.Table {
		if err := ctx.Err(); err != nil {
			return err
		}
		p := b[:f.plain(i)]
		if err := ReadFull(s, p, int64(i)*f.Each); err != nil {
			return err
		}
		if out = c.EncodeAll(p, out[:0]); len(out) < len(p) {
			p = out
		}
		f.Table[i] = Frame{int64(len(p)), truncatedSum(p)}
		if err := write(p, at); err != nil {
			return err
		}
		at += int64(len(p))
	}
	return nil
}
