package dedupe

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/bits"
)

// What differs between two variants of a blob is a header here and a table there,
// and most of that is equal too, in runs that are too short for anchors. They
// stand where one expects them: between the same neighbours. So what is missing
// between two matches is compared with what stands between them in the candidate,
// exactly, at every offset.
const (
	fillBlock = 32      // of the candidate, at multiples of it: any run of leastPiece bytes has a whole one
	fillMost  = 1 << 20 // a larger gap is something new
	fillAll   = 8 << 20 // bytes of gaps that are looked at
	fillTries = 4       // blocks that are compared at an offset
)

// fill looks into the gaps of what the candidates cover.
func (m *matcher) fill(ctx context.Context) error {
	f := &filler{matcher: m, left: fillAll}
	for i := 0; i <= len(m.covered) && f.left > 0; i++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := f.gap(i); err != nil {
			return fmt.Errorf("match: %w", err)
		}
	}
	m.stats.Compared += f.compared
	if len(f.found) > 0 {
		m.covered = m.covered.add(f.found, leastPiece)
	}
	return nil
}

type filler struct {
	*matcher
	left     int64
	compared int64
	found    []match
	gapBytes []byte
	bytes    []byte   // of the candidate
	slots    []int32  // by hash: 1 + the latest block that has it
	earlier  []int32  // by block: 1 + the one before it in the same slot
	begins   []uint64 // a bit for each product of a block's first word: most offsets have none and need no hash
	shift    int      // of such products
}

// gap looks at what is missing before the i-th match.
func (f *filler) gap(i int) error {
	at, end := int64(0), f.target.Size()
	if i > 0 {
		at = f.covered[i-1].end()
	}
	if i < len(f.covered) {
		end = f.covered[i].at
	}
	n := end - at
	if n < leastPiece || n > fillMost || n > f.left {
		return nil
	}
	f.left -= n
	f.gapBytes = resized(f.gapBytes, int(n))
	gap := f.gapBytes
	if err := readFull(f.target, gap, at); err != nil {
		return err
	}
	if i > 0 {
		before := f.covered[i-1]
		if err := f.compare(gap, at, before.source, before.from+before.length, n+n/4+leastPiece); err != nil {
			return err
		}
	}
	if i < len(f.covered) {
		behind := f.covered[i]
		length := n + n/4 + leastPiece
		// Where the gap is as long in the candidate, it has been compared.
		if i > 0 && f.covered[i-1].source == behind.source && behind.from >= f.covered[i-1].from && behind.from-(f.covered[i-1].from+f.covered[i-1].length) <= length {
			return nil
		}
		return f.compare(gap, at, behind.source, max(0, behind.from-length), min(length, behind.from))
	}
	return nil
}

// compare finds what the gap, which stands at in the target, has in common with
// n bytes of a candidate.
func (f *filler) compare(gap []byte, at int64, source int, from, n int64) error {
	src := f.candidates[source].Source
	n = min(n, src.Size()-from)
	if n < leastPiece {
		return nil
	}
	f.bytes = resized(f.bytes, int(n))
	b := f.bytes
	if err := readFull(src, b, from); err != nil {
		return &ContainerError{f.candidates[source].Digest, err}
	}
	f.compared += n
	f.index(b)
	done := 0 // of the gap
	for i := 0; i+fillBlock <= len(gap); i++ {
		if h := product(gap[i:]) >> f.shift; f.begins[h/64]>>(h%64)&1 == 0 {
			continue
		}
		k, length, back := f.longest(gap, i, done, b)
		if length < leastPiece {
			continue
		}
		f.found = append(f.found, match{at: at + int64(i-back), from: from + int64(k-back), length: int64(length), source: source})
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
	f.slots, f.earlier, f.begins = resized(f.slots, size), resized(f.earlier, n), resized(f.begins, size/4)
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

// resized returns n elements, s's own if it has room for them.
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

// longest returns the longest run around gap[i:] and a block of b.
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
