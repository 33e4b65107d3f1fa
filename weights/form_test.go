package weights

import (
	"bytes"
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/epmodel"
)

// valueOf is what a float16 means.
func valueOf(h uint16) float64 {
	sign, exponent, fraction := 1.0, int(h>>10&31), float64(h&0x3ff)
	if h&0x8000 != 0 {
		sign = -1
	}
	if exponent == 0 {
		return sign * math.Ldexp(fraction, -24)
	}
	return sign * math.Ldexp(1024+fraction, exponent-25)
}

// Every float16 is itself; what lies between two becomes the nearer, and in the middle the even one.
func TestHalf(t *testing.T) {
	as := func(x float64) uint16 { return half(math.Float32bits(float32(x))) }
	for h := uint16(0); h < 0x7bff; h++ {
		x, next := valueOf(h), valueOf(h+1)
		middle := (x + next) / 2
		require.Equal(t, h, as(x))
		require.Equal(t, h|0x8000, as(-x)|0x8000)
		require.Equal(t, h+h&1, as(middle), "%g", middle)
		require.Equal(t, h, as(float64(math.Nextafter32(float32(middle), 0))), "%g", middle)
		require.Equal(t, h+1, as(float64(math.Nextafter32(float32(middle), 1e6))), "%g", middle)
	}
	for x, want := range map[float64]uint16{65519: 0x7bff, 65520: 0x7c00, 1e30: 0x7c00, math.Inf(-1): 0xfc00, math.NaN(): 0x7e00, 1e-30: 0} {
		require.Equal(t, want, as(x), "%g", x)
	}
}

// A binary that was made to have everything hashed in vain is left before that takes long.
func TestHashingInVainIsBounded(t *testing.T) {
	beginning := []byte("0123456789abcdef")
	data := bytes.Repeat(append(beginning, make([]byte, 4096-16)...), 64)
	for i := range 64 {
		data[i*4096+4095] = byte(i)
	}
	m := epmodel.Model{Size: int64(len(data)), Initializers: []epmodel.Initializer{{Name: "a", Length: int64(len(data))}}}
	many := append(data, bytes.Repeat([]byte{1}, 1<<20)...) // so that units have 4 KiB
	m.Size, m.Initializers[0].Length = int64(len(many)), int64(len(many))
	x, err := NewIndex(context.Background(), Model{Model: &m, Graph: bytes.NewReader(many)})
	require.NoError(t, err)
	bin := bytes.Repeat(beginning, 1<<16)
	s := &search{Index: x, left: 1}
	s.window(bin, 0, true)
	require.LessOrEqual(t, s.left, int64(0))
	require.Greater(t, s.left, int64(-maxSame*4096), "few are tried for one beginning")
	out, err := x.Find(context.Background(), bytes.NewReader(bin), epmodel.Range{Length: int64(len(bin))})
	require.NoError(t, err)
	require.Empty(t, out)
}
