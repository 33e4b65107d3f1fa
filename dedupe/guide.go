package dedupe

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"math"
	"slices"
	"sync/atomic"
)

// A large blob is mostly nearly the same as one that is stored: another batch
// size, a fine-tune, a newer compiler. Where in that one a part of it probably
// stands is soon found out, and then whole pieces are compared while they are
// read, and only what differs is searched for anchors. That takes a third of the
// time. What is expected wrongly costs a comparison, and nothing is taken that
// was not compared.
const (
	guidedLeast = 16 << 20  // smaller targets are not worth it
	guidedRun   = 4 << 10   // equal bytes that are taken without an anchor, unless matches have to be longer anyway
	guidedRead  = 128 << 10 // of the candidate, at a time
	guidedStep  = 64        // how far apart it is looked for equal bytes again behind a difference

	guideSame   = 1 << 10   // equal bytes that a distance is believed for
	guideWindow = 16 << 10  // of the target, that is looked for in the candidate
	guideReach  = 256 << 10 // as far to both sides of where it is expected
	guideMisses = 8         // so often in vain, and once more each time that it was found
	guideWorth  = 4         // a guide that knows less than such a part of the segments is none

	// Of what is found by a guide only so much is searched for anchors, in case the
	// target has it once more elsewhere: what is left of 16 KiB has as many as those
	// that sparse anchors leave of all of it.
	markEvery = 16 << 10
	markPart  = 4 << 10
	markLevel = -2
)

const nowhere = math.MinInt64

// guide tells where the segments of a target probably stand in a candidate.
type guide struct {
	Candidate
	distances []int64 // of each segment's first byte, from its place in the target to that in the candidate; or nowhere
	known     int     // of them
	least     int64   // equal bytes that are taken
	compared  atomic.Int64
}

// newGuide looks for the segments one after another, near where they are expected
// after those before. nil: the candidate is not much like the target.
func newGuide(ctx context.Context, target Source, c Candidate, floor int64) (*guide, error) {
	g := &guide{Candidate: c, least: max(guidedRun, floor), distances: make([]int64, (target.Size()+segmentSize-1)/segmentSize)}
	w := &guiding{target: target, candidate: c.Source, misses: guideMisses}
	for i := range g.distances {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		found, err := w.step(int64(i) * segmentSize)
		if err != nil {
			return nil, &ContainerError{c.Digest, err}
		}
		g.distances[i] = nowhere
		if found {
			g.distances[i] = w.distance
			g.known++
		}
	}
	g.compared.Store(w.compared)
	if g.known*guideWorth < len(g.distances) {
		return nil, nil //nolint:nilnil // none
	}
	return g, nil
}

// guiding is the search for the segments.
type guiding struct {
	target, candidate Source
	comparer
	finder
	distance int64 // of the latest that was found
	misses   int   // searches in vain that are left
	window   []byte
	near     []byte
	places   map[uint64]int64
}

// step finds the distance of what stands at t in the target.
func (w *guiding) step(t int64) (bool, error) {
	if same, err := w.same(t, t+w.distance); same || err != nil {
		return same, err
	}
	if w.misses == 0 {
		return false, nil
	}
	found, err := w.search(t)
	if err == nil && !found {
		w.misses--
	} else {
		w.misses++
	}
	return found, err
}

// same tells whether the bytes at t and c are the same for a while.
func (w *guiding) same(t, c int64) (bool, error) {
	if c < 0 || c > w.candidate.Size()-guideSame || t > w.target.Size()-guideSame {
		return false, nil
	}
	a, b, err := w.read(w.target, t, w.candidate, c, guideSame)
	return err == nil && bytes.Equal(a, b), err
}

// search looks for anchors of the target behind t in the candidate.
func (w *guiding) search(t int64) (bool, error) {
	w.window = resized(w.window, int(min(guideWindow, w.target.Size()-t)))
	if err := readFull(w.target, w.window, t); err != nil {
		return false, err
	}
	from := max(0, t+w.distance-guideReach)
	end := min(w.candidate.Size(), t+w.distance+guideReach+guideWindow)
	if from >= end {
		return false, nil
	}
	w.near = resized(w.near, int(end-from))
	if err := readFull(w.candidate, w.near, from); err != nil {
		return false, err
	}
	w.places = make(map[uint64]int64)
	w.each(w.window, t, func(key uint64, at int64) bool {
		if _, known := w.places[key]; !known {
			w.places[key] = at
		}
		return true
	})
	if len(w.places) == 0 {
		return false, nil
	}
	tries := guideMisses
	found, first := false, error(nil)
	w.each(w.near, from, func(key uint64, c int64) bool {
		at, known := w.places[key]
		if !known || c-at == w.distance {
			return true
		}
		tries--
		same, err := w.same(at, c)
		if same {
			found, w.distance = true, c-at
		}
		first = err
		return !same && err == nil && tries > 0
	})
	return found, first
}

// each calls fn with the anchors of b, which stands at start, until it says no.
func (w *guiding) each(b []byte, start int64, fn func(key uint64, at int64) bool) {
	for i := 0; ; {
		found, next := w.step4(b, i)
		if next == i {
			return
		}
		i = next
		for _, at := range found {
			if !fn(keyOf(b[at:]), start+int64(at)) {
				return
			}
		}
	}
}

func (w *guiding) step4(b []byte, i int) ([]int32, int) {
	return w.finder.step(b, i, leastProduct(markLevel))
}

// left returns how much of a target of that size the guide does not know.
func (g *guide) left(size int64) int64 {
	return size / int64(len(g.distances)) * int64(len(g.distances)-g.known)
}

// level returns at which level what the guide leaves of a target is scanned: as
// many anchors in all as there are in a target that has as much without a guide.
func (g *guide) level(size int64) int {
	level := levelOf(g.left(size))
	for level < 0 && size/anchorEvery<<-level > usualAnchors {
		level++
	}
	return max(level, levelOf(size)+markLevel)
}

// guided compares segments where the guide says; it is one goroutine's.
type guided struct {
	buf     []byte
	covered []match
}

// segment finds what of b, the i-th segment of the target, stands where the
// guide says, from its beginning and to its end, in order.
func (d *guided) segment(g *guide, i int, b []byte) error {
	d.covered = d.covered[:0]
	here, next := g.distances[i], int64(nowhere)
	if i+1 < len(g.distances) {
		next = g.distances[i+1]
	}
	at := int64(i) * segmentSize
	if here != nowhere {
		if err := d.compare(g, b, at, here); err != nil {
			return err
		}
	}
	if next != nowhere && next != here {
		done := at // all before is covered, or differs from what is expected there
		if k := len(d.covered); k > 0 {
			done = d.covered[k-1].end()
		}
		return d.compare(g, b[done-at:], done, next)
	}
	return nil
}

// compare adds the ranges of b, which stands at, that are equal at a distance.
func (d *guided) compare(g *guide, b []byte, at, distance int64) error {
	from := max(0, -(at + distance))
	to := min(int64(len(b)), g.Source.Size()-at-distance)
	if to-from < g.least {
		return nil
	}
	d.buf = resized(d.buf, guidedRead)
	g.compared.Add(to - from)
	r := equalRuns{least: g.least, covered: d.covered, distance: distance, start: -1, end: at + from}
	for pos := from; pos < to; {
		q := d.buf[:min(guidedRead, to-pos)]
		if err := readFull(g.Source, q, at+pos+distance); err != nil {
			return &ContainerError{g.Digest, err}
		}
		r.chunk(b[pos:pos+int64(len(q))], q, at+pos)
		pos += int64(len(q))
	}
	r.close(at + to)
	d.covered = r.covered
	return nil
}

// equalRuns collects the ranges in which two sides are equal.
type equalRuns struct {
	least    int64
	covered  []match
	distance int64
	start    int64 // in the target, of the range that is not ended; less than 0: there is none
	end      int64 // of what is known to differ, or belongs to a range
}

// chunk goes through a and b, which stand side by side; a at.
func (r *equalRuns) chunk(a, b []byte, at int64) {
	for i := 0; i < len(a); {
		if r.start < 0 {
			if i = r.next(a, b, i, at); i == len(a) {
				return
			}
		}
		if i += commonPrefix(a[i:], b[i:]); i < len(a) {
			r.close(at + int64(i))
			i++
		}
	}
}

// next begins a range where both sides are equal again, at i or at a step behind it.
func (r *equalRuns) next(a, b []byte, i int, at int64) int {
	for ; i+8 <= len(a); i += guidedStep {
		if binary.LittleEndian.Uint64(a[i:]) == binary.LittleEndian.Uint64(b[i:]) {
			known := int(max(0, r.end-at)) // what is before was compared already
			r.start = at + int64(i-commonSuffix(a[known:i], b[known:i]))
			return i
		}
	}
	return len(a)
}

// close ends a range, if there is one.
func (r *equalRuns) close(end int64) {
	if r.start >= 0 && end-r.start >= r.least {
		r.covered = append(r.covered, match{at: r.start, from: r.start + r.distance, length: end - r.start})
	}
	r.start, r.end = -1, end
}

// takenOf returns the ranges of a candidate that the target has, in order, and none twice.
func takenOf(c cover, source int) []match {
	var taken []match
	for _, m := range c {
		if m.source == source {
			taken = append(taken, match{at: m.from, length: m.length})
		}
	}
	slices.SortFunc(taken, func(a, b match) int { return cmp.Compare(a.at, b.at) })
	out := taken[:0]
	for _, m := range taken {
		if k := len(out) - 1; k >= 0 && m.at <= out[k].end() {
			out[k].length = max(out[k].length, m.end()-out[k].at)
		} else {
			out = append(out, m)
		}
	}
	return out
}
