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

// Two variants of a blob differ in headers and tables, most of which are equal too, in runs that
// are too short for anchors. These runs are between the same neighbours in both. Therefore the
// bytes missing between two matches are compared, exactly and at every offset, with the bytes
// between these matches in the candidate.
const (
	// fillBlock is the size of aligned blocks of the candidate. Any run of minPiece bytes contains
	// a whole one.
	fillBlock    = 32
	maxFillGap   = 1 << 20 // larger gaps are probably new bytes
	maxFillBytes = 8 << 20 // total bytes of gaps that are compared
	fillTries    = 4       // blocks that are compared at an offset
)

const fillBatch = 64 // gaps that a core takes at a time; results are in the order of gaps

type gap struct {
	i       int
	at, end int64
}

func (m *matcher) gaps(left int64) (all []gap) {
	for i := 0; i <= len(m.covered) && left > 0; i++ {
		g := gap{i: i, end: m.target.Size()}
		if i > 0 {
			g.at = m.covered[i-1].end()
		}
		if i < len(m.covered) {
			g.end = m.covered[i].at
		}
		if n := g.end - g.at; n >= minPiece && n <= maxFillGap && n <= left {
			left -= n
			all = append(all, g)
		}
	}
	return all
}

func (m *matcher) fill(ctx context.Context) error {
	all := slices.Collect(slices.Chunk(m.gaps(maxFillBytes), fillBatch))
	found := make([][]match, len(all))
	begin := func() *filler { return &filler{matcher: m} }
	batch := func(f *filler, i int) error {
		for _, g := range all[i] {
			if err := f.gap(g); err != nil {
				return err
			}
		}
		found[i], f.found = f.found, nil
		return nil
	}
	err := parallel.Do(ctx, len(all), begin, batch,
		func(f *filler) { m.stats.compared += f.compared })
	if more := slices.Concat(found...); err == nil && len(more) > 0 {
		m.covered = m.covered.add(more, minPiece)
	}
	return err
}

type filler struct {
	*matcher
	compared int64
	found    []match
	gapBytes []byte
	bytes    []byte  // of the candidate
	slots    []int32 // by hash: 1 + the latest block that has it
	earlier  []int32 // by block: 1 + the previous block in the same slot
	// begins has a bit for each product of a block's first word. Most offsets of the gap match no
	// bit, and so need no hash.
	begins []uint64
	shift  int // of such products
}

func (f *filler) gap(g gap) error {
	i, n := g.i, g.end-g.at
	f.gapBytes = resized(f.gapBytes, int(n))
	gap := f.gapBytes
	if err := dedupe.ReadFull(f.target, gap, g.at); err != nil {
		return err
	}
	if i > 0 {
		before := f.covered[i-1]
		if err := f.compare(gap, g.at, before.source, before.from+before.length,
			n+n/4+minPiece); err != nil {
			return err
		}
	}
	if i < len(f.covered) {
		behind := f.covered[i]
		length := n + n/4 + minPiece
		// If the gap has the same length in the candidate, it was compared already.
		if i > 0 && f.covered[i-1].source == behind.source && behind.from >= f.covered[i-1].from &&
			behind.from-(f.covered[i-1].from+f.covered[i-1].length) <= length {
			return nil
		}
		return f.compare(gap, g.at, behind.source, max(0, behind.from-length),
			min(length, behind.from))
	}
	return nil
}

// compare finds equal runs of the gap at that offset and n bytes of a candidate.
func (f *filler) compare(gap []byte, at int64, source int, from, n int64) error {
	src := f.candidates[source].Source
	n = min(n, src.Size()-from)
	if n < minPiece {
		return nil
	}
	f.bytes = resized(f.bytes, int(n))
	b := f.bytes
	if err := dedupe.ReadFull(src, b, from); err != nil {
		return &dedupe.BaseError{Digest: f.candidates[source].Digest, Err: err}
	}
	f.compared += n
	f.index(b)
	done := 0 // bytes of the gap that are done
	for i := 0; i+fillBlock <= len(gap); i++ {
		if h := product(gap[i:]) >> f.shift; f.begins[h/64]>>(h%64)&1 == 0 {
			continue
		}
		k, length, back := f.longest(gap, i, done, b)
		if length < minPiece {
			continue
		}
		f.found = append(f.found,
			match{at: at + int64(i-back), from: from + int64(k-back), length: int64(length),
				source: source})
		done = i - back + length
		i = done - 1
	}
	return nil
}

func (f *filler) index(b []byte) {
	n := len(b) / fillBlock
	size := 16
	for size < 2*n {
		size *= 2
	}
	f.slots, f.earlier, f.begins = resized(f.slots, size), resized(f.earlier, n),
		resized(f.begins, size/4)
	clear(f.slots)
	clear(f.begins)
	f.shift = 64 - bits.TrailingZeros(uint(16*size))
	for k := range n {
		block := b[k*fillBlock:]
		slot := f.slot(block)
		f.earlier[k], *slot = *slot, int32(k+1)
		h := product(block) >> f.shift
		f.begins[h/64] |= 1 << (h % 64)
	}
}

func resized[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}

func (f *filler) slot(b []byte) *int32 {
	b = b[:fillBlock:fillBlock]
	h := binary.LittleEndian.Uint64(b)
	for i := 8; i < fillBlock; i += 8 {
		h = (h ^ h>>32) * anchorFactor
		h ^= binary.LittleEndian.Uint64(b[i:])
	}
	h = (h ^ h>>32) * anchorFactor
	return &f.slots[h>>32&uint64(len(f.slots)-1)]
}

func (f *filler) longest(gap []byte, i, done int, b []byte) (at, length, back int) {
	k := *f.slot(gap[i:])
	for range fillTries {
		if k == 0 {
			break
		}
		p := int(k-1) * fillBlock
		k = f.earlier[k-1]
		if !bytes.Equal(b[p:p+fillBlock], gap[i:i+fillBlock]) {
			continue
		}
		ahead := min(len(gap)-i, len(b)-p)
		ahead = commonPrefix(gap[i:i+ahead], b[p:p+ahead])
		behind := min(i-done, p)
		behind = commonSuffix(gap[i-behind:i], b[p-behind:p])
		if ahead+behind > length {
			at, length, back = p, ahead+behind, behind
		}
	}
	return at, length, back
}
