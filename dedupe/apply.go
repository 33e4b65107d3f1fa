package dedupe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"

	"github.com/epcached/epcached/cas"
)

// ApplyOptions say how a blob is rebuilt.
type ApplyOptions struct {
	// Trusted leaves out hashing what comes out. It is for a recipe that was
	// proven and containers that were verified, whose stamps hold; the kernel then
	// copies between files, and shares extents where the file system can.
	Trusted bool

	// Progress, which may be nil, is told how far it is; calls do not overlap.
	Progress func(done, total int64)
}

// Apply rebuilds the blob of a recipe into w, which is empty: a file, best one
// on the containers' file system. Memory is a few megabytes whatever the sizes.
// Nothing is synced. open is as in Assemble; Apply closes what it opened.
//
// Without Trusted the bytes are hashed on their way, and others than r.Blob are
// a *cas.CorruptError: then some container is not what its digest says. What
// was written so far is the caller's to remove, after any error.
func Apply(ctx context.Context, r *Recipe, open func(cas.Digest) (Source, error), w io.WriterAt, o ApplyOptions) error {
	a, err := Assemble(r, open)
	if err != nil {
		return err
	}
	if o.Trusted {
		err = a.copyTo(ctx, w, o)
	} else {
		err = a.copyVerified(ctx, w, o)
	}
	return errors.Join(err, a.Close())
}

// copyVerified hashes and writes in one pass: cas.Sum reads every byte once,
// on all cores, and each buffer that it has filled is written as it is.
func (a *Assembled) copyVerified(ctx context.Context, w io.WriterAt, o ApplyOptions) error {
	t := &tee{from: a, to: w, report: progress{fn: o.Progress, total: a.Size()}}
	got, err := cas.Sum(ctx, t, 0, a.Size())
	if err != nil {
		return err
	}
	if got != a.recipe.Blob {
		return &cas.CorruptError{Digest: a.recipe.Blob, Got: got}
	}
	return nil
}

type tee struct {
	from   io.ReaderAt
	to     io.WriterAt
	report progress
}

func (t *tee) ReadAt(p []byte, off int64) (int, error) {
	n, err := t.from.ReadAt(p, off)
	if _, werr := t.to.WriteAt(p[:n], off); werr != nil {
		return 0, fmt.Errorf("write at offset %d: %w", off, werr)
	}
	t.report.add(int64(n))
	return n, err
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

// job is a part of one extent that one goroutine copies, or a range of many small ones.
type job struct {
	extent     Extent // none where its Length is 0
	skip, size int64  // from the extent's beginning, or from the blob's
}

const (
	jobSize    = 8 << 20 // what a core copies between two looks at the context
	bufferSize = 1 << 20
	smallCopy  = 64 << 10 // what reading and writing does as fast as a call of the kernel's own
)

// copyTo copies extents on all cores.
func (a *Assembled) copyTo(ctx context.Context, w io.WriterAt, o ApplyOptions) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	jobs := make(chan job)
	report := progress{fn: o.Progress, total: a.Size()}
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			c := copier{a: a, to: w}
			for j := range jobs {
				if err := c.copy(j); err != nil {
					cancel(err)
					return
				}
				report.add(j.size)
			}
		})
	}
	a.hand(ctx, jobs)
	wg.Wait()
	return context.Cause(ctx)
}

// hand cuts the extents into jobs and closes jobs at the end, or when ctx is over.
func (a *Assembled) hand(ctx context.Context, jobs chan<- job) {
	defer close(jobs)
	small := job{}
	for i, e := range a.recipe.Extents {
		if e.Length < smallCopy {
			if small.size == 0 {
				small.skip = e.At
			}
			small.size += e.Length
			last := i+1 == len(a.recipe.Extents) || a.recipe.Extents[i+1].Length >= smallCopy
			if !last && small.size < bufferSize-smallCopy {
				continue
			}
			select {
			case jobs <- small:
			case <-ctx.Done():
				return
			}
			small = job{}
			continue
		}
		for skip := int64(0); skip < e.Length; skip += jobSize {
			select {
			case jobs <- job{e, skip, min(jobSize, e.Length-skip)}:
			case <-ctx.Done():
				return
			}
		}
	}
}

// copier is one goroutine's.
type copier struct {
	a   *Assembled
	to  io.WriterAt
	buf []byte
}

func (c *copier) copy(j job) error {
	if j.extent.Length == 0 {
		return c.copySmall(j)
	}
	done := int64(0)
	if dst, ok := c.to.(*os.File); ok && j.extent.Period == 0 {
		s, err := c.a.source(j.extent.Container)
		if err != nil {
			return err
		}
		if src, ok := s.(*File); ok {
			done = copyInKernel(dst, j.extent.At+j.skip, src.file, j.extent.From+j.skip, j.size)
		}
	}
	if c.buf == nil && done < j.size {
		c.buf = make([]byte, bufferSize)
	}
	for done < j.size {
		p := c.buf[:min(bufferSize, j.size-done)]
		if err := c.a.fill(p, j.extent, j.skip+done); err != nil {
			return err
		}
		if _, err := c.to.WriteAt(p, j.extent.At+j.skip+done); err != nil {
			return fmt.Errorf("write at offset %d: %w", j.extent.At+j.skip+done, err)
		}
		done += int64(len(p))
	}
	return nil
}

// copySmall writes many extents at once.
func (c *copier) copySmall(j job) error {
	if c.buf == nil {
		c.buf = make([]byte, bufferSize)
	}
	p := c.buf[:j.size]
	if err := readFull(c.a, p, j.skip); err != nil {
		return err
	}
	if _, err := c.to.WriteAt(p, j.skip); err != nil {
		return fmt.Errorf("write at offset %d: %w", j.skip, err)
	}
	return nil
}
