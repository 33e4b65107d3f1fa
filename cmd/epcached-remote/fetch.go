package main

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sync/errgroup"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

const (
	transfers = 4        // parts of a fetch at the same time
	attempts  = 3        // of each part
	partSize  = 8 << 20  // bytes of one range
	gapSize   = 32 << 10 // bytes that are transferred again to save a request
)

// fetching is one fetch.
type fetching struct {
	*tally
	store  *store
	layers []portable.Layer
	files  []*os.File
	wanted map[portable.ChunkSum][]place
	chunks [][]portable.Chunk // chunks of each file; nil: it is read whole
	have   [][]bool           // which chunks have arrived, by file and chunk
}

// place identifies a chunk of a build.
type place struct{ file, chunk int }

// fetch writes the plain bytes of a build's files: chunks that a seed has, then the others by
// range, and files without a chunk list whole.
func (s *store) fetch(ctx context.Context, c *call) (err error) {
	defer func() {
		if isClass(err, remote.ErrMissing) {
			err = fail("missing", "the remote lacks a blob of its card: %v", classify(err).Text)
		}
	}()
	r := c.request
	layers, err := portable.ParseLayers("manifest", r.Manifest)
	if err != nil || r.Writable != len(layers) || len(c.files) < len(layers) {
		return fail("local", "%d files for a manifest of %d: %v", r.Writable, len(layers), err)
	}
	f := &fetching{tally: newTally(c), store: s, layers: layers, files: c.files[:len(layers)],
		wanted: make(map[portable.ChunkSum][]place), chunks: make([][]portable.Chunk, len(layers)),
		have: make([][]bool, len(layers))}
	for _, l := range layers {
		f.total += l.File.Size
	}
	if err := f.lists(ctx); err != nil {
		return err
	}
	for _, seed := range c.files[len(layers):] {
		if err := f.seed(ctx, seed); err != nil {
			return err
		}
	}
	all, limited := errgroup.WithContext(ctx)
	all.SetLimit(transfers)
	for i := range layers {
		if f.chunks[i] == nil {
			all.Go(func() error { return f.whole(limited, i) })
			continue
		}
		for _, p := range f.parts(i) {
			all.Go(func() error { return f.part(limited, p) })
		}
	}
	if err := all.Wait(); err != nil {
		return err
	}
	for i, l := range layers {
		if err := f.files[i].Truncate(l.File.Size); err != nil {
			return fail("local", "%v", err)
		}
	}
	f.finish()
	return nil
}

// lists reads the chunk lists. A file without a list is read whole.
func (f *fetching) lists(ctx context.Context) error {
	all, limited := errgroup.WithContext(ctx)
	all.SetLimit(transfers)
	for i, l := range f.layers {
		if l.Chunks == nil || !f.store.engine.can().Range {
			continue
		}
		all.Go(func() error {
			name := blobName(l.Chunks.Digest)
			if l.Chunks.Size > portable.MaxChunkList(l.File.Size) {
				return fail("damaged", "%s: %d bytes for a chunk list", name, l.Chunks.Size)
			}
			raw, _, err := small(limited, f.store.engine, name, l.Chunks.Size)
			if transient(limited, err) {
				raw, _, err = small(limited, f.store.engine, name, l.Chunks.Size)
			}
			switch {
			case err != nil:
				return err
			case portable.DigestOf(raw) != l.Chunks.Digest:
				return fail("damaged", "%s: its SHA-256 differs", name)
			}
			if f.chunks[i], err = portable.ParseChunks(name, raw, l.Blob.Size,
				l.File.Size); err != nil {
				return fail("damaged", "%v", err)
			}
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	for i, chunks := range f.chunks {
		f.have[i] = make([]bool, len(chunks))
		for j := range chunks {
			f.wanted[chunks[j].Sum] = append(f.wanted[chunks[j].Sum], place{i, j})
		}
	}
	return nil
}

// seed copies the chunks that a local file has.
func (f *fetching) seed(ctx context.Context, seed *os.File) error {
	if len(f.wanted) == 0 {
		return nil
	}
	return portable.Split(io.NewSectionReader(seed, 0, 1<<62), func(chunk []byte) error {
		sum := portable.SumChunk(chunk)
		for _, p := range f.wanted[sum] {
			c := &f.chunks[p.file][p.chunk]
			if f.have[p.file][p.chunk] || int64(len(chunk)) != c.Plain {
				continue
			}
			if err := f.write(p, chunk); err != nil {
				return err
			}
			f.have[p.file][p.chunk] = true
			f.count(c.Plain, c.Plain)
		}
		return ctx.Err()
	})
}

func (f *fetching) write(p place, chunk []byte) error {
	if _, err := f.files[p.file].WriteAt(chunk, f.chunks[p.file][p.chunk].PlainAt); err != nil {
		return fail("local", "%v", err)
	}
	return nil
}

// part is a range of a file's chunks that one request reads.
type part struct{ file, first, end int }

// parts divides the missing chunks of a file into parts. Small gaps are transferred again.
func (f *fetching) parts(file int) (all []part) {
	chunks, have := f.chunks[file], f.have[file]
	open := -1 // the part that may grow
	for i := range chunks {
		if have[i] {
			continue
		}
		if open >= 0 {
			p := &all[open]
			last := &chunks[p.end-1]
			gap := chunks[i].FrameAt - last.FrameAt - last.Frame
			if gap <= gapSize && chunks[i].FrameAt-chunks[p.first].FrameAt < partSize {
				p.end = i + 1
				continue
			}
		}
		all, open = append(all, part{file, i, i + 1}), len(all)
	}
	return all
}

// part reads a part. After an error of the connection it continues after the last complete chunk.
func (f *fetching) part(ctx context.Context, p part) (err error) {
	u, err := portable.NewUnpacker()
	if err != nil {
		return err
	}
	defer u.Close()
	for tries := 0; tries < attempts; tries++ {
		first := p.first
		if err = f.chunksOf(ctx, &p, u); !transient(ctx, err) {
			return err
		}
		if p.first > first {
			tries = -1 // progress was made, so retries count again
		}
	}
	return err
}

func (f *fetching) chunksOf(ctx context.Context, p *part, u *portable.Unpacker) error {
	chunks := f.chunks[p.file]
	first, last := &chunks[p.first], &chunks[p.end-1]
	name := blobName(f.layers[p.file].Blob.Digest)
	o, err := f.store.engine.get(ctx, name, first.FrameAt, last.FrameAt+last.Frame-first.FrameAt)
	if err != nil {
		return err
	}
	defer o.body.Close()
	body := &slow{o.body, ctx, f.limit}
	if o.size >= 0 && o.size != f.layers[p.file].Blob.Size {
		return fail("damaged", "%s has %d bytes, not %d", name, o.size, f.layers[p.file].Blob.Size)
	}
	if o.from > first.FrameAt {
		return fail("damaged", "%s: another range than the one that was asked for", name)
	}
	if _, err := io.CopyN(io.Discard, body, first.FrameAt-o.from); err != nil {
		return early(err)
	}
	frame := make([]byte, 0, portable.ChunkMax+64)
	for ; p.first < p.end; p.first++ {
		c := &chunks[p.first]
		frame = frame[:c.Frame]
		if _, err := io.ReadFull(body, frame); err != nil {
			return early(err)
		}
		if f.have[p.file][p.first] {
			continue // in a gap: known already
		}
		chunk, err := u.Chunk(c, frame)
		if err != nil {
			return fail("damaged", "%s: chunk at %d: %v", name, c.FrameAt, err)
		}
		if err := f.write(place{p.file, p.first}, chunk); err != nil {
			return err
		}
		f.moved(c.Plain)
	}
	return nil
}

// early returns the error of a body that ends early.
func early(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fail("unreachable", "the object ended early")
	}
	return err
}

// whole reads a file in one piece.
func (f *fetching) whole(ctx context.Context, i int) (err error) {
	for range attempts {
		var done int64
		if err = f.wholeOnce(ctx, i, &done); !transient(ctx, err) {
			return err
		}
		f.moved(-done)
		if err := f.files[i].Truncate(0); err != nil {
			return fail("local", "%v", err)
		}
	}
	return err
}

func (f *fetching) wholeOnce(ctx context.Context, i int, done *int64) error {
	l, name := &f.layers[i], blobName(f.layers[i].Blob.Digest)
	o, err := f.store.engine.get(ctx, name, 0, -1)
	if err != nil {
		return err
	}
	defer o.body.Close()
	if o.size >= 0 && o.size != l.Blob.Size {
		return fail("damaged", "%s has %d bytes, not %d", name, o.size, l.Blob.Size)
	}
	body := &sticky{from: &slow{o.body, ctx, f.limit}, left: l.Blob.Size}
	err = l.Unpack(ctx, name, body, io.NewOffsetWriter(f.files[i], 0), func(n int) {
		*done += int64(n)
		f.moved(int64(n))
	})
	switch {
	case err == nil || ctx.Err() != nil:
		return err
	case body.err != nil:
		return early(body.err)
	case errors.As(err, new(*fs.PathError)):
		return fail("local", "%v", err)
	}
	return fail("damaged", "%v", err)
}

// sticky keeps the error of a body, which the decoder wraps in its own.
type sticky struct {
	from io.Reader
	left int64
	err  error
}

// Read implements io.Reader.
func (s *sticky) Read(b []byte) (int, error) {
	n, err := s.from.Read(b)
	if s.left -= int64(n); err != nil && (!errors.Is(err, io.EOF) || s.left > 0) {
		s.err = err
	}
	return n, err
}
