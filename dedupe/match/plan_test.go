package match

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/dedupe"
)

// Literals are the same wherever they are read from and however many stand close together.
func TestLiteralsFromAnyOffset(t *testing.T) {
	target := randomBytes(124, 400<<10)
	lengths := randomBytes(125, 2000)
	var ranges []dedupe.Extent
	var want []byte
	at := int64(0)
	for i := 0; i+1 < len(lengths); i += 2 {
		gap, n := 1+int64(lengths[i]), 1+int64(lengths[i+1])
		if i%400 == 0 {
			gap, n = 3<<10, 20<<10 // a long one, apart
		}
		at += gap
		if at+n > int64(len(target)) {
			break
		}
		ranges = append(ranges, dedupe.Extent{At: int64(len(want)), From: at, Length: n})
		want = append(want, target[at:at+n]...)
		at += n
	}
	l := (&Plan{literals: ranges}).Literals(source(target))
	require.Equal(t, int64(len(want)), l.Size())
	got := make([]byte, len(want))
	require.NoError(t, dedupe.ReadFull(l, got, 0))
	require.Equal(t, want, got)
	for _, n := range []int{1, 7, 300, 30 << 10} {
		for off := 0; off < len(want); off += max(97, n/3) {
			k, err := l.ReadAt(got[:n], int64(off))
			require.Equal(t, min(n, len(want)-off), k)
			require.Equal(t, want[off:off+k], got[:k], "%d bytes from %d on", n, off)
			if k < n {
				require.ErrorIs(t, err, io.EOF)
			}
		}
	}
}
