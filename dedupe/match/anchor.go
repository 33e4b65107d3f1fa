package match

import (
	"encoding/binary"
	"math/bits"
)

// An anchor is a position that the bytes themselves choose, so that equal runs have the same
// anchors at whatever offset they stand. Unlike a rolled hash this needs nothing of the position
// before, so any part of a blob can be looked at alone. It takes two steps, for most positions have
// to be passed in less than a processor's cycle each: a byte and the one behind it differ in
// certain bits, as one in 64 pairs of random bytes do and no two equal ones, which is tried on 64
// positions at once; and the eight bytes there, times a constant, are among the highest products.
// Of two bytes, since one alone has few values in text, and favours some in small integers.
//
// How many positions are anchors is a matter of the least product. With sparse ones it is one in
// 1024 with random bytes, with dense ones up to one in 64; sparse anchors are dense ones too.
//
// What is compared and kept is the anchor's key, a hash of the window of 64 bytes
// that begins there: eight bytes are too few to tell tensors apart.
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

// leastProduct is that of a level: 0 for sparse anchors, one less for twice as
// many. Levels above 0 have a mask for keys besides.
func leastProduct(level int) uint64 {
	passed := min(level, 0) - denseLevel
	return ^uint64(0) << (64 - passed)
}

type anchor struct {
	key uint64
	at  int64
}

func product(b []byte) uint64 { return binary.LittleEndian.Uint64(b) * anchorFactor }

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
