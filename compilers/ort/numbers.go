package ort

import (
	"encoding/binary"
	"math"
)

// Element types of tensors: ONNXTensorElementDataType.
const (
	Float, Uint8, Int8, Uint16, Int16, Int32, Int64 = 1, 2, 3, 4, 5, 6, 7
	Bool, Float16, Double, Uint32, Uint64, Bfloat16 = 9, 10, 11, 12, 13, 16
)

// ElementSizes are those of the types that hold numbers, in bytes.
var ElementSizes = map[int32]int64{
	Float: 4, Double: 8, Float16: 2, Bfloat16: 2, Bool: 1, Uint8: 1, Int8: 1,
	Uint16: 2, Int16: 2, Uint32: 4, Int32: 4, Uint64: 8, Int64: 8,
}

// Number reads the first element of a tensor's bytes. Integers beyond 2^53 are rounded.
func Number(b []byte, kind int32) float64 {
	le := binary.LittleEndian
	switch kind {
	case Float:
		return float64(math.Float32frombits(le.Uint32(b)))
	case Double:
		return math.Float64frombits(le.Uint64(b))
	case Float16:
		return half(le.Uint16(b))
	case Bfloat16:
		return float64(math.Float32frombits(uint32(le.Uint16(b)) << 16))
	case Int8:
		return float64(int8(b[0]))
	case Uint16:
		return float64(le.Uint16(b))
	case Int16:
		return float64(int16(le.Uint16(b)))
	case Uint32:
		return float64(le.Uint32(b))
	case Int32:
		return float64(int32(le.Uint32(b)))
	case Uint64:
		return float64(le.Uint64(b))
	case Int64:
		return float64(int64(le.Uint64(b)))
	}
	return float64(b[0]) // Bool, Uint8
}

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
