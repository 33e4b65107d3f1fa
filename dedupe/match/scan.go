package match

import (
	"context"
	"encoding/binary"
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

type segment struct {
	anchors []anchor
	runs    []run
}

// scanOptions say what scanAll keeps.
type scanOptions struct {
	// less than 0: dense anchors; more: of the keys only those with as many zero bits at the end
	level  int
	least  int       // runs of as many bytes; 0: none
	sketch *sketcher // gets all keys; may be nil

	// each gets every segment, in order and one at a time, while others are scanned. May be nil.
	each func(segment) error
}

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

func (s *scanning) anchors(b []byte, start int64) {
	least, sparse, mask := minProduct(s.level), minProduct(0), uint64(1)<<max(s.level, 0)-1
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

const (
	finderStep = 4096 // positions that a finder looks at in one go
	pairsSpare = 4    // elements that pairs may write behind its last one
)

// finder finds anchors, a step at a time and with hardly a branch in it: the
// processor cannot foresee where the bytes have them, and each time that it
// guesses wrong costs as much as dozens of positions. It is one goroutine's.
type finder struct {
	at [finderStep + pairsSpare]int32
}

// step returns the anchors of b among the at most finderStep positions from i on, in order, until
// the next call; and the first position that it has not looked at, which is i when there is none
// left: b has to have windowSize bytes for each.
func (f *finder) step(b []byte, i int, least uint64) (at []int32, next int) {
	n := min(finderStep, len(b)-windowSize+1-i)
	if n <= 0 {
		return nil, i
	}
	count := pairs(f.at[:], b[i:], int32(i), n/64)
	for k := i + n&^63; k < i+n; k++ {
		if (b[k]^b[k+1])&pairMask == pairDiffers {
			f.at[count] = int32(k)
			count++
		}
	}
	if least == 0 {
		return f.at[:count], i + n
	}
	k := 0
	for _, p := range f.at[:count] {
		f.at[k] = p
		_, less := bits.Sub64(product(b[p:]), least, 0)
		k += 1 - int(less)
	}
	return f.at[:k], i + n
}

// pairsPortable writes the positions of those of the first 64*words bytes of b that differ from the
// one behind them as those of anchors do, each plus base, and returns how many. b has one byte
// more, and at has pairsSpare more elements than there may be.
func pairsPortable(at []int32, b []byte, base int32, words int) int {
	const ones = 0x0101010101010101
	count := 0
	for w := range 8 * words {
		s := b[8*w : 8*w+9 : 8*w+9]
		x := (binary.LittleEndian.Uint64(s)^binary.LittleEndian.Uint64(s[1:]))&(pairMask*ones) ^
			pairDiffers*ones
		// A bit in each byte that is 0; none of the sums is carried.
		for hits := ^(x + pairMask*ones) & (0x40 * ones); hits != 0; hits &= hits - 1 {
			at[count] = base + int32(8*w+bits.TrailingZeros64(hits)/8)
			count++
		}
	}
	return count
}

// An anchor is a position that the bytes themselves choose, so that equal runs have the same
// anchors at any offset. Unlike a rolled hash this needs nothing of the position
// before, so any part of a blob can be looked at alone. It takes two steps, for most positions have
// to be passed in less than a processor's cycle each: a byte and the one behind it differ in
// certain bits, as one in 64 pairs of random bytes do and no two equal ones, which is tried on 64
// positions at once; and the eight bytes there, times a constant, are among the highest products.
// Two bytes are used because one alone has few values in text, and favours some in small integers.
//
// How many positions are anchors is a matter of the least product. With sparse ones it is one in
// 1024 with random bytes, with dense ones up to one in 64; sparse anchors are dense ones too.
//
// The key of an anchor is a hash of the next 64 bytes: eight are too few to distinguish tensors.
const (
	pairBits    = 6
	anchorBits  = 10
	anchorEvery = 1 << anchorBits
	denseLevel  = pairBits - anchorBits // of which there are most
	windowSize  = 64

	pairDiffers = 0x03
	pairMask    = 0x3f

	anchorFactor = 0x9E3779B97F4A7C15
)

// minProduct is that of a level: 0 for sparse anchors, one less for twice as many.
func minProduct(level int) uint64 {
	passed := min(level, 0) - denseLevel
	return ^uint64(0) << (64 - passed)
}

type anchor struct {
	key uint64
	at  int64
}

func product(b []byte) uint64 { return binary.LittleEndian.Uint64(b) * anchorFactor }

// keyOf hashes the window at b. Keys are in stored sketches: new constants are a new format.
func keyOf(b []byte) uint64 {
	b = b[:windowSize:windowSize]
	var h uint64
	for i := 0; i < windowSize; i += 16 {
		hi, lo := bits.Mul64(binary.LittleEndian.Uint64(b[i:])^h^0xA0761D6478BD642F,
			binary.LittleEndian.Uint64(b[i+8:])^0xE7037ED1A0B428DB)
		h = hi ^ lo + h
	}
	hi, lo := bits.Mul64(h^0x8EBC6AF09C88C6E3, 0x589965CC75374CC3)
	return hi ^ lo
}
