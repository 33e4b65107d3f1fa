package dedupe

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"

	"github.com/epcached/epcached/cas"
)

// leastClone is the shortest range that is worth a call of its own: shared
// extents are as many pieces on the disk.
const leastClone = 64 << 10

// copyTo has the file system share what it can, and copies the rest on all cores.
//
// Each core reads a step of the blob, of however many extents, and writes it at
// once. copy_file_range was used before: where nothing can be shared it takes its
// bytes through a pipe, 64 KiB at most, and what is written begins where the
// source's pages do and not the file's own. On ext4 that takes two to three times
// as long.
func (a *Assembled) copyTo(ctx context.Context, w io.WriterAt, o ApplyOptions) error {
	left := &remaining{ranges: []span{{0, a.Size()}}}
	if f, ok := w.(*os.File); ok {
		var err error
		if left.ranges, err = a.cloneTo(f, cloneRange); err != nil {
			return err
		}
		if len(left.ranges) == 1 && left.ranges[0] == (span{0, a.Size()}) {
			cas.Preallocate(f, a.Size())
		}
	}
	report := progress{fn: o.Progress, total: a.Size(), done: a.Size() - left.bytes()}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for range min(int64(runtime.GOMAXPROCS(0)), (left.bytes()+cas.WriteStep-1)/cas.WriteStep) {
		wg.Go(func() {
			buf := make([]byte, cas.WriteStep)
			for s, ok := left.next(); ok && ctx.Err() == nil; s, ok = left.next() {
				if err := a.copySpan(w, s, buf); err != nil {
					cancel(err)
					return
				}
				report.add(s.end - s.at)
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

func (a *Assembled) copySpan(w io.WriterAt, s span, buf []byte) error {
	p := buf[:s.end-s.at]
	if err := readFull(a, p, s.at); err != nil {
		return err
	}
	if _, err := w.WriteAt(p, s.at); err != nil {
		return fmt.Errorf("write at offset %d: %w", s.at, err)
	}
	return nil
}

// cloneTo shares extents with the containers, and returns what is left to be copied.
func (a *Assembled) cloneTo(dst *os.File, clone func(dst *os.File, to int64, src *os.File, from, n int64) bool) (left []span, err error) {
	done := int64(0)
	refused := make(map[int]bool) // containers that nothing can be shared with
	for _, e := range a.recipe.Extents {
		head := (cloneBlock - e.At%cloneBlock) % cloneBlock
		body := (e.Length - head) &^ (cloneBlock - 1)
		if e.Period > 0 || (e.From-e.At)%cloneBlock != 0 || body < leastClone || refused[e.Container] {
			continue
		}
		s, err := a.source(e.Container)
		if err != nil {
			return nil, err
		}
		src, ok := s.(*File)
		if !ok || !clone(dst, e.At+head, src.file, e.From+head, body) {
			refused[e.Container] = true
			continue
		}
		if at := e.At + head; at > done {
			left = append(left, span{done, at})
		}
		done = e.At + head + body
	}
	if done < a.Size() {
		left = append(left, span{done, a.Size()})
	}
	return left, nil
}

// span is a range of the blob.
type span struct{ at, end int64 }

// remaining hands out what is left to be copied, cut where the blob's steps are.
type remaining struct {
	mu     sync.Mutex // guards ranges
	ranges []span
}

func (r *remaining) next() (span, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ranges) == 0 {
		return span{}, false
	}
	first := &r.ranges[0]
	s := span{first.at, min(first.end, (first.at/cas.WriteStep+1)*cas.WriteStep)}
	if first.at = s.end; first.at == first.end {
		r.ranges = r.ranges[1:]
	}
	return s, true
}

func (r *remaining) bytes() (n int64) {
	for _, s := range r.ranges {
		n += s.end - s.at
	}
	return n
}
