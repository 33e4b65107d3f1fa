package ort

import (
	"bytes"
	"fmt"
	"math"
	"slices"
)

// Compare describes the first value that differs from the wanted one by more than most, absolutely
// and relatively; "" if none does. NaN equals NaN. It fails for outputs that are not numbers.
func Compare(got, want []Tensor, most float64) (string, error) {
	if len(got) != len(want) {
		return fmt.Sprintf("%d outputs, and the source model has %d", len(got), len(want)), nil
	}
	for _, w := range want {
		i := slices.IndexFunc(got, func(t Tensor) bool { return t.Name == w.Name })
		if i < 0 {
			return fmt.Sprintf("there is no output %q", w.Name), nil
		}
		if difference, err := compareTensor(got[i], w, most); difference != "" || err != nil {
			return difference, err
		}
	}
	return "", nil
}

// IsLike reports whether the tensors have the same type and size, so that values can be compared.
func (t Tensor) IsLike(other Tensor) bool {
	return t.Type == other.Type && slices.Equal(t.Shape, other.Shape) &&
		len(t.Data) == len(other.Data)
}

func compareTensor(got, want Tensor, most float64) (string, error) {
	if !got.IsLike(want) {
		return fmt.Sprintf("output %q: element type %d, shape %v; in the source model %d, %v",
			want.Name, got.Type, got.Shape, want.Type, want.Shape), nil
	}
	if bytes.Equal(got.Data, want.Data) {
		return "", nil
	}
	size, known := ElementSizes[want.Type]
	if !known {
		return "", fmt.Errorf("output %q: element type %d cannot be compared", want.Name, want.Type)
	}
	for at := 0; at+int(size) <= len(want.Data); at += int(size) {
		a, b := Number(got.Data[at:], want.Type), Number(want.Data[at:], want.Type)
		if withinTolerance(a, b, most) {
			continue
		}
		return fmt.Sprintf(
			"output %q of shape %v: value %d is %g, and %g in the source model: more than %g apart",
			want.Name, want.Shape, at/int(size), a, b, most), nil
	}
	return "", nil
}

func withinTolerance(got, want, most float64) bool {
	if got == want || math.IsNaN(got) && math.IsNaN(want) {
		return true
	}
	apart := math.Abs(got - want)
	return apart <= most || !math.IsInf(want, 0) && apart <= most*math.Abs(want)
}
