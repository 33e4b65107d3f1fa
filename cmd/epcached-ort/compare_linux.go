//go:build linux && (amd64 || arm64)

package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/epcached/epcached/compilers/ort"
)

// compare says which value of the outputs is the first that differs from the wanted one by more than most, both as it is and as a
// part of the wanted one; "" if none does. Not a number equals itself. The error is for outputs that hold no numbers.
func compare(got, want []ort.Tensor, most float64) (string, error) {
	if len(got) != len(want) {
		return fmt.Sprintf("%d outputs, and the source model has %d", len(got), len(want)), nil
	}
	for _, w := range want {
		i := slices.IndexFunc(got, func(t ort.Tensor) bool { return t.Name == w.Name })
		if i < 0 {
			return fmt.Sprintf("there is no output %q", w.Name), nil
		}
		if difference, err := compareTensor(got[i], w, most); difference != "" || err != nil {
			return difference, err
		}
	}
	return "", nil
}

func compareTensor(got, want ort.Tensor, most float64) (string, error) {
	if got.Type != want.Type || !slices.Equal(got.Shape, want.Shape) || len(got.Data) != len(want.Data) {
		return fmt.Sprintf("output %q: element type %d, shape %v; in the source model %d, %v", want.Name, got.Type, got.Shape, want.Type, want.Shape), nil
	}
	if bytes.Equal(got.Data, want.Data) {
		return "", nil
	}
	size, known := elementSizes[want.Type]
	if !known {
		return "", fmt.Errorf("output %q: element type %d cannot be compared", want.Name, want.Type)
	}
	for at := 0; at+int(size) <= len(want.Data); at += int(size) {
		a, b := number(got.Data[at:], want.Type), number(want.Data[at:], want.Type)
		if near(a, b, most) {
			continue
		}
		return fmt.Sprintf("output %q of shape %v: value %d is %g, and %g in the source model: more than %g apart",
			want.Name, want.Shape, at/int(size), a, b, most), nil
	}
	return "", nil
}

func near(got, want, most float64) bool {
	if got == want || math.IsNaN(got) && math.IsNaN(want) {
		return true
	}
	apart := math.Abs(got - want)
	return apart <= most || !math.IsInf(want, 0) && apart <= most*math.Abs(want)
}

// number reads the first element. Whole numbers beyond 2^53 are rounded, which a tolerance forgives.
func number(b []byte, kind int32) float64 {
	le := binary.LittleEndian
	switch kind {
	case typeFloat:
		return float64(math.Float32frombits(le.Uint32(b)))
	case typeDouble:
		return math.Float64frombits(le.Uint64(b))
	case typeFloat16:
		return half(le.Uint16(b))
	case typeBfloat16:
		return float64(math.Float32frombits(uint32(le.Uint16(b)) << 16))
	case typeInt8:
		return float64(int8(b[0]))
	case typeUint16:
		return float64(le.Uint16(b))
	case typeInt16:
		return float64(int16(le.Uint16(b)))
	case typeUint32:
		return float64(le.Uint32(b))
	case typeInt32:
		return float64(int32(le.Uint32(b)))
	case typeUint64:
		return float64(le.Uint64(b))
	case typeInt64:
		return float64(int64(le.Uint64(b)))
	}
	return float64(b[0]) // bool, uint8
}

// half reads IEEE 754's binary16.
func half(b uint16) float64 {
	sign, exponent, fraction := 1.0, int(b>>10&0x1f), float64(b&0x3ff)
	if b&0x8000 != 0 {
		sign = -1
	}
	switch {
	case exponent == 0x1f && fraction != 0:
		return math.NaN()
	case exponent == 0x1f:
		return math.Inf(int(sign))
	case exponent == 0:
		return sign * math.Ldexp(fraction, -24)
	}
	return sign * math.Ldexp(1024+fraction, exponent-25)
}
