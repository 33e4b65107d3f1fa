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

// segmentSize is the part that a core scans at a time, plus one window, so that the result does not
// depend on the cuts.
const segmentSize = 1 << 20

// denseSegment returns how many anchors of each segment are kept: four times as many as random
// bytes have, but in total at most maxAnchors, so that bytes which were crafted to have more need
// no more memory.
func denseSegment(level, segments int) int {
	return min(4*segmentSize/anchorEvery<<max(-level, 0)>>max(level, 0), maxAnchors/segments)
}

type segment struct {
	anchors []anchor
	runs    []run
}

// scanOptions select the results of scanAll.
type scanOptions struct {
	// level is negative for dense anchors. If positive, only keys that end in as many zero bits are
	// kept.
	level  int
	least  int       // least length of runs; 0: no runs
	sketch *sketcher // gets all keys; may be nil

	// each is called with every segment, in order and one at a time, while others are scanned; may
	// be nil.
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

	mu    sync.Mutex // guards the fields below, and the sketch
	ready []*segment // scanned segments that each has not been called with
	first int        // index of the first of ready
	busy  bool       // a worker is calling each
}

// handOn calls each with segment i, and with later ones that are scanned already, if all before it
// are done. Only one worker does that at a time, while the others go on scanning, so that no worker
// waits for another.
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
			return err // busy stays set, so that no later segment follows a failed one
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
	found []anchor // anchors of the latest segment
	keys  []uint64 // keys of found for the sketch
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
	finderStep = 4096 // positions that a finder scans in one step
	pairsSpare = 4    // elements that pairs may write behind its last one
)

// finder finds anchors in steps, with hardly any branches, because the processor cannot predict
// where anchors are, and a mispredicted branch costs as much as dozens of positions. It is for one
// goroutine.
type finder struct {
	at [finderStep + pairsSpare]int32
}

// step returns the anchors of b among the at most finderStep positions from i on, in order, valid
// until the next call, and the next position to scan, which is i if none is left, because each
// needs windowSize bytes.
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

// pairsPortable writes to at the positions, plus base, of those among the first 64*words bytes of b
// that differ from the next byte as anchors do, and returns their number. b must have one more
// byte, and at pairsSpare more elements than there may be positions.
func pairsPortable(at []int32, b []byte, base int32, words int) int {
	const ones = 0x0101010101010101
	count := 0
	for w := range 8 * words {
		s := b[8*w : 8*w+9 : 8*w+9]
		x := (binary.LittleEndian.Uint64(s)^binary.LittleEndian.Uint64(s[1:]))&(pairMask*ones) ^
			pairDiffers*ones
		// Sets a bit for each byte that is 0. The sums do not carry into the next byte.
		for hits := ^(x + pairMask*ones) & (0x40 * ones); hits != 0; hits &= hits - 1 {
			at[count] = base + int32(8*w+bits.TrailingZeros64(hits)/8)
			count++
		}
	}
	return count
}

// An anchor is a position that depends only on the bytes there, so that equal runs have the same
// anchors at any offset. Unlike a rolling hash, it does not depend on the previous position, so any
// part of a blob can be scanned separately. It is found in two steps, because most positions have
// to be rejected in less than a cycle each. First, the byte and the next one differ in exactly
// certain bits, which is true of one in 64 pairs of random bytes, and never of two equal bytes.
// This is tested for 64 positions at once. Second, the next eight bytes as a number, multiplied by
// a constant, exceed a minimum. The first test uses two bytes because single bytes have few values
// in text and in small integers.
//
// The minimum decides how many positions are anchors: of random bytes one in 1024 with sparse
// anchors, and up to one in 64 with dense ones. Sparse anchors are dense ones too.
//
// The key of an anchor is a hash of the next 64 bytes: eight would not distinguish tensors.
const (
	pairBits    = 6
	anchorBits  = 10
	anchorEvery = 1 << anchorBits
	denseLevel  = pairBits - anchorBits // the densest anchors
	windowSize  = 64

	pairDiffers = 0x03
	pairMask    = 0x3f

	anchorFactor = 0x9E3779B97F4A7C15
)

// minProduct returns the least product of a level: 0 for sparse anchors, and one less for twice as
// many.
func minProduct(level int) uint64 {
	passed := min(level, 0) - denseLevel
	return ^uint64(0) << (64 - passed)
}

type anchor struct {
	key uint64
	at  int64
}

func product(b []byte) uint64 { return binary.LittleEndian.Uint64(b) * anchorFactor }

// keyOf hashes the window at b. Stored sketches contain keys, so changed constants need a new
// sketchVersion.
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
