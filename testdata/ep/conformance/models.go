//go:build linux && (amd64 || arm64)

package main

import (
	"encoding/binary"
	"math"
	"strconv"
	"strings"

	"github.com/epcached/epcached/compilers/ort"
	"github.com/epcached/epcached/compilers/tinymodel"
)

// family is one operator on elements of one type. EPs are examined with a family that they take.
type family struct {
	op      string
	element int32
}

// families lists those with weights first, because more can be found out with them.
func families() []family {
	var list []family
	for _, element := range []int32{tinymodel.Float, tinymodel.Float16, tinymodel.Int8} {
		for _, op := range []string{"MatMul", "Conv", "Mul", "Add", "Relu"} {
			if element != tinymodel.Int8 || op == "MatMul" || op == "Conv" {
				list = append(list, family{op, element})
			}
		}
	}
	return list
}

var elementNames = map[int32]string{tinymodel.Float: "float", tinymodel.Float16: "float16",
	tinymodel.Int8: "int8"}

func (f family) String() string { return f.op + " " + elementNames[f.element] }

const width = 16

func (f family) shape() []int64 {
	if f.op == "Conv" {
		return []int64{1, width, 4, 4}
	}
	return []int64{1, width}
}

func (f family) outside() int32 {
	if f.element == tinymodel.Int8 {
		return tinymodel.Float
	}
	return f.element
}

func (f family) value(name string) tinymodel.Value {
	return tinymodel.Fixed(name, f.outside(), f.shape())
}

// model is a chain of count blocks from x to y. Parts are divided by a Scaler, which is the CPU's.
func (f family) model(seed uint64, count int, parts bool) tinymodel.Model {
	m := tinymodel.Model{Opsets: map[string]int64{"": 17, "ai.onnx.ml": 3},
		Inputs: []tinymodel.Value{f.value("x")}, Outputs: []tinymodel.Value{f.value("y")}}
	at := "x"
	for i := range count {
		id, out := strconv.Itoa(i)+"_", "y"
		if i < count-1 {
			out = id + "out"
		}
		f.block(&m, seed+uint64(i), id, at, out)
		if at = out; parts && i < count-1 {
			m.Nodes = append(m.Nodes, tinymodel.Node{Name: id + "cpu", Op: "Scaler",
				Domain: "ai.onnx.ml", Inputs: []string{at}, Outputs: []string{id + "scaled"},
				Attributes: map[string]any{"offset": []float32{0.25}, "scale": []float32{0.5}}})
			at = id + "scaled"
			m.Values = append(m.Values,
				f.value(at)) // EPs want to know shapes, and nothing infers this one
		}
	}
	return m
}

func (f family) block(m *tinymodel.Model, seed uint64, id, in, out string) {
	dims := map[string][]int64{"MatMul": {width, width}, "Conv": {width, width, 1, 1},
		"Mul": {1, width}, "Add": {1, width}}[f.op]
	var weight tinymodel.Tensor
	if dims != nil {
		weight = f.tensor(id+"w", seed, f.element, dims)
	}
	m.Apply(f.op, id, in, out, weight, quantum)
}

const quantum = 0.125

// tensor has numbers between -1 and 1 that follow from a seed.
func (f family) tensor(name string, seed uint64, element int32, dims []int64) tinymodel.Tensor {
	return tinymodel.Tensor{Name: name, Type: element, Shape: dims,
		Raw: numbers(seed, tinymodel.Count(dims), element)}
}

func numbers(seed uint64, count int, element int32) []byte {
	raw := tinymodel.Floats(seed, count)
	if element == tinymodel.Float {
		return raw
	}
	var out []byte
	for _, v := range floats(raw, tinymodel.Float) {
		if element == tinymodel.Int8 {
			out = append(out, byte(int8(v/quantum)))
		} else {
			out = binary.LittleEndian.AppendUint16(out, half(v))
		}
	}
	return out
}

// half returns the float16 next to zero from v, which is no subnormal, or 0.
func half(v float32) uint16 {
	bits := math.Float32bits(v)
	exponent := int(bits>>23&0xff) - 127 + 15
	if exponent <= 0 {
		return 0
	}
	return uint16(bits>>16&0x8000) | uint16(exponent)<<10 | uint16(bits>>13&0x3ff)
}

func floats(data []byte, element int32) []float32 {
	var values []float32
	size := int(ort.ElementSizes[element])
	for ; len(data) >= size; data = data[size:] {
		values = append(values, float32(ort.Number(data, element)))
	}
	return values
}

func (c *testCase) externalized(file string) (tinymodel.Model, []byte) {
	c.hasWeights()
	var data []byte
	moved := c.source
	moved.Initializers = nil
	for _, w := range c.source.Initializers {
		w.Location, w.Offset, w.Length = file, strconv.Itoa(len(data)), strconv.Itoa(len(w.Raw))
		data = append(data, w.Raw...)
		moved.Initializers = append(moved.Initializers, w)
	}
	return moved, data
}

// joined feeds what one model gives to another. Both have one block.
func joined(first, second tinymodel.Model) tinymodel.Model {
	all := tinymodel.Model{Opsets: first.Opsets, Inputs: first.Inputs, Outputs: second.Outputs}
	for i, m := range []tinymodel.Model{first, second} {
		rename := func(names []string) []string {
			var list []string
			for _, n := range names {
				switch {
				case i == 0 && n == "y" || i == 1 && n == "x":
					n = "between"
				case n != "x" && n != "y":
					n += strings.Repeat("_", i+1)
				}
				list = append(list, n)
			}
			return list
		}
		for _, n := range m.Nodes {
			n.Name, n.Inputs, n.Outputs = n.Name+strconv.Itoa(i), rename(n.Inputs),
				rename(n.Outputs)
			all.Nodes = append(all.Nodes, n)
		}
		for _, w := range m.Initializers {
			w.Name = rename([]string{w.Name})[0]
			all.Initializers = append(all.Initializers, w)
		}
	}
	return all
}

func (c *testCase) hasWeights() {
	if len(c.source.Initializers) == 0 {
		c.skip("a model that the EP takes has no weights")
	}
}
