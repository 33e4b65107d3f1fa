package dedupe

import (
	"context"
	"runtime"
	"sync"
)

// segmentSize is what one core scans at a time. Segments are cut at fixed
// offsets, and each is read with the window that begins at its last byte, so
// cutting changes nothing.
const segmentSize = 1 << 20

// denseSegment is how many anchors of a segment count: four times what random
// bytes have. Bytes that were made to have more take no more memory.
const denseSegment = 4 * segmentSize / anchorEvery

// segments is a source's anchors, segment by segment, in order.
type segments [][]anchor

// scanAll finds the anchors of src on all cores. Of its keys only those with
// level zero bits at the end are kept; sketch gets all.
func scanAll(ctx context.Context, src Source, level int, sk *sketcher) (segments, error) {
	size := src.Size()
	all := make(segments, (size+segmentSize-1)/segmentSize)
	s := &scanner{src: src, all: all, mask: 1<<level - 1, sketch: sk}
	workers := min(runtime.GOMAXPROCS(0), len(all))
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() { s.work(ctx) })
	}
	wg.Wait()
	return all, s.err
}

type scanner struct {
	src  Source
	all  segments // each element is its worker's
	mask uint64

	mu     sync.Mutex // guards all below
	next   int
	sketch *sketcher // nil: none is wanted
	err    error
}

func (s *scanner) take() (int, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil || s.next == len(s.all) {
		return 0, false
	}
	s.next++
	return s.next - 1, true
}

func (s *scanner) done(found []anchor, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && s.err == nil {
		s.err = err
	}
	if s.sketch != nil {
		for _, a := range found {
			s.sketch.add(a.key)
		}
	}
}

func (s *scanner) work(ctx context.Context) {
	buf := make([]byte, segmentSize+windowSize-1)
	var found []anchor
	for i, ok := s.take(); ok; i, ok = s.take() {
		err := ctx.Err()
		if err == nil {
			found, err = s.segment(i, buf, found[:0])
		}
		s.done(found, err)
	}
}

// segment scans one segment into found, and keeps what passes the level.
func (s *scanner) segment(i int, buf []byte, found []anchor) ([]anchor, error) {
	start := int64(i) * segmentSize
	b := buf[:min(int64(len(buf)), s.src.Size()-start)]
	if err := readFull(s.src, b, start); err != nil {
		return nil, err
	}
	kept := 0
	for at, ok := nextAnchor(b, 0); ok && len(found) < denseSegment; at, ok = nextAnchor(b, at+1) {
		a := anchor{keyOf(b[at:]), start + int64(at)}
		found = append(found, a)
		if a.key&s.mask == 0 {
			kept++
		}
	}
	if kept > 0 {
		list := make([]anchor, 0, kept)
		for _, a := range found {
			if a.key&s.mask == 0 {
				list = append(list, a)
			}
		}
		s.all[i] = list
	}
	return found, nil
}
