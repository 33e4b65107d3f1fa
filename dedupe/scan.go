package dedupe

import (
	"context"
	"fmt"
	"math/bits"
	"runtime"
	"slices"
	"sync"

	"github.com/epcached/epcached/cas"
)

// segmentSize is what one core scans at a time. Segments are cut at fixed
// offsets, and each is read with the window that begins at its last byte, so
// cutting changes nothing.
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
	covered []match  // by the guide, where there is one; no anchors and runs are of these ranges
	marks   []anchor // but some of their anchors
}

// scanOptions say what scanAll keeps.
type scanOptions struct {
	level  int       // less than 0: dense anchors; more: of the keys only those with as many zero bits at the end
	least  int       // runs of as many bytes; 0: none
	sketch *sketcher // gets all keys; may be nil
	guide  *guide    // may be nil

	// each gets every segment, in order and one at a time, while others are scanned;
	// none is returned then. May be nil.
	each func(segment) error
}

// scanAll finds the anchors of src on all cores, and runs that repeat themselves.
func scanAll(ctx context.Context, src Source, o scanOptions) ([]segment, error) {
	s := newScanner(src, o)
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(s.all)) {
		wg.Go(func() { s.work(ctx) })
	}
	wg.Wait()
	return s.all, s.err
}

// scanAndSum does the same while every byte is hashed, so that a blob is read once.
func scanAndSum(ctx context.Context, src Source, o scanOptions) ([]segment, cas.Digest, error) {
	s := newScanner(src, o)
	digest, err := cas.Sum(ctx, &scanningReader{s: s}, 0, src.Size())
	if err == nil && s.next != len(s.all) {
		err = fmt.Errorf("scanned %d of %d segments", s.next, len(s.all)) // cas.Sum reads in other pieces: our bug
	}
	return s.all, digest, err
}

func newScanner(src Source, o scanOptions) *scanner {
	all := make([]segment, (src.Size()+segmentSize-1)/segmentSize)
	return &scanner{src: src, all: all, level: o.level, least: o.least, sketch: o.sketch, guide: o.guide, handing: handing{each: o.each, ready: make([]bool, len(all))}}
}

// scanningReader scans each segment that is read through it.
type scanningReader struct {
	s    *scanner
	idle sync.Pool // of *scanning
}

// ReadAt is io.ReaderAt.
func (r *scanningReader) ReadAt(p []byte, off int64) (int, error) {
	if err := readFull(r.s.src, p, off); err != nil {
		return 0, err
	}
	if len(p) == 0 || off%segmentSize != 0 || int64(len(p)) != min(segmentSize, r.s.src.Size()-off) {
		return len(p), nil
	}
	w, ok := r.idle.Get().(*scanning)
	if !ok {
		w = &scanning{scanner: r.s}
	}
	defer r.idle.Put(w)
	// Windows that begin in this segment and end in the next one are looked at apart.
	seam := w.seam[:0]
	if end := off + int64(len(p)); end < r.s.src.Size() {
		seam = append(seam, p[len(p)-windowSize+1:]...)
		k := int(min(windowSize-1, r.s.src.Size()-end))
		seam = seam[:len(seam)+k]
		if err := readFull(r.s.src, seam[windowSize-1:], end); err != nil {
			return 0, err
		}
	}
	if err := w.scan(int(off/segmentSize), p, seam); err != nil {
		return 0, err
	}
	r.s.mu.Lock()
	r.s.next++
	r.s.mu.Unlock()
	r.s.done(w.keys, nil)
	if err := r.s.handOn(int(off / segmentSize)); err != nil {
		return 0, err
	}
	return len(p), nil
}

type scanner struct {
	src   Source
	all   []segment // each element is its worker's
	level int
	least int
	guide *guide

	mu     sync.Mutex // guards all below
	next   int
	sketch *sketcher // nil: none is wanted
	err    error
	handing
}

// handing is where the segments are that are handed on in order. Whoever has
// scanned one goes on with that, if nobody else does: so what one core has to do
// alone is done while the others scan, and none waits for another.
type handing struct {
	each  func(segment) error
	ready []bool // those that are scanned
	first int    // that is not handed on
	busy  bool
}

// handOn is told that segment i is scanned.
func (s *scanner) handOn(i int) error {
	if s.each == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ready[i] = true
	if s.busy {
		return nil
	}
	s.busy = true
	for s.first < len(s.all) && s.ready[s.first] {
		one := &s.all[s.first]
		s.mu.Unlock()
		err := s.each(*one)
		*one = segment{}
		s.mu.Lock()
		if err != nil {
			return err // and busy for good: nothing is handed on behind what could not be
		}
		s.first++
	}
	s.busy = false
	return nil
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

func (s *scanner) done(keys []uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && s.err == nil {
		s.err = err
	}
	if s.sketch != nil {
		for _, k := range keys {
			s.sketch.add(k)
		}
	}
}

func (s *scanner) work(ctx context.Context) {
	w := &scanning{scanner: s, buf: make([]byte, segmentSize+windowSize-1)}
	for i, ok := s.take(); ok; i, ok = s.take() {
		err := ctx.Err()
		if err == nil {
			err = w.segment(i)
		}
		s.done(w.keys, err)
		if err == nil {
			if err := s.handOn(i); err != nil {
				s.done(nil, err)
			}
		}
	}
}

// scanning is one goroutine's.
type scanning struct {
	*scanner
	finder
	guided guided
	buf    []byte
	seam   [2 * windowSize]byte
	found  []anchor // in the latest segment
	runs   []run
	marks  []anchor
	keys   []uint64 // those of found and marks that may belong into the sketch
}

// segment reads and scans one segment.
func (s *scanning) segment(i int) error {
	start := int64(i) * segmentSize
	b := s.buf[:min(int64(len(s.buf)), s.src.Size()-start)]
	if err := readFull(s.src, b, start); err != nil {
		return err
	}
	n := min(segmentSize, len(b))
	return s.scan(i, b[:n], b[max(0, n-windowSize+1):])
}

// scan looks at segment i, which b is. Windows that begin in it and end behind
// it stand in seam.
func (s *scanning) scan(i int, b, seam []byte) error {
	start := int64(i) * segmentSize
	s.found, s.runs, s.marks, s.keys = s.found[:0], s.runs[:0], s.marks[:0], s.keys[:0]
	var covered []match
	if s.guide != nil {
		if err := s.guided.segment(s.guide, i, b); err != nil {
			return err
		}
		covered = s.guided.covered
	}
	at := 0
	for _, m := range covered {
		s.open(b, at, int(m.at-start), start)
		s.mark(b[m.at-start:m.end()-start], m.at)
		at = int(m.end() - start)
	}
	s.open(b, at, len(b), start)
	if at < len(b) {
		s.found = s.anchors(s.found, seam, start+int64(max(0, len(b)-windowSize+1)), s.level, s.most())
	}
	s.all[i] = segment{anchors: kept(s.found), runs: kept(s.runs), covered: kept(covered), marks: kept(s.marks)}
	return nil
}

// kept returns a copy that takes no memory where there is nothing.
func kept[T any](s []T) []T {
	if len(s) == 0 {
		return nil
	}
	return slices.Clone(s)
}

// open looks at the bytes of b from at to end, which the guide does not know; b
// stands at start.
func (s *scanning) open(b []byte, at, end int, start int64) {
	k := len(s.found)
	s.found = s.anchors(s.found, b[at:min(end+windowSize-1, len(b))], start+int64(at), s.level, s.most())
	if s.least > 0 {
		s.runs = append(s.runs, runsOf(b[at:end], start+int64(at), s.least, s.found[k:])...)
	}
}

// mark looks at some of b, which stands at start, and which the guide knows.
func (s *scanning) mark(b []byte, start int64) {
	skip := int(-start & (markEvery - 1))
	for at := skip; at < len(b); at += markEvery {
		part := b[at:min(at+markPart+windowSize-1, len(b))]
		s.marks = s.anchors(s.marks, part, start+int64(at), max(s.level, markLevel), s.most())
	}
}

func (s *scanning) most() int { return denseSegment(s.level, len(s.all)) }

// anchors adds those of b, which stands at start, to found, up to most.
func (s *scanning) anchors(found []anchor, b []byte, start int64, level, most int) []anchor {
	least, sparse, mask := leastProduct(level), leastProduct(0), uint64(1)<<max(level, 0)-1
	for i := 0; ; {
		step, next := s.step(b, i, least)
		if next == i {
			return found
		}
		i = next
		for _, at := range step {
			key := keyOf(b[at:])
			if s.sketch != nil {
				s.keys = append(s.keys, key)
				_, less := bits.Sub64(product(b[at:]), sparse, 0) // no branch, as in finder
				s.keys = s.keys[:len(s.keys)-int(less)]
			}
			if key&mask == 0 && len(found) < most {
				found = append(found, anchor{key, start + int64(at)})
			}
		}
	}
}
