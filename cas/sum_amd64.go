package cas

import (
	"sync"
	"unsafe"

	"golang.org/x/sys/cpu"
	"lukechampine.com/blake3/guts"
)

const maxLanes = 16

// lanes is how many this processor compresses side by side: 16 with AVX-512, 8 with AVX2, else 0.
var lanes = func() int {
	switch {
	case cpu.X86.HasAVX512F:
		return 16
	case cpu.X86.HasAVX2:
		return 8
	}
	return 0
}()

// chains has a chaining value for each chunk of a piece.
type chains [pieceSize / guts.ChunkSize][8]uint32

var allChains = sync.Pool{New: func() any { return new(chains) }}

// fullPiece is pieceNode of a piece that has all its bytes, where the processor
// has vectors. guts uses them too, but fetches every word of the message for
// itself, and joins the chunks of each group alone, with fewer and fewer lanes in
// use: that takes 1.8 times as long with AVX-512, and more than twice with AVX2.
func fullPiece(b []byte, chunk uint64) (guts.Node, bool) {
	if lanes == 0 {
		return guts.Node{}, false
	}
	return fullPieceOf(lanes, b, chunk), true
}

func fullPieceOf(lanes int, b []byte, chunk uint64) guts.Node {
	c := allChains.Get().(*chains)
	defer allChains.Put(c)
	_ = b[pieceSize-1]
	var low [maxLanes]uint32
	for i := 0; i < len(c); i += lanes {
		for k := range low {
			// a piece begins at a multiple of its chunks: nothing is carried
			low[k] = uint32(chunk) + uint32(i+k)
		}
		compress(lanes, inputs{
			out: &c[i], in: &b[i*guts.ChunkSize], stride: guts.ChunkSize,
			blocks: guts.ChunkSize / guts.BlockSize, low: &low, high: uint32(chunk >> 32),
			first: guts.FlagChunkStart, last: guts.FlagChunkEnd,
		})
	}
	low = [maxLanes]uint32{}
	for n := len(c) / 2; n > 1; n /= 2 {
		// Below a whole step, bytes behind the n pairs are joined too, and the result is ignored.
		for i := 0; i < n; i += lanes {
			in := (*byte)(unsafe.Pointer(&c[2*i]))
			compress(lanes,
				inputs{out: &c[i], in: in, stride: 2 * 32, blocks: 1, low: &low,
					flags: guts.FlagParent})
		}
	}
	return parent(c[0], c[1])
}

// inputs is an input for each lane. The assembly reads it from the stack as it is laid out here.
type inputs struct {
	out    *[8]uint32 // the first of as many chaining values
	in     *byte      // the first input; the next ones follow in steps of stride
	stride int
	blocks int // of each input

	low                *[maxLanes]uint32 // counters, with high
	high               uint32
	flags, first, last uint32
}

func compress(lanes int, a inputs) {
	if lanes == 16 {
		compress16AVX512(a)
		return
	}
	compress8AVX2(a)
}

//go:noescape
func compress16AVX512(a inputs)

//go:noescape
func compress8AVX2(a inputs)
