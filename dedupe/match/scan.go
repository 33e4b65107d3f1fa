package match

import (
	"context"
	"math/bits"
	"slices"
	"sync"

	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/internal/parallel"
)

// segmentSize is what a core scans at a time, with one window more, so that cuts change nothing.
const segmentSize = 1 << 20

// denseSegment is how many anchors of each of so many segments are kept: four
// times what random bytes have, and all together no more than maxAnchors. Bytes
// that were made to have more take no more memory.
func denseSegment(level, segments int) int {
	return min(4*segmentSize/anchorEvery<<max(-level, 0)>>max(level, 0), maxAnchors/segments)
}

// segment is what was found in one MiB of a source, in order.
type segment struct {
	anchors []anchor
	runs    []run
}

// scanOptions say what scanAll keeps.
type scanOptions struct {
	level  int       // less than 0: dense anchors; more: of the keys only those with as many zero bits at the end
	least  int       // runs of as many bytes; 0: none
	sketch *sketcher // gets all keys; may be nil

	// each gets every segment, in order and one at a time, while others are scanned. May be nil.
	each func(segment) error
}

// scanAll finds the anchors of src on all cores, and runs that repeat themselves.
func scanAll(ctx context.Context, src dedupe.Source, o scanOptions) error {
	n := int((src.Size() + segmentSize - 1) / segmentSize)
	s := &scanner{src: src, scanOptions: o, ready: make([]*segment, n)}
	begin := func() *scanning {
		return &scanning{scanner: s, buf: make([]byte, segmentSize+windowSize-1)}
	}
	return parallel.Do(ctx, n, begin, (*scanning).segment, nil)
}

type scanner struct {
	src dedupe.Source
	scanOptions

	mu    sync.Mutex // guards all below, and the sketch
	ready []*segment // those that are scanned and not handed on
	first int        // that is not handed on
	busy  bool       // one worker is handing on
}

// handOn gives segment i, and those behind it that are scanned already, to each, if all before it
// were given. A worker that has scanned one goes on with that, unless another one does: so what one
// core has to do alone is done while the others scan, and none waits for another.
func (s *scanner) handOn(i int, one *segment) error {
	if s.each == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ready[i] = one
	if s.busy {
		return nil
	}
	s.busy = true
	for s.first < len(s.ready) && s.ready[s.first] != nil {
		one := s.ready[s.first]
		s.ready[s.first] = nil
		s.mu.Unlock()
		err := s.each(*one)
		s.mu.Lock()
		if err != nil {
			return err // and busy for good: nothing is handed on behind what could not be
		}
		s.first++
	}
	s.busy = false
	return nil
}

// scanning is one goroutine's.
type scanning struct {
	*scanner
	finder
	buf   []byte
	found []anchor // in the latest segment
	keys  []uint64 // those of found that may belong into the sketch
}

func (s *scanning) segment(i int) error {
	start := int64(i) * segmentSize
	b := s.buf[:min(int64(len(s.buf)), s.src.Size()-start)]
	if err := dedupe.ReadFull(s.src, b, start); err != nil {
		return err
	}
	s.found, s.keys = s.found[:0], s.keys[:0]
	s.anchors(b, start)
	one := &segment{anchors: slices.Clone(s.found)}
	if s.least > 0 {
		one.runs = runsOf(b[:min(segmentSize, len(b))], start, s.least, s.found)
	}
	if s.sketch != nil {
		s.mu.Lock()
		for _, k := range s.keys {
			s.sketch.add(k)
		}
		s.mu.Unlock()
	}
	return s.handOn(i, one)
}

// anchors adds those of b, which stands at start, to found, up to as many as are kept.
func (s *scanning) anchors(b []byte, start int64) {
	least, sparse, mask := leastProduct(s.level), leastProduct(0), uint64(1)<<max(s.level, 0)-1
	most := denseSegment(s.level, len(s.ready))
	for i := 0; ; {
		step, next := s.step(b, i, least)
		if next == i {
			return
		}
		i = next
		for _, at := range step {
			key := keyOf(b[at:])
			if s.sketch != nil {
				s.keys = append(s.keys, key)
				_, less := bits.Sub64(product(b[at:]), sparse, 0) // no branch, as in finder
				s.keys = s.keys[:len(s.keys)-int(less)]
			}
			if key&mask == 0 && len(s.found) < most {
				s.found = append(s.found, anchor{key, start + int64(at)})
			}
		}
	}
}
