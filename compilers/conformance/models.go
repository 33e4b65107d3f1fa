//go:build linux && (amd64 || arm64)

package conformance

import (
	"encoding/binary"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/compilers/ort"
)

// family is one operator on elements of one type. EPs are examined with a family that they take.
type family struct {
	op, name string
	element  int32
}

const int8Type, float16Type = 3, 10 // of TensorProto.DataType

// families lists those with weights first, because more can be found out with them.
func families() (list []family) {
	names := map[int32]string{ort.Float: "float", float16Type: "float16", int8Type: "int8"}
	for _, element := range []int32{ort.Float, float16Type, int8Type} {
		for _, op := range []string{"MatMul", "Conv", "Mul", "Add", "Relu"} {
			if element != int8Type || op == "MatMul" || op == "Conv" {
				list = append(list, family{op, op + " " + names[element], element})
			}
		}
	}
	return list
}

const width = 16

func (f family) shape() []int64 {
	if f.op == "Conv" {
		return []int64{1, width, 4, 4}
	}
	return []int64{1, width}
}

// outside is the element type of inputs and outputs.
func (f family) outside() int32 {
	if f.element == int8Type {
		return ort.Float
	}
	return f.element
}

// input has the numbers that sessions run on.
func (f family) input() ort.Tensor {
	count := int64(1)
	for _, d := range f.shape() {
		count *= d
	}
	return ort.Tensor{Name: "x", Type: f.outside(), Shape: f.shape(),
		Data: numbers(100, count, f.outside())}
}

const quantum = 0.125

// numbers returns numbers between -1 and 1, the same for the same seed.
func numbers(seed uint64, count int64, element int32) (out []byte) {
	random := rand.New(rand.NewPCG(seed, 1))
	for range count {
		switch element {
		case ort.Float:
			out = binary.LittleEndian.AppendUint32(out, math.Float32bits(2*random.Float32()-1))
		case float16Type: // from a half to one, of either sign
			out = binary.LittleEndian.AppendUint16(out, uint16(random.Uint32())&0x83ff|0x3800)
		default:
			out = append(out, byte(random.IntN(17)-8))
		}
	}
	return out
}

// model is a chain of blocks from x to y. Parts are divided by a Scaler, which is the CPU's. With
// the name of a file the weights are not in the model, but in data, which is to be that file.
func (f family) model(seed uint64, blocks int, parts bool, file string) (model, data []byte) {
	var nodes, weights [][]byte
	var between []string
	at := "x"
	add := func(op, out string, in ...string) string {
		nodes = append(nodes, node(op, out+"_by_"+op, in, out, nil))
		return out
	}
	for i := range blocks {
		id, out := strconv.Itoa(i)+"_", "y"
		if i < blocks-1 {
			out = id + "out"
		}
		dims := map[string][]int64{"MatMul": {width, width}, "Conv": {width, width, 1, 1},
			"Mul": {1, width}, "Add": {1, width}}[f.op]
		if dims != nil {
			count := dims[0] * dims[1]
			raw := numbers(seed+uint64(i), count, f.element)
			weights = append(weights, tensor(id+"w", f.element, dims, raw, file, len(data)))
			data = append(data, raw...)
		}
		switch {
		case f.element == int8Type: // with nodes that quantize in steps of the quantum
			weights = append(weights, tensor(id+"scale", ort.Float, nil,
				binary.LittleEndian.AppendUint32(nil, math.Float32bits(quantum)), "", 0),
				tensor(id+"zero", int8Type, nil, []byte{0}, "", 0))
			steps := func(from, to string) string {
				return add("DequantizeLinear", to, add("QuantizeLinear", to+"q", from, id+"scale",
					id+"zero"), id+"scale", id+"zero")
			}
			w := add("DequantizeLinear", id+"wd", id+"w", id+"scale", id+"zero")
			steps(add(f.op, id+"o", steps(at, id+"xd"), w), out)
		case dims == nil:
			add(f.op, out, at)
		default:
			add(f.op, out, at, id+"w")
		}
		if at = out; parts && i < blocks-1 {
			at = id + "scaled" // EPs want to know its shape, and nothing infers it
			nodes = append(nodes, node("Scaler", id+"cpu", []string{out}, at,
				map[string]any{"offset": float32(0.25), "scale": float32(0.5)}))
			between = append(between, at)
		}
	}
	return f.encode(nodes, weights, append(between, "y"), nil), data
}

// encode writes a model of nodes from x to the last of the values.
func (f family) encode(nodes, weights [][]byte, values []string,
	metadata map[string]string) []byte {
	graph := message(2, "g", 11, f.value("x"), 12, f.value(values[len(values)-1]))
	for _, n := range nodes {
		graph = append(graph, message(1, n)...)
	}
	for _, w := range weights {
		graph = append(graph, message(5, w)...)
	}
	for _, name := range values[:len(values)-1] {
		graph = append(graph, message(13, f.value(name))...)
	}
	m := message(1, 8, 7, graph, 8, message(2, 17), 8, message(1, "ai.onnx.ml", 2, 3), 8,
		message(1, "com.microsoft", 2, 1))
	for _, key := range slices.Sorted(maps.Keys(metadata)) {
		m = append(m, message(14, message(1, key, 2, metadata[key]))...)
	}
	return m
}

func (f family) value(name string) []byte {
	var shape []byte
	for _, d := range f.shape() {
		shape = append(shape, message(1, message(1, int(d)))...)
	}
	return message(1, name, 2, message(1, message(1, int(f.outside()), 2, shape)))
}

func tensor(name string, element int32, dims []int64, raw []byte, file string, offset int) []byte {
	b := message(2, int(element), 8, name)
	for _, d := range dims {
		b = append(b, message(1, int(d))...)
	}
	if file == "" {
		return append(b, message(9, raw)...)
	}
	return append(b, message(13, message(1, "location", 2, file), 13, message(1, "offset", 2,
		strconv.Itoa(offset)), 13, message(1, "length", 2, strconv.Itoa(len(raw))), 14, 1)...)
}

// node encodes a node. Attributes are int64, float32 for a list of one, string or []byte.
func node(op, name string, in []string, out string, attributes map[string]any) (b []byte) {
	for _, from := range in {
		b = append(b, message(1, from)...)
	}
	b = append(b, message(2, out, 3, name, 4, op)...)
	for _, key := range slices.Sorted(maps.Keys(attributes)) {
		field, kind := 4, 3
		switch attributes[key].(type) {
		case int64:
			field, kind = 3, 2
		case float32:
			field, kind = 7, 6
		}
		b = append(b, message(5, message(1, key, field, attributes[key], 20, kind))...)
	}
	return append(b, message(7, map[string]string{"Scaler": "ai.onnx.ml",
		"EPContext": "com.microsoft"}[op])...)
}

// message encodes pairs of a field's number and its value.
func message(fields ...any) (b []byte) {
	for i := 0; i < len(fields); i += 2 {
		number := protowire.Number(fields[i].(int))
		tag := func(t protowire.Type) []byte { return protowire.AppendTag(b, number, t) }
		switch v := fields[i+1].(type) {
		case int:
			b = protowire.AppendVarint(tag(protowire.VarintType), uint64(v))
		case int64:
			b = protowire.AppendVarint(tag(protowire.VarintType), uint64(v))
		case float32:
			b = protowire.AppendFixed32(tag(protowire.Fixed32Type), math.Float32bits(v))
		case string:
			b = protowire.AppendString(tag(protowire.BytesType), v)
		case []byte:
			b = protowire.AppendBytes(tag(protowire.BytesType), v)
		}
	}
	return b
}
