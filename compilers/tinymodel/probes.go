package tinymodel

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// Probes are tiny models to find out with whether an EP compiles at all, in the order in which they
// are worth trying: one Relu; then a graph that has every other one in it, so that one compile
// tells of all; then these others, one node each, because an EP may fail over what it is given
// beside the one node that it takes.
func Probes() []Model {
	one := Value{Name: "x", Type: Float, Shape: []any{1}}
	out := one
	out.Name = "y"
	relu := Model{Nodes: []Node{{Op: "Relu", Inputs: []string{"x"}, Outputs: []string{"y"}}},
		Inputs: []Value{one}, Outputs: []Value{out}}
	var single []Model
	for _, element := range []int32{Float, Float16, Int8} {
		for _, op := range []string{"Relu", "Mul", "Add", "MatMul", "Conv"} {
			if element == Float && op == "Relu" || element == Int8 && op != "MatMul" &&
				op != "Conv" {
				continue
			}
			single = append(single, probe(op, element))
		}
	}
	var all Model
	for _, m := range single {
		all.Nodes = append(all.Nodes, m.Nodes...)
		all.Inputs = append(all.Inputs, m.Inputs...)
		all.Outputs = append(all.Outputs, m.Outputs...)
		all.Initializers = append(all.Initializers, m.Initializers...)
	}
	return append([]Model{relu, all}, single...)
}

// Relu is the smallest model that EPs compile: one Relu of one float.
func Relu() []byte { return Probes()[0].Encode() }

// probe is a model of one operator: of Int8 with what quantizes and dequantizes around it, and
// floats as input and output. Its names are its own, so that models can be put together.
func probe(op string, element int32) Model {
	id := fmt.Sprintf("%s%d_", op, element)
	quantized, outside := element == Int8, element
	if quantized {
		outside = Float
	}
	in, weight, out := []int64{1, 4}, []int64{1, 4}, []int64{1, 4}
	switch op {
	case "MatMul":
		weight = []int64{4, 4}
	case "Conv":
		in, weight, out = []int64{1, 1, 4, 4}, []int64{1, 1, 3, 3}, []int64{1, 1, 2, 2}
	}
	value := func(name string, dims []int64) Value {
		v := Value{Name: id + name, Type: outside}
		for _, d := range dims {
			v.Shape = append(v.Shape, d)
		}
		return v
	}
	m := Model{Inputs: []Value{value("x", in)}, Outputs: []Value{value("y", out)}}
	inputs, output := []string{id + "x"}, id+"y"
	if op != "Relu" {
		m.Initializers = append(m.Initializers, halves(id+"w", element, weight))
		inputs = append(inputs, id+"w")
	}
	if !quantized {
		m.Nodes = []Node{{Name: id, Op: op, Inputs: inputs, Outputs: []string{output}}}
		return m
	}
	scale, zero := id+"scale", id+"zero"
	m.Initializers = append(m.Initializers, halves(scale, Float, nil), Tensor{Name: zero,
		Type: Int8, Raw: []byte{0}})
	step := func(op, from, to string) {
		m.Nodes = append(m.Nodes, Node{Name: id + to, Op: op, Inputs: []string{from, scale, zero},
			Outputs: []string{to}})
	}
	step("QuantizeLinear", id+"x", id+"xq")
	step("DequantizeLinear", id+"xq", id+"xd")
	step("DequantizeLinear", id+"w", id+"wd")
	m.Nodes = append(m.Nodes, Node{Name: id, Op: op, Inputs: []string{id + "xd", id + "wd"},
		Outputs: []string{id + "o"}})
	step("QuantizeLinear", id+"o", id+"oq")
	step("DequantizeLinear", id+"oq", output)
	return m
}

// halves is a tensor whose elements are all one half, or one step of what is quantized: values that
// no optimization takes for a no-op.
func halves(name string, element int32, dims []int64) Tensor {
	bits := map[int32][]byte{
		Float:   binary.LittleEndian.AppendUint32(nil, math.Float32bits(0.5)),
		Float16: {0x00, 0x38}, Int8: {1},
	}[element]
	count := 1
	for _, d := range dims {
		count *= int(d)
	}
	return Tensor{Name: name, Type: element, Shape: dims, Raw: slices.Repeat(bits, count)}
}
