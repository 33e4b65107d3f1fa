package dedupe

import (
	"context"
	"math"
	"runtime"
	"sort"
	"sync"
)

const (
	streamSize  = 8 << 20   // of a candidate that one core goes through at a time
	streamRead  = 32 << 10  // read at first where nothing is known
	streamMost  = 256 << 10 // and at most
	lookAhead   = 1 << 10   // how far behind a difference the same distance is tried
	againEvery  = 64        // equal bytes that make it worth another extent
	overSeam    = 64 << 10  // how far a match goes on into the parts beside its own: it may have no anchor there
	spareWork   = 4 << 20   // bytes compared in vain that a part may cost besides
	workPerByte = 4         // and for each byte of it
)

// stream goes through one candidate. Where an anchor of it stands in the target
// too, the bytes are compared both ways as far as they are equal, and it goes on
// behind them: each byte of a candidate is scanned or compared, not both.
type stream struct {
	target    Source
	candidate Source
	index     int // of the candidate
	table     *table
	covered   cover  // by the candidates before; read only
	mask      uint64 // of keys
	least     uint64 // product of an anchor
	floor     int64
	taken     []match // ranges of the candidate that are compared already, in order
}

// all returns what was found, on all cores. Parts are cut at fixed offsets and
// know nothing of each other, so the result is always the same.
func (s *stream) all(ctx context.Context, stats *Stats) ([]match, error) {
	parts := int((s.candidate.Size() + streamSize - 1) / streamSize)
	found := make([][]match, parts)
	var (
		mu    sync.Mutex // guards next, first and stats
		next  int
		first error
		wg    sync.WaitGroup
	)
	for range min(runtime.GOMAXPROCS(0), parts) {
		wg.Go(func() {
			p := &part{stream: s, buf: make([]byte, streamMost+windowSize)}
			for {
				mu.Lock()
				i := next
				next++
				stop := first != nil || i >= parts
				mu.Unlock()
				if stop {
					break
				}
				list, err := p.run(ctx, int64(i)*streamSize)
				found[i] = list
				if err != nil {
					mu.Lock()
					first = err
					mu.Unlock()
				}
			}
			mu.Lock()
			stats.Scanned += p.scanned
			stats.Compared += p.compared
			mu.Unlock()
		})
	}
	wg.Wait()
	var flat []match
	for _, list := range found {
		flat = append(flat, list...)
	}
	return flat, first
}

// part is a range of a candidate, and what one goroutine needs for it.
type part struct {
	*stream
	comparer
	finder
	buf     []byte
	scanned int64

	end   int64 // of the range
	limit int64 // of matches: a little behind it
	last  int64 // the end of the latest match, or where the first may begin
	spare int64 // bytes that may still be compared in vain
	found []match

	anchors []anchor // of the latest step
	places  []int64  // of the latest anchor in the target
	warm    uint64   // nothing; see table.touch
}

func (p *part) run(ctx context.Context, from int64) ([]match, error) {
	p.end = min(from+streamSize, p.candidate.Size())
	p.limit = min(p.end+overSeam, p.candidate.Size())
	p.last, p.spare, p.found = max(from-overSeam, 0), spareWork+workPerByte*(p.end-from), nil
	read := int64(streamRead)
	for pos := from; pos < p.end; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		n := min(read, p.end-pos)
		if next, left := p.beyond(pos); left == 0 {
			pos, read = next, streamRead
			continue
		} else {
			n = min(n, left)
		}
		b := p.buf[:min(n+windowSize-1, p.candidate.Size()-pos)]
		if err := readFull(p.candidate, b, pos); err != nil {
			return nil, err
		}
		next, err := p.window(b, pos, n)
		if err != nil {
			return nil, err
		}
		if next > pos+n {
			read = streamRead // behind a match
		} else {
			read = min(2*read, streamMost)
		}
		pos = next
	}
	return p.found, nil
}

// beyond returns where to go on behind the range that pos lies in, if it is
// compared already; else how far it is to the next such range. Windows that begin
// in one and end behind it are scanned.
func (p *part) beyond(pos int64) (next, left int64) {
	i := sort.Search(len(p.taken), func(i int) bool { return p.taken[i].end()-windowSize+1 > pos })
	if i == len(p.taken) {
		return pos, math.MaxInt64
	}
	if left = p.taken[i].at - pos; left <= 0 {
		return p.taken[i].end() - windowSize + 1, 0
	}
	return pos, left
}

// again looks with some anchors of what the guide has found in the target whether
// it stands there once more, and is not found.
func (s *stream) again(ctx context.Context, marks []anchor, stats *Stats) ([]match, error) {
	p := &part{stream: s, limit: s.candidate.Size(), spare: spareWork + workPerByte*s.covered.bytes()}
	defer func() { stats.Compared += p.compared }()
	for _, m := range s.covered {
		if m.source != s.index {
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		p.last = max(m.from-overSeam, 0)
		after := m.from
		for ; len(marks) > 0 && marks[0].at < m.end(); marks = marks[1:] {
			c := m.from + marks[0].at - m.at
			if marks[0].at < m.at || c < after || p.spare <= 0 {
				continue
			}
			p.places = p.table.lookup(marks[0].key, p.places[:0])
			end, err := p.try(c, p.places)
			if err != nil {
				return nil, err
			}
			after = max(c+1, end)
		}
	}
	return p.found, nil
}

// window goes through the n bytes at pos, and returns where to go on.
func (p *part) window(b []byte, pos, n int64) (int64, error) {
	after := pos // what stands before is part of a match
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
			p.places = p.table.lookup(a.key, p.places[:0])
			end, err := p.try(a.at, p.places)
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

// try compares the candidate at c with the target at each place, and returns
// the end of the longest match, or c.
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
	return p.last, p.goOn(longest)
}

// goOn looks behind the end of a match whether the bytes are the same again a
// little later at the same distance: what differs may be a few addresses in a
// table, or one changed row. That needs no anchor.
func (p *part) goOn(m match) error {
	for {
		t, c := m.at+m.length, m.from+m.length
		n := min(lookAhead, p.target.Size()-t, p.limit-c)
		if n < againEvery {
			return nil
		}
		before := p.compared
		a, b, err := p.read(p.target, t, p.candidate, c, n)
		if err != nil {
			return err
		}
		skip := equalAgain(a, b)
		if skip < 0 {
			p.spare -= p.compared - before
			return nil
		}
		t, c = t+int64(skip), c+int64(skip)
		length, err := p.forward(p.target, t, p.candidate, c, min(p.target.Size()-t, p.limit-c))
		if err != nil {
			return err
		}
		m = match{at: t, from: c, length: length, source: p.index}
		if !p.covered.has(t) {
			p.found = append(p.found, m)
		}
		p.last = c + length
	}
}

// equalAgain returns where the first againEvery equal bytes begin, or -1.
func equalAgain(a, b []byte) int {
	run := 0
	for i := range a {
		if a[i] != b[i] {
			run = 0
			continue
		}
		if run++; run == againEvery {
			return i + 1 - run
		}
	}
	return -1
}
