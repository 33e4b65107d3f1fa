package dedupe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"sync"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/parallel"
)

// Assembled reads a packed blob as if it were whole. It does not verify the bytes; a caller that
// reads all of them can hash them, as Apply does.
type Assembled struct {
	recipe *Recipe
	open   func(cas.Digest) (Source, error)

	mu sync.Mutex // guards sources
	// sources has the recipe's bases in order, then its frames; nil: not opened yet.
	sources []Source
}

// Assemble returns the blob of a valid recipe as a Source. open is called at most once for each
// base, when its bytes are first needed, and must return a whole blob, or cas.ErrNotFound for one
// that is packed. Close closes the opened bases.
func Assemble(r *Recipe, open func(cas.Digest) (Source, error)) (*Assembled, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	return &Assembled{recipe: r, open: open, sources: make([]Source, r.sources())}, nil
}

// Size returns the length of the blob in bytes.
func (a *Assembled) Size() int64 { return a.recipe.Size }

// Close closes the bases that were opened and are io.Closers.
func (a *Assembled) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all error
	for i, s := range a.sources {
		if c, ok := s.(io.Closer); ok {
			all = errors.Join(all, c.Close())
		}
		a.sources[i] = nil
	}
	return all
}

func (a *Assembled) source(i int) (Source, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.sources[i]; s != nil {
		return s, nil
	}
	if i == len(a.recipe.Bases) {
		s, err := a.recipe.Frames.open()
		a.sources[i] = s
		return s, err
	}
	c := a.recipe.Bases[i]
	s, err := a.open(c.Digest)
	if err != nil {
		return nil, &BaseError{c.Digest, err}
	}
	a.sources[i] = s
	if s.Size() != c.Size {
		return nil,
			&BaseError{c.Digest,
				&FormatError{-1, "size",
					fmt.Sprintf("%d bytes, the recipe says %d", s.Size(), c.Size)}}
	}
	return s, nil
}

// ReadAt is io.ReaderAt. Errors of bases are *BaseError.
func (a *Assembled) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read at offset %d", off)
	}
	return ReadExtents(a.recipe.Extents, p, off, a.fill)
}

// ReadExtents reads bytes from off of the blob that the extents, in order of At, cover. It calls
// fill for each extent, to fill p from the extent's byte skip on.
func ReadExtents(all []Extent, p []byte, off int64, fill func(p []byte, e Extent,
	skip int64) error) (n int, err error) {
	i := sort.Search(len(all), func(i int) bool { return all[i].At+all[i].Length > off })
	for ; n < len(p) && i < len(all); i++ {
		skip := off + int64(n) - all[i].At
		part := p[n:min(int64(len(p)), int64(n)+all[i].Length-skip)]
		if err := fill(part, all[i], skip); err != nil {
			return n, err
		}
		n += len(part)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (a *Assembled) fill(p []byte, e Extent, skip int64) error {
	s, err := a.source(e.Base)
	if err != nil {
		return err
	}
	if e.Period > 0 {
		err = fillRepeated(p, s, e, skip)
	} else {
		err = ReadFull(s, p, e.From+skip)
	}
	if err != nil && e.Base < len(a.recipe.Bases) {
		return &BaseError{a.recipe.Bases[e.Base].Digest, err}
	}
	return err
}

// fillRepeated reads at most one period and then doubles the bytes, so that short periods are not
// slow.
func fillRepeated(p []byte, s Source, e Extent, skip int64) error {
	phase := skip % e.Period
	n := int(min(int64(len(p)), e.Period-phase))
	if err := ReadFull(s, p[:n], e.From+phase); err != nil {
		return err
	}
	if n == len(p) {
		return nil
	}
	rest := p[n:]
	unit := int(min(int64(len(rest)), e.Period))
	head := min(unit, int(phase)) // the part of the period's beginning that was not read yet
	if err := ReadFull(s, rest[:head], e.From); err != nil {
		return err
	}
	copy(rest[head:unit], p[:unit-head])
	for done := unit; done < len(rest); {
		done += copy(rest[done:], rest[:done])
	}
	return nil
}

// Source is an immutable blob: a File, a *bytes.Reader, or an Assembled blob. Several goroutines
// call ReadAt.
//
// Files are read in windows and not mapped, because a mapping of a file that was truncated, or that
// a failing disk cannot read, kills the process or needs SetPanicOnFault in every goroutine, and
// its pages count as the daemon's memory.
type Source interface {
	io.ReaderAt
	Size() int64
}

// ReadFull fills p from off. It fails with io.ErrUnexpectedEOF if r ends earlier.
func ReadFull(r io.ReaderAt, p []byte, off int64) error {
	n, err := r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("read at offset %d: %w", off+int64(n), err)
}

// File is an open file as a Source. Its size is that of NewFile, because files of the store do not
// change.
type File struct {
	*io.SectionReader
	file *os.File
}

// NewFile returns f as a Source that closes f. It takes ownership of f, and closes it if it fails.
func NewFile(f *os.File) (*File, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &File{io.NewSectionReader(f, 0, info.Size()), f}, nil
}

// Close closes the file.
func (f *File) Close() error { return f.file.Close() }

// ApplyOptions say how Apply restores a blob.
type ApplyOptions struct {
	// Trusted omits hashing the result. It is for a verified recipe and verified bases
	// with valid stamps.
	Trusted bool

	// Progress, which may be nil, receives the progress; calls do not overlap.
	Progress func(done, total int64)
}

// Apply restores the blob of a recipe in w, which must be empty, on all cores, with a few megabytes
// of memory. It does not sync. open is as in Assemble; Apply closes the bases.
//
// Without Trusted it hashes the bytes, and fails with a *cas.CorruptError if the digest is not
// r.Blob, because a base is damaged. After any error the caller removes the output.
func Apply(ctx context.Context, r *Recipe, open func(cas.Digest) (Source, error), w io.WriterAt,
	o ApplyOptions) error {
	a, err := Assemble(r, open)
	if err != nil {
		return err
	}
	if t := newTee(a, w, o.Progress); o.Trusted {
		err = t.copy(ctx, a.Size())
	} else {
		err = t.copyVerified(ctx, a.Size(), r.Blob)
	}
	return errors.Join(err, a.Close())
}

// CopyVerified writes and hashes a blob in one pass. fn, which may be nil, is called with the bytes
// so far. It fails with a *cas.CorruptError, after writing, if the digest is wrong.
func CopyVerified(ctx context.Context, from Source, blob cas.Digest, w io.WriterAt, fn func(done,
	total int64)) error {
	return newTee(from, w, fn).copyVerified(ctx, from.Size(), blob)
}

func newTee(from Source, w io.WriterAt, fn func(done, total int64)) *tee {
	if f, ok := w.(*os.File); ok {
		cas.Preallocate(f, from.Size())
	}
	return &tee{from: from, to: w, report: progress{fn: fn, total: from.Size()}}
}

func (t *tee) copyVerified(ctx context.Context, size int64, blob cas.Digest) error {
	got, err := cas.Sum(ctx, t, 0, size)
	if err == nil && got != blob {
		err = &cas.CorruptError{Digest: blob, Got: got}
	}
	return err
}

// tee writes the bytes that are read through it, so that hashing and writing is one pass.
type tee struct {
	from   io.ReaderAt
	to     io.WriterAt
	report progress
}

func (t *tee) ReadAt(p []byte, off int64) (int, error) {
	n, err := t.from.ReadAt(p, off)
	if _, werr := cas.WriteInSteps(t.to, p[:n], off); werr != nil {
		return 0, fmt.Errorf("write at offset %d: %w", off, werr)
	}
	t.report.add(int64(n))
	return n, err
}

// copy reads the whole blob in steps of one size, regardless of its extents.
//
// copy_file_range is slower: if the file system cannot share blocks, it copies through a pipe in
// pieces of at most 64 KiB that are aligned to the source's pages, which takes two to three times
// as long on ext4. Cloning extents does not help: of the shared bytes of real context binaries,
// only 6 % have the same offset within file system blocks in both files.
func (t *tee) copy(ctx context.Context, size int64) error {
	steps := int((size + cas.WriteStep - 1) / cas.WriteStep)
	begin := func() []byte { return make([]byte, cas.WriteStep) }
	return parallel.Do(ctx, steps, begin, func(b []byte, i int) error {
		at := int64(i) * cas.WriteStep
		return ReadFull(t, b[:min(cas.WriteStep, size-at)], at)
	}, nil)
}

type progress struct {
	mu    sync.Mutex
	fn    func(done, total int64)
	done  int64
	total int64
}

func (p *progress) add(n int64) {
	if p.fn == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += n
	p.fn(p.done, p.total)
}
