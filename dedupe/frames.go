package dedupe

import (
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
	minFrame  = 64 << 10
	maxFrame  = 1 << 20
	maxFrames = 1 << 20
)

// Frames are literals in the recipe's own file, which earlier versions of epcached compressed in
// pieces of equal size. They are only read. Extents refer to them with the Base
// len(Recipe.Bases).
type Frames struct {
	size  int64 // decompressed bytes of all frames
	each  int64 // of each frame but the last
	table []frame

	fs    cas.FS
	path  string
	stamp cas.Stamp // of the file; if it differs, another recipe may have replaced it
}

// frame is one frame. If its stored size equals the decompressed one, it is uncompressed; otherwise
// it is a Zstandard frame (RFC 8878) that states its size and needs no dictionary.
type frame struct {
	at, stored int64    // offset in the file, bytes there
	sum        [16]byte // half of the BLAKE3 of the stored bytes
}

func (f *Frames) plain(i int) int64 { return min(f.each, f.size-int64(i)*f.each) }

// open returns the decompressed bytes as a Source, which is an io.Closer. It fails with
// cas.ErrNotFound, as for a removed base, if the file has changed; callers then read the recipe
// again.
func (f *Frames) open() (Source, error) {
	file, err := f.fs.Open(f.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, cas.ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	stamp, err := cas.StampOf(file)
	if err == nil && stamp != f.stamp {
		err = cas.ErrNotFound
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return &framedSource{Frames: f, file: file, decoded: make(map[int][]byte)}, nil
}

// number of decoded frames kept, because consecutive small extents use the same ones
const keptFrames = 8

// framedSource reads the decompressed bytes of frames, after checking their checksums.
type framedSource struct {
	*Frames
	file *os.File

	mu      sync.Mutex // guards decoded
	decoded map[int][]byte
}

// Size returns the number of decompressed bytes.
func (s *framedSource) Size() int64 { return s.size }

// Close closes the file.
func (s *framedSource) Close() error { return s.file.Close() }

// ReadAt implements io.ReaderAt. It returns a *FormatError for a damaged frame.
func (s *framedSource) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) && off < s.size {
		b, err := s.frame(int(off / s.each))
		if err != nil {
			return n, err
		}
		step := copy(p[n:], b[off%s.each:])
		n += step
		off += int64(step)
	}
	if n < len(p) {
		err = io.EOF
	}
	return n, err
}

func (s *framedSource) frame(i int) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b, ok := s.decoded[i]; ok {
		return b, nil
	}
	one := s.table[i]
	b := make([]byte, one.stored)
	if _, err := s.fs.ReadAt(s.file, b, one.at); err != nil && err != io.EOF {
		return nil, fmt.Errorf("read frame %d at offset %d: %w", i, one.at, err)
	}
	damaged := func(why string) ([]byte, error) {
		return nil, &FormatError{one.at, fmt.Sprintf("frame %d", i), why}
	}
	if sum := blake3.Sum256(b); [16]byte(sum[:16]) != one.sum {
		return damaged("its checksum does not match")
	}
	if plain := s.plain(i); one.stored < plain {
		var err error
		if b, err = decodeFrame(b, plain); err != nil {
			return damaged(err.Error())
		}
	}
	if len(s.decoded) == keptFrames {
		clear(s.decoded)
	}
	s.decoded[i] = b
	return b, nil
}

// frameDecoder returns a decoder with bounded memory, regardless of the size that a frame states.
var frameDecoder = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(maxFrame),
		zstd.WithDecoderMaxWindow(maxFrame), zstd.WithDecoderLowmem(true),
		zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderConcurrency(parallel.Processors()))
	if err != nil {
		panic(err) // the options are constants
	}
	return d
})

// decodeFrame decompresses a Zstandard frame, which must have exactly size bytes as output.
func decodeFrame(stored []byte, size int64) ([]byte, error) {
	out, err := frameDecoder().DecodeAll(stored, make([]byte, 0, size))
	if err == nil && int64(len(out)) != size {
		err = fmt.Errorf("%d bytes when decompressed, not %d", len(out), size)
	}
	return out, err
}
