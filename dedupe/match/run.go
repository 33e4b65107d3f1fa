package match

import (
	"bytes"
	"encoding/binary"
)

// Runs that repeat a few bytes, such as zeros, padding and constant tensors, have
// no anchors, or the same one over and over. They are looked for by themselves:
// where two words in a row are equal, at every runStride-th byte, and where there
// is no anchor for noAnchor bytes, one in e^4 times with random ones.
const (
	runStride  = 256
	runWord    = 8 // a run with a period of 1, 2, 4 or 8 repeats its words
	noAnchor   = 4 << 10
	runPattern = 16 // bytes that are looked for again where there is no anchor
)

// run is a range of a source that repeats its first period bytes.
type run struct{ at, length, period int64 }

func (r run) end() int64 { return r.at + r.length }

// runsOf returns the runs in b, which stands at start, that have least bytes or
// touch an edge of b, in order. found are the anchors of b.
func runsOf(b []byte, start int64, least int, found []anchor) []run {
	var runs []run
	done := 0 // up to where runs are known
	look := func(at, period int) {
		from, to := extend(b, at, period, done)
		if to-from >= least || (to-from > 2*period && (from == 0 || to == len(b))) {
			runs = append(runs, run{start + int64(from), int64(to - from), int64(period)})
			done = to
		}
	}
	next := 0  // of found
	quiet := 0 // from where on there is neither an anchor nor a run
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

// periodAt returns after how many bytes the beginning of b comes again, at most half of b; or 0.
func periodAt(b []byte) int { return bytes.Index(b[1:len(b)/2+runPattern], b[:runPattern]) + 1 }

// extend returns the range around at in which every byte is the same as the one
// a period later or earlier, not before least.
func extend(b []byte, at, period, least int) (from, to int) {
	ahead := commonPrefix(b[at:len(b)-period], b[at+period:])
	back := commonSuffix(b[least:at], b[least+period:at+period])
	return at - back, at + ahead + period
}
