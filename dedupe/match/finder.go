package match

import (
	"encoding/binary"
	"math/bits"
)

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
		x := (binary.LittleEndian.Uint64(s)^binary.LittleEndian.Uint64(s[1:]))&(pairMask*ones) ^ pairDiffers*ones
		// A bit in each byte that is 0; none of the sums is carried.
		for hits := ^(x + pairMask*ones) & (0x40 * ones); hits != 0; hits &= hits - 1 {
			at[count] = base + int32(8*w+bits.TrailingZeros64(hits)/8)
			count++
		}
	}
	return count
}
