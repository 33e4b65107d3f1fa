package match

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// Zeros of either sign, and now and then a copy of 400 bytes of an earlier place: no anchor
// anywhere.
func TestQuietRangesAreSearched(t *testing.T) {
	r := rand.New(rand.NewPCG(81, 0))
	b := make([]byte, 1<<20)
	for i := 3; i < len(b); i += 4 {
		b[i] = byte(r.IntN(2)) << 7
	}
	var copies []int
	for i := 1 << 19; i+400 < len(b); i += 1000 + 4*r.IntN(50) {
		copy(b[i:i+400], b[4*r.IntN(1<<16):])
		copies = append(copies, i)
	}
	_, found := nextAnchor(b, 0, minProduct(denseLevel))
	require.False(t, found)
	p := pack(t, b)
	missing := make([]int, len(b)) // 1: a literal
	for _, l := range p.literals {
		for i := l.From; i < l.From+l.Length; i++ {
			missing[i] = 1
		}
	}
	for _, at := range copies {
		n := 0
		for _, m := range missing[at : at+400] {
			n += m
		}
		// what is left at either end may be less than a window
		require.Less(t, n, 2*windowSize, "of 400 bytes at %d", at)
	}
}

// A quiet range that repeats an earlier one, behind noise, takes its bytes from there, up to the
// end of the earlier range.
func TestQuietRangesAreComparedWithEachOther(t *testing.T) {
	r := rand.New(rand.NewPCG(82, 0))
	still := func(n int) []byte {
		b := make([]byte, n)
		for i := 3; i < len(b); i += 4 {
			b[i] = byte(r.IntN(2)) << 7
		}
		return b
	}
	first, second, own := still(40<<10), still(30<<10), still(20<<10)
	b := bytes.Join([][]byte{
		first, randomBytes(161, 9000), second, randomBytes(162, 5004),
		// up to the end of a range
		own, first[8<<10 : 30<<10], own[:10<<10], second[len(second)-8<<10:],
		randomBytes(163, 3000),
		second[:20<<10], first[len(first)-4<<10:], own[4<<10 : 8<<10],
	}, nil)
	p := pack(t, b)
	again := int64(22<<10 + 10<<10 + 8<<10 + 20<<10 + 4<<10 + 4<<10)
	require.Less(t, p.LiteralSize(), int64(len(b))-again+8*2*windowSize)
}

// Ranges stand beside each other while they are searched, and not in the blob: nothing is found
// over the seam of two.
func TestMatchesEndAtTheSeamOfQuietRanges(t *testing.T) {
	first, second, between := randomBytes(165, 4096), randomBytes(166, 4096), randomBytes(167, 1000)
	third := bytes.Join([][]byte{first[2048:], second[:2048]}, nil)
	fourth := bytes.Join([][]byte{[]byte("four"), first[4096-32:], second[:128]}, nil)
	var q quietRanges
	var blob []byte
	for _, r := range [][]byte{first, second, third, fourth} {
		blob = append(append(blob, r...), between...)
	}
	at := int64(0)
	for _, r := range [][]byte{first, second, third, fourth} {
		require.NoError(t, q.add(source(blob), at, at+int64(len(r))))
		at += int64(len(r) + len(between))
	}
	bytesFound := int64(0)
	for _, m := range q.search() {
		require.True(t, bytes.Equal(blob[m.at:m.end()], blob[m.from:m.from+m.length]), "%+v", m)
		bytesFound += m.length
	}
	require.EqualValues(t, len(third)+128, bytesFound)
}
