//go:build linux && (amd64 || arm64)

package main

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/compilers/ort"
)

func floats(name string, values ...float32) ort.Tensor {
	t := ort.Tensor{Name: name, Type: typeFloat, Shape: []int64{int64(len(values))}}
	for _, v := range values {
		t.Data = binary.LittleEndian.AppendUint32(t.Data, math.Float32bits(v))
	}
	return t
}

func TestCompare(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for name, c := range map[string]struct {
		got, want ort.Tensor
		says      string // "" if they are near
	}{
		"equal":                    {floats("y", 1, 2), floats("y", 1, 2), ""},
		"near as they are":         {floats("y", 0.005), floats("y", 0), ""},
		"near as a part":           {floats("y", 1005), floats("y", 1000), ""},
		"apart":                    {floats("y", 1, 2, 0.5), floats("y", 1, 2, 0.25), `output "y" of shape [3]: value 2 is 0.5, and 0.25 in the source model`},
		"apart as a part":          {floats("y", 1020), floats("y", 1000), "value 0 is 1020, and 1000"},
		"of another sign":          {floats("y", -1), floats("y", 1), "value 0"},
		"not a number, both":       {floats("y", nan, 1), floats("y", nan, 1), ""},
		"not a number, one":        {floats("y", nan), floats("y", 1), "value 0 is NaN"},
		"infinite, both":           {floats("y", inf, 1.001), floats("y", inf, 1), ""},
		"infinite in one":          {floats("y", 1), floats("y", inf), "value 0 is 1, and +Inf"},
		"infinite in the other":    {floats("y", inf), floats("y", 1), "value 0 is +Inf"},
		"infinite, of other signs": {floats("y", -inf), floats("y", inf), "value 0 is -Inf"},
		"another name":             {floats("z", 1), floats("y", 1), `there is no output "y"`},
		"another shape":            {floats("y", 1, 2), floats("y", 1), "shape [2]; in the source model 1, [1]"},
		"another type":             {ort.Tensor{Name: "y", Type: typeInt32, Shape: []int64{1}, Data: make([]byte, 4)}, floats("y", 0), "element type 6"},
	} {
		t.Run(name, func(t *testing.T) {
			says, err := compare([]ort.Tensor{c.got}, []ort.Tensor{c.want}, 0.01)
			require.NoError(t, err)
			require.Contains(t, says, c.says)
			require.Equal(t, c.says == "", says == "", says)
		})
	}
	says, err := compare([]ort.Tensor{floats("y", 1)}, nil, 0.01)
	require.NoError(t, err)
	require.Contains(t, says, "1 outputs, and the source model has 0")
	_, err = compare([]ort.Tensor{{Name: "y", Type: 8, Data: []byte("a")}}, []ort.Tensor{{Name: "y", Type: 8, Data: []byte("b")}}, 0.01)
	require.ErrorContains(t, err, "cannot be compared")
}

// every type's numbers, against what the standard and Go's own conversions say
func TestNumbersOfEveryType(t *testing.T) {
	le := binary.LittleEndian
	minus := int64(-3)
	for name, c := range map[string]struct {
		kind  int32
		bytes []byte
		want  float64
	}{
		"float":          {typeFloat, le.AppendUint32(nil, math.Float32bits(-1.5)), -1.5},
		"double":         {typeDouble, le.AppendUint64(nil, math.Float64bits(1e300)), 1e300},
		"half one":       {typeFloat16, le.AppendUint16(nil, 0x3c00), 1},
		"half smallest":  {typeFloat16, le.AppendUint16(nil, 0x0001), math.Ldexp(1, -24)},
		"half largest":   {typeFloat16, le.AppendUint16(nil, 0x7bff), 65504},
		"half minus two": {typeFloat16, le.AppendUint16(nil, 0xc000), -2},
		"half infinite":  {typeFloat16, le.AppendUint16(nil, 0xfc00), math.Inf(-1)},
		"bfloat one":     {typeBfloat16, le.AppendUint16(nil, 0x3f80), 1},
		"bool":           {typeBool, []byte{1}, 1},
		"uint8":          {typeUint8, []byte{200}, 200},
		"int8":           {typeInt8, []byte{byte(minus & 0xff)}, -3},
		"uint16":         {typeUint16, le.AppendUint16(nil, 65535), 65535},
		"int16":          {typeInt16, le.AppendUint16(nil, uint16(minus&0xffff)), -3},
		"uint32":         {typeUint32, le.AppendUint32(nil, math.MaxUint32), math.MaxUint32},
		"int32":          {typeInt32, le.AppendUint32(nil, uint32(minus&0xffffffff)), -3},
		"uint64":         {typeUint64, le.AppendUint64(nil, 1<<60), 1 << 60},
		"int64":          {typeInt64, le.AppendUint64(nil, uint64(minus)), -3},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, number(c.bytes, c.kind))
			require.EqualValues(t, len(c.bytes), elementSizes[c.kind])
		})
	}
	require.True(t, math.IsNaN(number(le.AppendUint16(nil, 0x7e00), typeFloat16)))
}
