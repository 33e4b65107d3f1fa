package dedupe

import (
	"context"

	"github.com/klauspost/compress/zstd"
)

// FrameSize is the size of frames before they are compressed. Larger ones gain one or two
// per cent of what has headers and tables, and make the reading of single ranges
// slower; smaller ones lose as much.
const FrameSize = 256 << 10

const sampleFrames = 16

// newFrameEncoder gives an encoder for one goroutine. What is compressed is cold
// and compressed once, so it may take its time; the better level finds an entropy
// in weights that the default leaves.
func newFrameEncoder() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBetterCompression), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(FrameSize), zstd.WithSingleSegment(true), zstd.WithEncoderCRC(false), zstd.WithLowerEncoderMem(true))
}

// Compressed estimates how many bytes a source takes as frames: from 16 of them,
// spread over it, or from all if it has no more.
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

func (f *Frames) compressTo(
	ctx context.Context, s Source, at int64, write func(p []byte, off int64) error,
) error {
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
		f.Table[i] = Frame{int64(len(p)), halfSum(p)}
		if err := write(p, at); err != nil {
			return err
		}
		at += int64(len(p))
	}
	return nil
}
