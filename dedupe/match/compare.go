package match

import (
	"bytes"
	"encoding/binary"
	"math/bits"

	"github.com/epcached/epcached/dedupe"
)

const (
	firstCompare = 1 << 10   // bytes that are read to begin with: many comparisons end there
	mostCompare  = 256 << 10 // fits a core's cache, twice
)

// comparer finds how far two runs are equal. It is one goroutine's.
type comparer struct {
	a, b     []byte
	compared int64 // bytes that were read from either side, all in all
}

// buffers returns windows of n bytes, which grow because most blobs need small ones.
func (c *comparer) buffers(n int64) (a, b []byte) {
	if int64(len(c.a)) < n {
		c.a, c.b = make([]byte, n), make([]byte, n)
	}
	return c.a[:n], c.b[:n]
}

func (c *comparer) read(a dedupe.Source, ai int64, b dedupe.Source, bi, n int64) (pa, pb []byte, err error) {
	pa, pb = c.buffers(n)
	if err := dedupe.ReadFull(a, pa, ai); err != nil {
		return nil, nil, err
	}
	c.compared += n
	return pa, pb, dedupe.ReadFull(b, pb, bi)
}

// forward returns how many bytes from a[ai:] and b[bi:] are equal, at most limit.
func (c *comparer) forward(a dedupe.Source, ai int64, b dedupe.Source, bi, limit int64) (int64, error) {
	return c.equal(a, ai, b, bi, limit, false)
}

// backward returns how many bytes before a[ai] and b[bi] are equal, at most limit.
func (c *comparer) backward(a dedupe.Source, ai int64, b dedupe.Source, bi, limit int64) (int64, error) {
	return c.equal(a, ai, b, bi, limit, true)
}

func (c *comparer) equal(a dedupe.Source, ai int64, b dedupe.Source, bi, limit int64, back bool) (int64, error) {
	done := int64(0)
	for step := int64(firstCompare); done < limit; step = min(2*step, mostCompare) {
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

// block is what is compared at once by the processor's widest instructions.
const block = 1 << 10

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
