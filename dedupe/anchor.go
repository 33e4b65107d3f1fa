package dedupe

import (
	"encoding/binary"
	"math/bits"
)

// An anchor is a position that the bytes themselves choose, so that equal runs
// have the same anchors at whatever offset they stand. A position is one if the
// eight bytes there, times a constant, are among the highest products: one in
// 1024 of positions with random bytes, and none in a run of zeros. Unlike a
// rolled hash this needs nothing of the position before, so the processor works
// on many positions at a time, and any part of a blob can be looked at alone.
//
// What is compared and kept is the anchor's key, a hash of the window of 64 bytes
// that begins there: eight bytes are too few to tell tensors apart.
const (
	anchorBits  = 10
	anchorEvery = 1 << anchorBits
	windowSize  = 64

	anchorFactor = 0x9E3779B97F4A7C15
	anchorLimit  = (1<<anchorBits - 1) << (64 - anchorBits)
)

// anchor is a position with its key.
type anchor struct {
	key uint64
	at  int64
}

// nextAnchor returns the first anchor of b at i or later, or the first position
// that is not looked at: b[i:] has to have windowSize bytes for each.
func nextAnchor(b []byte, i int) (at int, found bool) {
	end := len(b) - windowSize + 1
	for ; i+8 <= end; i += 8 {
		s := b[i : i+16 : i+16]
		if binary.LittleEndian.Uint64(s[0:])*anchorFactor >= anchorLimit {
			return i, true
		}
		if binary.LittleEndian.Uint64(s[1:])*anchorFactor >= anchorLimit {
			return i + 1, true
		}
		if binary.LittleEndian.Uint64(s[2:])*anchorFactor >= anchorLimit {
			return i + 2, true
		}
		if binary.LittleEndian.Uint64(s[3:])*anchorFactor >= anchorLimit {
			return i + 3, true
		}
		if binary.LittleEndian.Uint64(s[4:])*anchorFactor >= anchorLimit {
			return i + 4, true
		}
		if binary.LittleEndian.Uint64(s[5:])*anchorFactor >= anchorLimit {
			return i + 5, true
		}
		if binary.LittleEndian.Uint64(s[6:])*anchorFactor >= anchorLimit {
			return i + 6, true
		}
		if binary.LittleEndian.Uint64(s[7:])*anchorFactor >= anchorLimit {
			return i + 7, true
		}
	}
	for ; i < end; i++ {
		if binary.LittleEndian.Uint64(b[i:])*anchorFactor >= anchorLimit {
			return i, true
		}
	}
	return max(i, 0), false
}

// keyOf hashes the window at the beginning of b. Its values are in every sketch
// that is stored: other constants are another format.
func keyOf(b []byte) uint64 {
	b = b[:windowSize:windowSize]
	var h uint64
	for i := 0; i < windowSize; i += 16 {
		hi, lo := bits.Mul64(binary.LittleEndian.Uint64(b[i:])^h^0xA0761D6478BD642F, binary.LittleEndian.Uint64(b[i+8:])^0xE7037ED1A0B428DB)
		h = hi ^ lo + h
	}
	hi, lo := bits.Mul64(h^0x8EBC6AF09C88C6E3, 0x589965CC75374CC3)
	return hi ^ lo
}
