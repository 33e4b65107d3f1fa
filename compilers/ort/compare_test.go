package ort

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func floats(name string, values ...float32) Tensor {
	t := Tensor{Name: name, Type: Float, Shape: []int64{int64(len(values))}}
	for _, v := range values {
		t.Data = binary.LittleEndian.AppendUint32(t.Data, math.Float32bits(v))
	}
	return t
}

func TestCompare(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for name, c := range map[string]struct {
		got, want Tensor
		says      string // "" if they are near
	}{
		"equal":            {floats("y", 1, 2), floats("y", 1, 2), ""},
		"near as they are": {floats("y", 0.005), floats("y", 0), ""},
		"near as a part":   {floats("y", 1005), floats("y", 1000), ""},
		"apart": {floats("y", 1, 2, 0.5), floats("y", 1, 2, 0.25),
			`output "y" of shape [3]: value 2 is 0.5, and 0.25 in the source model`},
		"apart as a part": {floats("y", 1020), floats("y", 1000),
			"value 0 is 1020, and 1000"},
		"of another sign":          {floats("y", -1), floats("y", 1), "value 0"},
		"not a number, both":       {floats("y", nan, 1), floats("y", nan, 1), ""},
		"not a number, one":        {floats("y", nan), floats("y", 1), "value 0 is NaN"},
		"infinite, both":           {floats("y", inf, 1.001), floats("y", inf, 1), ""},
		"infinite in one":          {floats("y", 1), floats("y", inf), "value 0 is 1, and +Inf"},
		"infinite in the other":    {floats("y", inf), floats("y", 1), "value 0 is +Inf"},
		"infinite, of other signs": {floats("y", -inf), floats("y", inf), "value 0 is -Inf"},
		"another name":             {floats("z", 1), floats("y", 1), `there is no output "y"`},
		"another shape": {floats("y", 1, 2), floats("y", 1),
			"shape [2]; in the source model 1, [1]"},
		"another type": {Tensor{Name: "y", Type: Int32, Shape: []int64{1},
			Data: make([]byte, 4)}, floats("y", 0), "element type 6"},
	} {
		t.Run(name, func(t *testing.T) {
			says, err := Compare([]Tensor{c.got}, []Tensor{c.want}, 0.01)
			require.NoError(t, err)
			require.Contains(t, says, c.says)
			require.Equal(t, c.says == "", says == "", says)
		})
	}
	says, err := Compare([]Tensor{floats("y", 1)}, nil, 0.01)
	require.NoError(t, err)
	require.Contains(t, says, "1 outputs, and the source model has 0")
	_, err = Compare([]Tensor{{Name: "y", Type: 8, Data: []byte("a")}},
		[]Tensor{{Name: "y", Type: 8, Data: []byte("b")}}, 0.01)
	require.ErrorContains(t, err, "cannot be compared")
}
