package match

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sort"

	"github.com/epcached/epcached/dedupe"
)

// Ranges with few different values, such as masks and weights folded to zeros of either sign, have
// hardly any anchors but many repetitions. These quiet ranges are searched for repeated windows at
// every multiple of quietStep.
const (
	// quietLength, times the mean distance of anchors, is the least length of a quiet range. Random
	// bytes have such a range once in e^16.
	quietLength   = 16
	quietStep     = 4       // alignment of values
	longRun       = 4 << 10 // longer periodic runs are not searched
	maxQuietBytes = 8 << 20 // bytes of a target that are searched
)

type uniformRange struct {
	at  int64
	pos int // offset of its bytes in quietRanges.bytes
}

type quietRanges struct {
	bytes  []byte
	ranges []uniformRange
	slots  []int32 // 1 + position in bytes
	found  []match
}

func (q *quietRanges) add(target dedupe.Source, at, end int64) error {
	at = (at + quietStep - 1) &^ (quietStep - 1)
	end = min(end, at+int64(maxQuietBytes-len(q.bytes)))
	if end-at < windowSize {
		return nil
	}
	pos := len(q.bytes)
	q.bytes = append(q.bytes, make([]byte, (end-at)&^(quietStep-1))...)
	q.ranges = append(q.ranges, uniformRange{at, pos})
	return dedupe.ReadFull(target, q.bytes[pos:], at)
}

func (q *quietRanges) search() []match {
	size := 16
	for size < len(q.bytes)/quietStep*2 {
		size *= 2
	}
	q.slots = make([]int32, size)
	for k := range q.ranges {
		q.searchOne(k)
	}
	return q.found
}

func (q *quietRanges) end(k int) int {
	if k+1 < len(q.ranges) {
		return q.ranges[k+1].pos
	}
	return len(q.bytes)
}

func (q *quietRanges) searchOne(k int) {
	r, end := q.ranges[k], q.end(k)
	done := r.pos
	for i := r.pos; i+windowSize <= end; {
		from, known := q.positionOf(i)
		if !known {
			i += quietStep
			continue
		}
		j := sort.Search(len(q.ranges), func(j int) bool { return q.end(j) > from })
		ahead := min(end-i, q.end(j)-from)
		ahead = commonPrefix(q.bytes[i:i+ahead], q.bytes[from:from+ahead])
		back := min(i-done, from-q.ranges[j].pos)
		back = commonSuffix(q.bytes[i-back:i], q.bytes[from-back:from])
		q.found = append(q.found, match{
			at: r.at + int64(i-back-r.pos), from: q.ranges[j].at + int64(from-back-q.ranges[j].pos),
			length: int64(ahead + back)})
		done = i + ahead
		i = (done + quietStep - 1) &^ (quietStep - 1)
	}
}

// positionOf returns an earlier position of the window at i, or records i.
func (q *quietRanges) positionOf(i int) (from int, known bool) {
	w := q.bytes[i : i+windowSize]
	k := int(keyOf(w)>>20) & (len(q.slots) - 1)
	for range maxProbe {
		if q.slots[k] == 0 {
			q.slots[k] = int32(i + 1)
			return 0, false
		}
		if from = int(q.slots[k] - 1); bytes.Equal(q.bytes[from:from+windowSize], w) {
			return from, true
		}
		k = (k + 1) & (len(q.slots) - 1)
	}
	return 0, false
}

// quietUntil is called with the position of each anchor in order, and at last with the target's
// end.
func (o *selfCopies) quietUntil(at int64) error {
	from := o.heard
	o.heard = max(o.heard, at)
	if at-from < int64(quietLength*anchorEvery)>>max(-o.level, 0) {
		return nil
	}
	if err := o.quiet.add(o.target, from, at); err != nil {
		return fmt.Errorf("quiet range: %w", err)
	}
	return nil
}

// Runs that repeat a few bytes, such as zeros, padding and constant tensors, have no anchors, or
// the same one over and over. They are found separately: at every runStride-th byte where two
// consecutive words are equal, and where there is no anchor for noAnchor bytes, as happens once in
// e^4 in random bytes.
const (
	runStride = 256
	runWord   = 8 // a run with a period of 1, 2, 4 or 8 repeats its words
	noAnchor  = 4 << 10
	// length of a pattern; repetitions of patterns are searched where there is no anchor
	runPattern = 16
)

// run is a range that repeats its first period bytes.
type run struct{ at, length, period int64 }

func (r run) end() int64 { return r.at + r.length }

// runsOf returns the runs in b that have least bytes or touch its edges, in order. found are b's
// anchors.
func runsOf(b []byte, start int64, least int, found []anchor) []run {
	var runs []run
	done := 0 // end of the part that is done
	look := func(at, period int) {
		from, to := extend(b, at, period, done)
		if to-from >= least || (to-from > 2*period && (from == 0 || to == len(b))) {
			runs = append(runs, run{start + int64(from), int64(to - from), int64(period)})
			done = to
		}
	}
	next := 0  // index in found
	quiet := 0 // begin of a range without anchors and runs
	for at := 0; at+2*runWord <= len(b); at += runStride {
		for next < len(found) && int(found[next].at-start) < at {
			quiet = int(found[next].at-start) + 1
			next++
		}
		quiet = max(quiet, done)
		switch {
		case at < done:
		case binary.LittleEndian.Uint64(b[at:]) == binary.LittleEndian.Uint64(b[at+runWord:]):
			look(at, wordPeriod(binary.LittleEndian.Uint64(b[at:])))
		case at-quiet >= noAnchor:
			if period := periodAt(b[quiet:at]); period > 0 {
				look(quiet, period)
			}
			quiet = at
		}
	}
	return runs
}

func wordPeriod(w uint64) int {
	switch {
	case w>>8 == w&(1<<56-1):
		return 1
	case w>>16 == w&(1<<48-1):
		return 2
	case w>>32 == w&(1<<32-1):
		return 4
	}
	return runWord
}

// periodAt returns after how many bytes, at most half of b, the beginning of b is repeated, 0 if it
// is not.
func periodAt(b []byte) int { return bytes.Index(b[1:len(b)/2+runPattern], b[:runPattern]) + 1 }

// extend returns the range around at, beginning at least at least, that has the period.
func extend(b []byte, at, period, least int) (from, to int) {
	ahead := commonPrefix(b[at:len(b)-period], b[at+period:])
	back := commonSuffix(b[least:at], b[least+period:at+period])
	return at - back, at + ahead + period
}

// selfCopies fills the table from the target's segments, and finds ranges that the target has
// twice.
type selfCopies struct {
	*matcher
	comparer
	spare     int64 // bytes that may still be compared in vain
	end       int64 // end of the latest copy
	heard     int64 // position of the latest anchor
	quiet     quietRanges
	positions []int64
	warm      uint64 // unused result; see table.touch
}

func (o *selfCopies) done() error {
	o.stats.scanned += o.target.Size()
	o.stats.compared += o.compared
	if err := o.quietUntil(o.target.Size()); err != nil {
		return err
	}
	o.selfCopies = o.selfCopies.add(o.quiet.search(), minPiece)
	o.quiet, o.comparer = quietRanges{}, comparer{}
	return nil
}

const prefetchDistance = 128 // number of anchors whose slots in the table are prefetched

func (o *selfCopies) segment(s segment) error {
	for i, a := range s.anchors {
		if i%prefetchDistance == 0 {
			o.warm |= o.table.touch(s.anchors[i:min(i+prefetchDistance, len(s.anchors))])
		}
		for len(s.runs) > 0 && s.runs[0].at <= a.at {
			if err := o.run(s.runs[0]); err != nil {
				return err
			}
			s.runs = s.runs[1:]
		}
		if err := o.quietUntil(a.at); err != nil {
			return err
		}
		if a.at < o.end {
			continue
		}
		found, err := o.anchor(a)
		if err != nil {
			return err
		}
		if !found {
			o.table.insert(a)
		}
	}
	for _, r := range s.runs {
		if err := o.run(r); err != nil {
			return err
		}
	}
	return nil
}

// run records the repetitions of a run's first period, which may continue in later segments.
func (o *selfCopies) run(r run) error {
	at := max(r.at+r.period, o.end)
	if at >= r.end() || o.spare <= 0 {
		return nil
	}
	before := o.compared
	found, err := o.copyOf(&o.comparer, at, at-r.period, o.end)
	if err != nil {
		return err
	}
	if found.length < o.floor {
		o.spare -= o.compared - before
		return nil
	}
	// A long run ends a quiet range. Short ones are parts of it.
	if found.length >= longRun {
		if err := o.quietUntil(found.at); err != nil {
			return err
		}
		o.heard = found.end()
	}
	o.take(found)
	return nil
}

// anchor searches earlier copies of the bytes around an anchor of the target.
func (o *selfCopies) anchor(a anchor) (bool, error) {
	best := match{}
	o.positions = o.table.lookup(a.key, o.positions[:0])
	for _, from := range o.positions {
		if o.spare <= 0 {
			break
		}
		before := o.compared
		found, err := o.copyOf(&o.comparer, a.at, from, o.end)
		if err != nil {
			return false, err
		}
		if found.length < o.floor {
			o.spare -= o.compared - before
		} else if found.length > best.length {
			best = found
		}
	}
	if best.length == 0 {
		return false, nil
	}
	o.take(best)
	return true, nil
}

func (o *selfCopies) take(found match) {
	o.selfCopies = o.selfCopies.push(found)
	o.end = found.end()
}

// copyOf extends a match of two positions of the target in both directions. The ranges may overlap.
func (m *matcher) copyOf(c *comparer, at, from, end int64) (match, error) {
	ahead, err := c.forward(m.target, from, m.target, at, m.target.Size()-at)
	if err != nil {
		return match{}, err
	}
	back, err := c.backward(m.target, from, m.target, at, min(from, at-end))
	return match{at: at - back, from: from - back, length: ahead + back}, err
}
