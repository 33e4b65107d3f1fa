package match

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/epcached/epcached/dedupe"
	"github.com/epcached/epcached/internal/parallel"
)

const (
	streamSize = 8 << 20   // part of a candidate that one core scans at a time
	streamRead = 32 << 10  // size of the first read
	maxStreams = 256 << 10 // size of the largest read
	// overSeam is how far a match may extend into neighbouring parts, where it may have no anchor.
	overSeam    = 64 << 10
	spareWork   = 4 << 20 // fixed bound of bytes that a part may compare in vain
	workPerByte = 4       // and the bound for each byte of the part
)

// worthReading is the divisor for the part of a large candidate that must be usable for it to be
// read.
const worthReading = 4096

// candidate scans the i-th candidate on all cores. At an anchor that the target has too, it
// compares the bytes in both directions as far as they are equal, and continues after them, so that
// each byte is scanned or compared, not both. Parts have fixed offsets and are independent, so the
// result is always the same.
func (m *matcher) candidate(ctx context.Context, i int) error {
	c := m.candidates[i].Source
	missing := m.target.Size() - m.covered.bytes()
	if missing < m.floor || missing < c.Size()/worthReading {
		return nil
	}
	found := make([][]match, (c.Size()+streamSize-1)/streamSize)
	begin := func() *part {
		return &part{matcher: m, candidate: c, index: i, mask: 1<<max(m.level, 0) - 1,
			least: minProduct(m.level), buf: make([]byte, maxStreams+windowSize)}
	}
	run := func(p *part, k int) (err error) {
		found[k], err = p.run(int64(k) * streamSize)
		return err
	}
	err := parallel.Do(ctx, len(found), begin, run, func(p *part) {
		m.stats.scanned += p.scanned
		m.stats.compared += p.compared
	})
	if err == nil {
		m.covered = m.covered.add(slices.Concat(found...), minPiece)
	}
	return err
}

// part is a range of a candidate, with the state of the goroutine that scans it. It only reads the
// matcher.
type part struct {
	*matcher
	comparer
	finder
	candidate dedupe.Source
	index     int    // index of the candidate
	mask      uint64 // mask of keys
	least     uint64 // least product of an anchor
	buf       []byte
	scanned   int64

	end   int64 // end of the range
	limit int64 // end of matches, somewhat after end
	last  int64 // end of the latest match, or least begin of the first
	spare int64 // bytes that may still be compared in vain
	found []match

	anchors        []anchor // anchors of the latest step
	matchPositions []int64  // positions of the latest anchor in the target
	warm           uint64   // nothing; see table.touch
}

func (p *part) run(from int64) ([]match, error) {
	p.end = min(from+streamSize, p.candidate.Size())
	p.limit = min(p.end+overSeam, p.candidate.Size())
	p.last, p.spare, p.found = max(from-overSeam, 0), spareWork+workPerByte*(p.end-from), nil
	read := int64(streamRead)
	for pos := from; pos < p.end; {
		n := min(read, p.end-pos)
		b := p.buf[:min(n+windowSize-1, p.candidate.Size()-pos)]
		if err := dedupe.ReadFull(p.candidate, b, pos); err != nil {
			return nil, err
		}
		next, err := p.window(b, pos, n)
		if err != nil {
			return nil, err
		}
		if next > pos+n {
			read = streamRead // jumped over a match: read the next bytes in large pieces
		} else {
			read = min(2*read, maxStreams)
		}
		pos = next
	}
	return p.found, nil
}

func (p *part) window(b []byte, pos, n int64) (int64, error) {
	after := pos // the bytes before belong to a match
	for i := 0; ; {
		found, next := p.step(b, i, p.least)
		p.scanned += int64(next - i)
		if next == i || p.spare <= 0 {
			return pos + n, nil
		}
		i = next
		p.anchors = p.anchors[:0]
		for _, at := range found {
			if key := keyOf(b[at:]); key&p.mask == 0 {
				p.anchors = append(p.anchors, anchor{key, pos + int64(at)})
			}
		}
		p.warm |= p.table.touch(p.anchors)
		for _, a := range p.anchors {
			if a.at < after {
				continue
			}
			p.matchPositions = p.table.lookup(a.key, p.matchPositions[:0])
			end, err := p.try(a.at, p.matchPositions)
			if err != nil {
				return 0, err
			}
			if end >= pos+n {
				return end, nil
			}
			after = max(a.at+1, end)
		}
		i = max(i, int(after-pos))
	}
}

// try compares c with the target at each place, and returns the end of the longest match, or c.
func (p *part) try(c int64, places []int64) (int64, error) {
	var longest match
	lower := p.last
	for _, t := range places {
		if p.covered.has(t) {
			continue
		}
		before := p.compared
		ahead, err := p.forward(p.target, t, p.candidate, c, min(p.target.Size()-t, p.limit-c))
		if err != nil {
			return 0, err
		}
		back, err := p.backward(p.target, t, p.candidate, c, min(t, c-lower))
		if err != nil {
			return 0, err
		}
		m := match{at: t - back, from: c - back, length: back + ahead, source: p.index}
		if m.length < p.floor {
			p.spare -= p.compared - before
			continue
		}
		p.found = append(p.found, m)
		if m.length > longest.length {
			longest = m
		}
	}
	if longest.length == 0 {
		return c, nil
	}
	p.last = longest.from + longest.length
	return p.last, nil
}

const (
	firstCompare = 1 << 10   // first read, because many comparisons end there
	maxCompare   = 256 << 10 // fits a core's cache, twice
)

type comparer struct {
	a, b     []byte
	compared int64 // total bytes that were read from each side
}

func (c *comparer) read(a dedupe.Source, ai int64, b dedupe.Source, bi, n int64) (pa, pb []byte,
	err error) {
	if int64(len(c.a)) < n { // they grow, because most blobs need small ones
		c.a, c.b = make([]byte, n), make([]byte, n)
	}
	pa, pb = c.a[:n], c.b[:n]
	if err := dedupe.ReadFull(a, pa, ai); err != nil {
		return nil, nil, err
	}
	c.compared += n
	return pa, pb, dedupe.ReadFull(b, pb, bi)
}

// forward returns how many bytes from a[ai:] and b[bi:] are equal, at most limit.
func (c *comparer) forward(a dedupe.Source, ai int64, b dedupe.Source, bi, limit int64) (int64,
	error) {
	return c.equal(a, ai, b, bi, limit, false)
}

// backward returns how many bytes before a[ai] and b[bi] are equal, at most limit.
func (c *comparer) backward(a dedupe.Source, ai int64, b dedupe.Source, bi, limit int64) (int64,
	error) {
	return c.equal(a, ai, b, bi, limit, true)
}

func (c *comparer) equal(a dedupe.Source, ai int64, b dedupe.Source, bi, limit int64,
	back bool) (int64, error) {
	done := int64(0)
	for step := int64(firstCompare); done < limit; step = min(2*step, maxCompare) {
		n := min(step, limit-done)
		off, common := done, commonPrefix
		if back {
			off, common = -done-n, commonSuffix
		}
		pa, pb, err := c.read(a, ai+off, b, bi+off, n)
		if err != nil {
			return 0, err
		}
		k := int64(common(pa, pb))
		done += k
		if k < n {
			break
		}
	}
	return done, nil
}

const block = 1 << 10 // bytes compared by one call of bytes.Equal

func commonPrefix(a, b []byte) int {
	b = b[:len(a)]
	i := 0
	for i+block <= len(a) && bytes.Equal(a[i:i+block], b[i:i+block]) {
		i += block
	}
	for ; i+8 <= len(a); i += 8 {
		if x := binary.LittleEndian.Uint64(a[i:]) ^ binary.LittleEndian.Uint64(b[i:]); x != 0 {
			return i + bits.TrailingZeros64(x)/8
		}
	}
	for i < len(a) && a[i] == b[i] {
		i++
	}
	return i
}

func commonSuffix(a, b []byte) int {
	b = b[:len(a)]
	n := len(a)
	for n >= block && bytes.Equal(a[n-block:n], b[n-block:n]) {
		n -= block
	}
	for ; n >= 8; n -= 8 {
		if x := binary.LittleEndian.Uint64(a[n-8:]) ^ binary.LittleEndian.Uint64(b[n-8:]); x != 0 {
			return len(a) - n + bits.LeadingZeros64(x)/8
		}
	}
	for n > 0 && a[n-1] == b[n-1] {
		n--
	}
	return len(a) - n
}
