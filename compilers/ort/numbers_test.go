package ort_test

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/ort"
)

// every type's numbers, against what the standard and Go's own conversions say
func TestNumbersOfEveryType(t *testing.T) {
	le := binary.LittleEndian
	minus := int64(-3)
	for name, c := range map[string]struct {
		kind  int32
		bytes []byte
		want  float64
	}{
		"float":          {ort.Float, le.AppendUint32(nil, math.Float32bits(-1.5)), -1.5},
		"double":         {ort.Double, le.AppendUint64(nil, math.Float64bits(1e300)), 1e300},
		"half one":       {ort.Float16, le.AppendUint16(nil, 0x3c00), 1},
		"half smallest":  {ort.Float16, le.AppendUint16(nil, 0x0001), math.Ldexp(1, -24)},
		"half largest":   {ort.Float16, le.AppendUint16(nil, 0x7bff), 65504},
		"half minus two": {ort.Float16, le.AppendUint16(nil, 0xc000), -2},
		"half infinite":  {ort.Float16, le.AppendUint16(nil, 0xfc00), math.Inf(-1)},
		"bfloat one":     {ort.Bfloat16, le.AppendUint16(nil, 0x3f80), 1},
		"bool":           {ort.Bool, []byte{1}, 1},
		"uint8":          {ort.Uint8, []byte{200}, 200},
		"int8":           {ort.Int8, []byte{byte(minus & 0xff)}, -3},
		"uint16":         {ort.Uint16, le.AppendUint16(nil, 65535), 65535},
		"int16":          {ort.Int16, le.AppendUint16(nil, uint16(minus&0xffff)), -3},
		"uint32":         {ort.Uint32, le.AppendUint32(nil, math.MaxUint32), math.MaxUint32},
		"int32":          {ort.Int32, le.AppendUint32(nil, uint32(minus&0xffffffff)), -3},
		"uint64":         {ort.Uint64, le.AppendUint64(nil, 1<<60), 1 << 60},
		"int64":          {ort.Int64, le.AppendUint64(nil, uint64(minus)), -3},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, ort.Number(c.bytes, c.kind))
			require.EqualValues(t, len(c.bytes), ort.ElementSizes[c.kind])
		})
	}
	require.True(t, math.IsNaN(ort.Number(le.AppendUint16(nil, 0x7e00), ort.Float16)))
}
