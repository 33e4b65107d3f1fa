package main

import (
	"context"
	"crypto/sha256"
	"io"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// progressEvery is how often progress is sent.
const progressEvery = 100 * time.Millisecond

// burst is how many bytes are transferred at once with a rate limit.
const burst = 64 << 10

// tally counts the bytes of a call and reports them.
type tally struct {
	call  *call
	limit *rate.Limiter // nil: none
	total int64

	mu    sync.Mutex // guards the fields below
	done  int64
	seeds int64
	last  time.Time
}

func newTally(c *call) *tally {
	t := &tally{call: c}
	if r := c.request.Remote.Rate; r > 0 &&
		(c.request.Slowly || c.request.Do == remote.DoPutBlobs) {
		t.limit = rate.NewLimiter(rate.Limit(r), burst)
	}
	return t
}

// moved counts transferred bytes; n is negative when a part is repeated.
func (t *tally) moved(n int64) { t.count(n, 0) }

func (t *tally) count(done, seeds int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.done, t.seeds = t.done+done, t.seeds+seeds
	if now := time.Now(); now.Sub(t.last) >= progressEvery {
		t.last = now
		t.report()
	}
}

// finish reports the last state.
func (t *tally) finish() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.report()
}

func (t *tally) report() {
	w := t.call.wire()
	t.call.progress(remote.Progress{Done: t.done, Total: t.total, Seeds: t.seeds,
		Wire: w.In + w.Out})
}

func (t *tally) sent(to *remote.Sent, size int64, existed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	defer t.report() // that it makes progress
	if existed {
		to.Existed++
		t.done += size
		return
	}
	to.Sent++
	to.Bytes += size
}

// paced reads at the rate of the limiter, until its context ends.
type paced struct {
	ctx   context.Context
	at    io.ReaderAt
	limit *rate.Limiter
	moved func(int64)
}

// ReadAt implements io.ReaderAt.
func (p *paced) ReadAt(b []byte, at int64) (int, error) {
	if p.limit != nil && len(b) > burst {
		// short reads are permitted here, because the callers of io.SectionReader read again
		b = b[:burst]
	}
	if err := p.wait(len(b)); err != nil {
		return 0, err
	}
	n, err := p.at.ReadAt(b, at)
	p.moved(int64(n))
	return n, err
}

func (p *paced) wait(n int) error {
	if p.limit == nil {
		return p.ctx.Err()
	}
	return p.limit.WaitN(p.ctx, n)
}

// slow reads a body at the rate of the limiter.
type slow struct {
	io.Reader
	ctx   context.Context
	limit *rate.Limiter
}

// Read implements io.Reader.
func (s *slow) Read(b []byte) (int, error) {
	if s.limit != nil {
		b = b[:min(len(b), burst)]
		if err := s.limit.WaitN(s.ctx, len(b)); err != nil {
			return 0, err
		}
	}
	return s.Reader.Read(b)
}

func sumOf(f io.ReaderAt, size int64) (portable.Digest, error) {
	h := sha256.New()
	n, err := io.Copy(h, io.NewSectionReader(f, 0, size+1))
	if err == nil && n != size {
		err = io.ErrUnexpectedEOF
	}
	return portable.Digest(h.Sum(nil)), err
}
