// Package tinymodel writes small ONNX models: those that a fingerprint is taken with, the graphs of
// the stand-in compiler, and models for tests. It knows no more of ONNX than these need, and checks
// nothing: it writes what its arguments say.
package tinymodel

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
)

// Element types of tensors: TensorProto.DataType.
const (
	Float   = 1
	Int8    = 3
	Int32   = 6
	Int64   = 7
	Float16 = 10
)

// Model is a model with one graph.
type Model struct {
	IRVersion    int64            // 0: 8
	Opsets       map[string]int64 // nil: {"": 17}
	Graph        string
	Nodes        []Node
	Inputs       []Value
	Outputs      []Value
	Values       []Value // between nodes: for operators whose outputs' types cannot be inferred
	Initializers []Tensor
	Metadata     map[string]string
}

// Node is one node. Attribute values are int64, string, []byte, []float32,
// or a Model for its graph.
type Node struct {
	Name, Op, Domain string
	Inputs, Outputs  []string
	Attributes       map[string]any
}

// Value is a graph's input or output.
type Value struct {
	Name string
	Type int32
	// int64 or int: fixed; string: a free dimension's name; Meaning: its denotation, and no name
	Shape []any
}

// Meaning is the denotation of a dimension, such as "DATA_BATCH".
type Meaning string

// Tensor is an initializer, with its bytes in Raw, or in an external file.
type Tensor struct {
	Name           string
	Type           int32
	Shape          []int64
	Raw            []byte
	Location       string // external data file; Raw is not written then
	Offset, Length string // as written; empty: left out
}

// Encode returns the model's bytes. Equal models give equal bytes.
func (m Model) Encode() []byte {
	if m.IRVersion == 0 {
		m.IRVersion = 8
	}
	if m.Opsets == nil {
		m.Opsets = map[string]int64{"": 17}
	}
	b := appendInt(nil, 1, m.IRVersion)
	b = appendBytes(b, 7, m.graph())
	for _, domain := range slices.Sorted(maps.Keys(m.Opsets)) {
		b = appendBytes(b, 8, appendInt(appendText(nil, 1, domain), 2, m.Opsets[domain]))
	}
	for _, key := range slices.Sorted(maps.Keys(m.Metadata)) {
		b = appendBytes(b, 14, appendText(appendText(nil, 1, key), 2, m.Metadata[key]))
	}
	return b
}

func (m Model) graph() []byte {
	var b []byte
	for _, n := range m.Nodes {
		b = appendBytes(b, 1, n.encode())
	}
	b = appendText(b, 2, cmp.Or(m.Graph, "g"))
	for _, t := range m.Initializers {
		b = appendBytes(b, 5, t.encode())
	}
	for _, v := range m.Inputs {
		b = appendBytes(b, 11, v.encode())
	}
	for _, v := range m.Outputs {
		b = appendBytes(b, 12, v.encode())
	}
	for _, v := range m.Values {
		b = appendBytes(b, 13, v.encode())
	}
	return b
}

func (n Node) encode() []byte {
	var b []byte
	for _, name := range n.Inputs {
		b = appendBytes(b, 1, []byte(name))
	}
	for _, name := range n.Outputs {
		b = appendBytes(b, 2, []byte(name))
	}
	b = appendText(b, 3, n.Name)
	b = appendText(b, 4, n.Op)
	for _, name := range slices.Sorted(maps.Keys(n.Attributes)) {
		b = appendBytes(b, 5, attribute(name, n.Attributes[name]))
	}
	return appendText(b, 7, n.Domain)
}

func attribute(name string, value any) []byte {
	b := appendText(nil, 1, name)
	switch v := value.(type) {
	case int64:
		return appendInt(appendInt(b, 3, v), 20, 2)
	case string:
		return appendInt(appendBytes(b, 4, []byte(v)), 20, 3)
	case []byte:
		return appendInt(appendBytes(b, 4, v), 20, 3)
	case Model:
		return appendInt(appendBytes(b, 6, v.graph()), 20, 5)
	case []float32:
		for _, f := range v {
			b = protowire.AppendFixed32(protowire.AppendTag(b, 7, protowire.Fixed32Type),
				math.Float32bits(f))
		}
		return appendInt(b, 20, 6)
	}
	return b
}

func (v Value) encode() []byte {
	var shape []byte
	for _, dim := range v.Shape {
		switch d := dim.(type) {
		case int:
			shape = appendBytes(shape, 1, appendInt(nil, 1, int64(d)))
		case int64:
			shape = appendBytes(shape, 1, appendInt(nil, 1, d))
		case string:
			shape = appendBytes(shape, 1, appendText(nil, 2, d))
		case Meaning:
			shape = appendBytes(shape, 1, appendText(nil, 3, string(d)))
		}
	}
	tensor := appendBytes(appendInt(nil, 1, int64(v.Type)), 2, shape)
	return appendBytes(appendText(nil, 1, v.Name), 2, appendBytes(nil, 1, tensor))
}

func (t Tensor) encode() []byte {
	var b []byte
	for _, dim := range t.Shape {
		b = appendInt(b, 1, dim)
	}
	b = appendInt(b, 2, int64(t.Type))
	b = appendText(b, 8, t.Name)
	if t.Location == "" {
		return appendBytes(b, 9, t.Raw)
	}
	for _, pair := range [][2]string{{"location", t.Location}, {"offset", t.Offset},
		{"length", t.Length}} {
		if pair[1] != "" {
			b = appendBytes(b, 13, appendText(appendText(nil, 1, pair[0]), 2, pair[1]))
		}
	}
	return appendInt(b, 14, 1)
}

// Apply adds a node from in to out: an operator on that and on a weight, unless the weight has no
// name. Of an Int8 weight there are nodes that quantize in steps of that size. Names begin with id.
func (m *Model) Apply(op, id, in, out string, weight Tensor, step float32) {
	inputs := []string{in}
	if weight.Name != "" {
		m.Initializers = append(m.Initializers, weight)
		inputs = append(inputs, weight.Name)
	}
	if weight.Type != Int8 {
		m.node(op, id+op, out, inputs...)
		return
	}
	scale, zero := id+"scale", id+"zero"
	m.Initializers = append(m.Initializers, Tensor{Name: scale, Type: Float,
		Raw: binary.LittleEndian.AppendUint32(nil, math.Float32bits(step))},
		Tensor{Name: zero, Type: Int8, Raw: []byte{0}})
	convert := func(op, from, to string) string {
		m.node(op, id+to, to, from, scale, zero)
		return to
	}
	x := convert("DequantizeLinear", convert("QuantizeLinear", in, id+"xq"), id+"xd")
	w := convert("DequantizeLinear", weight.Name, id+"wd")
	m.node(op, id+op, id+"o", x, w)
	convert("DequantizeLinear", convert("QuantizeLinear", id+"o", id+"oq"), out)
}

func (m *Model) node(op, name, output string, inputs ...string) {
	m.Nodes = append(m.Nodes, Node{Name: name, Op: op, Inputs: inputs, Outputs: []string{output}})
}

// Fixed is a value without free dimensions.
func Fixed(name string, element int32, dims []int64) Value {
	v := Value{Name: name, Type: element}
	for _, d := range dims {
		v.Shape = append(v.Shape, d)
	}
	return v
}

// Count is the number of elements of a tensor.
func Count(dims []int64) int {
	count := 1
	for _, d := range dims {
		count *= int(d)
	}
	return count
}

// Floats returns count little-endian floats between -1 and 1, the same for the same seed.
func Floats(seed uint64, count int) []byte {
	random := rand.New(rand.NewPCG(seed, 1))
	raw := make([]byte, 0, 4*count)
	for range count {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(2*random.Float32()-1))
	}
	return raw
}

func appendInt(b []byte, field protowire.Number, v int64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), uint64(v))
}

func appendBytes(b []byte, field protowire.Number, v []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), v)
}

func appendText(b []byte, field protowire.Number, v string) []byte {
	if v == "" {
		return b
	}
	return appendBytes(b, field, []byte(v))
}

// Probes are tiny models that find out whether an EP compiles at all, in the order to try: one
// Relu; then a graph with one node of each other kind, so that one compile covers all; then
// those, one node each, because an EP may fail over nodes beside the one that it takes.
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

// half is one half, or a step of what is quantized: no optimization takes it for a no-op.
var half = map[int32][]byte{Float: {0, 0, 0, 0x3f}, Float16: {0, 0x38}, Int8: {1}}
