package cas

import (
	"sync"
	"unsafe"

	"golang.org/x/sys/cpu"
	"lukechampine.com/blake3/guts"
)

// lanes is how many inputs compress16AVX512 takes side by side.
const lanes = 16

var hasAVX512 = cpu.X86.HasAVX512F

// chains has a chaining value for each chunk of a piece.
type chains [pieceSize / guts.ChunkSize][8]uint32

var allChains = sync.Pool{New: func() any { return new(chains) }}

// fullPiece is pieceNode of a piece that has all its bytes, where the processor
// has vectors of 512 bits. guts uses them too, but fetches every word of the
// message for itself, and joins the chunks of each group alone, with fewer and
// fewer lanes in use: that takes 1.8 times as long.
func fullPiece(b []byte, chunk uint64) (guts.Node, bool) {
	if !hasAVX512 {
		return guts.Node{}, false
	}
	c := allChains.Get().(*chains)
	defer allChains.Put(c)
	_ = b[pieceSize-1]
	var low [lanes]uint32
	for i := 0; i < len(c); i += lanes {
		for k := range low {
			low[k] = uint32(chunk) + uint32(i+k) // a piece begins at a multiple of its chunks: nothing is carried
		}
		compress16AVX512((*[lanes][8]uint32)(c[i:]), &b[i*guts.ChunkSize], guts.ChunkSize, guts.ChunkSize/guts.BlockSize,
			&low, uint32(chunk>>32), 0, guts.FlagChunkStart, guts.FlagChunkEnd)
	}
	low = [lanes]uint32{}
	for n := len(c) / 2; n > 1; n /= 2 {
		// Below a whole step, what stands behind the n pairs is joined as well, and nobody looks at that.
		for i := 0; i < n; i += lanes {
			compress16AVX512((*[lanes][8]uint32)(c[i:]), (*byte)(unsafe.Pointer(&c[2*i])), 2*32, 1, &low, 0, guts.FlagParent, 0, 0)
		}
	}
	return parent(c[0], c[1]), true
}

//go:noescape
func compress16AVX512(out *[lanes][8]uint32, in *byte, stride, blocks int, low *[lanes]uint32, high, flags, first, last uint32)
