package tinymodel

import (
	"fmt"
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

func probe(op string, element int32) Model {
	id := fmt.Sprintf("%s%d_", op, element)
	outside := element
	if element == Int8 {
		outside = Float
	}
	in, weight, out := []int64{1, 4}, []int64{1, 4}, []int64{1, 4}
	switch op {
	case "MatMul":
		weight = []int64{4, 4}
	case "Conv":
		in, weight, out = []int64{1, 1, 4, 4}, []int64{1, 1, 3, 3}, []int64{1, 1, 2, 2}
	}
	m := Model{Inputs: []Value{Fixed(id+"x", outside, in)},
		Outputs: []Value{Fixed(id+"y", outside, out)}}
	var w Tensor
	if op != "Relu" {
		w = Tensor{Name: id + "w", Type: element, Shape: weight,
			Raw: slices.Repeat(half[element], Count(weight))}
	}
	m.Apply(op, id, id+"x", id+"y", w, 0.5)
	return m
}

// half is one half as elements of a type, or one step of what is quantized: a value that no
// optimization takes for a no-op.
var half = map[int32][]byte{Float: {0, 0, 0, 0x3f}, Float16: {0, 0x38}, Int8: {1}}
