package dedupe

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/epcached/epcached/cas"
)

// ErrNoGain says that literals take more bytes compressed than they may.
var ErrNoGain = errors.New("compressing gains too little")

// What is compressed is cut into frames of frameSize. Larger ones gain one or two
// per cent of what has headers and tables, and make the reading of single ranges
// slower; smaller ones lose as much.
const (
	frameSize    = 256 << 10
	sampleFrames = 16
)

// newFrameEncoder gives an encoder for one goroutine. What is compressed is cold
// and compressed once, so it may take its time; the better level finds an entropy
// in weights that the default leaves.
func newFrameEncoder() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBetterCompression), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(frameSize), zstd.WithSingleSegment(true), zstd.WithEncoderCRC(false), zstd.WithLowerEncoderMem(true))
}

// Compressed estimates how many bytes a source takes as frames: from 16 of them,
// spread over it, or from all if it has no more.
func Compressed(ctx context.Context, s Source) (int64, error) {
	f := &Frames{Size: s.Size(), Each: frameSize}
	c, err := newFrameEncoder()
	if err != nil || f.Size == 0 {
		return 0, err
	}
	step := max(1, int(f.count())/sampleFrames)
	plain, stored := int64(0), int64(0)
	b, out := make([]byte, frameSize), []byte(nil)
	for i := 0; i < int(f.count()); i += step {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		p := b[:f.plain(i)]
		if err := readFull(s, p, int64(i)*f.Each); err != nil {
			return 0, err
		}
		out = c.EncodeAll(p, out[:0])
		plain += int64(len(p))
		stored += min(int64(len(out)), int64(len(p)))
	}
	return int64(float64(stored) / float64(plain) * float64(f.Size)), nil
}

// Inward returns the recipe as it is when its own literals are in its own file.
// They are there when Shelf.PutCompressed has returned. The error is a
// *FormatError of a recipe without any, or with such ones.
func (r *Recipe) Inward() (*Recipe, error) {
	if r.Literals == NoLiterals || r.Frames != nil {
		return nil, invalid("literals", "no container")
	}
	own := r.Literals
	out := *r
	out.Literals, out.Frames = NoLiterals, &Frames{Size: r.Containers[own].Size, Each: frameSize}
	out.Containers, out.Extents = slices.Delete(slices.Clone(r.Containers), own, own+1), slices.Clone(r.Extents)
	for i := range out.Extents {
		switch e := &out.Extents[i]; {
		case e.Container == own:
			e.Container = len(out.Containers)
		case e.Container > own:
			e.Container--
		}
	}
	return &out, nil
}

// AllInward returns the recipe of a blob that shares nothing, all of which is in
// the recipe's own file, likewise.
func AllInward(blob cas.Digest, size int64) *Recipe {
	return &Recipe{Blob: blob, Size: size, Literals: NoLiterals, Extents: []Extent{{Length: size}}, Frames: &Frames{Size: size, Each: frameSize}}
}

// compressTo writes the frames of a source behind each other, from at on, and
// fills in their table. It stops with ErrNoGain where they take more than most.
func (f *Frames) compressTo(ctx context.Context, s Source, at, most int64, write func(p []byte, off int64) error) error {
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
		if err := readFull(s, p, int64(i)*f.Each); err != nil {
			return err
		}
		if out = c.EncodeAll(p, out[:0]); len(out) < len(p) {
			p = out
		}
		if most -= int64(len(p)); most < 0 {
			return ErrNoGain
		}
		f.Table[i] = Frame{int64(len(p)), halfSum(p)}
		if err := write(p, at); err != nil {
			return err
		}
		at += int64(len(p))
	}
	return nil
}

// copyTo writes the frames as they are stored, likewise.
func (f *Frames) copyTo(ctx context.Context, at int64, write func(p []byte, off int64) error) error {
	s, err := f.open()
	if err != nil {
		return fmt.Errorf("frames: %w", err)
	}
	b := make([]byte, f.Each)
	for i, one := range f.Table {
		p := b[:one.Stored]
		if err = ctx.Err(); err == nil {
			err = s.read(p, i)
		}
		if err == nil {
			err = write(p, at)
		}
		if err != nil {
			break
		}
		at += one.Stored
	}
	return errors.Join(err, s.Close())
}
