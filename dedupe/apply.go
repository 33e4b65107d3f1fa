package dedupe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/internal/parallel"
)

// ApplyOptions say how a blob is rebuilt.
type ApplyOptions struct {
	// Trusted leaves out hashing what comes out. It is for a recipe that was
	// proven and containers that were verified, whose stamps hold.
	Trusted bool

	// Progress, which may be nil, is told how far it is; calls do not overlap.
	Progress func(done, total int64)
}

// Apply rebuilds the blob of a recipe into w, which is empty, on all cores. Memory
// is a few megabytes whatever the sizes. Nothing is synced. open is as in Assemble;
// Apply closes what it opened.
//
// Without Trusted the bytes are hashed on their way, and others than r.Blob are
// a *cas.CorruptError: then some container is not what its digest says. What
// was written so far is the caller's to remove, after any error.
func Apply(ctx context.Context, r *Recipe, open func(cas.Digest) (Source, error), w io.WriterAt, o ApplyOptions) error {
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

// CopyVerified writes a blob and hashes it on the way, in one pass. fn, which may
// be nil, is told bytes. A *cas.CorruptError says that the bytes, which were
// written all the same, are not the blob's.
func CopyVerified(
	ctx context.Context, from Source, blob cas.Digest, w io.WriterAt, fn func(done, total int64),
) error {
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

// tee writes what is read through it. So hashing and writing is one pass.
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

// copy reads all, a step of the blob at a time, of however many extents.
//
// copy_file_range was used before: where nothing can be shared it takes its bytes through a pipe,
// 64 KiB at most, and what is written begins where the source's pages do and not the file's own. On
// ext4 that takes two to three times as long. Extents are not cloned either: of real context
// binaries 6 % of what they share begins alike within the blocks of a file system.
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
