package dedupe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/epcached/epcached/cas"
)

// ApplyOptions say how a blob is rebuilt.
type ApplyOptions struct {
	// Trusted leaves out hashing what comes out. It is for a recipe that was
	// proven and containers that were verified, whose stamps hold; extents are then
	// shared where the file system can.
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
	if f, ok := w.(*os.File); ok {
		cas.Preallocate(f, a.Size())
	}
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
	if _, werr := cas.WriteInSteps(t.to, p[:n], off); werr != nil {
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
