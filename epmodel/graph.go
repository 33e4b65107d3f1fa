package epmodel

import (
	"math"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"
)

const maxRank = 1024 // bounds the dimensions of a tensor. ORT's kernels support about 8

func (w *walker) graph(f field, name, path string) {
	nodes, main := 0, name == "graph"
	w.submessage(f, name, func(g field) {
		switch {
		case g.num == 1:
			w.node(g, path, nodes)
			nodes++
		case g.num == 2 && main:
			w.m.GraphName = w.text(g, "name")
		case g.num == 5:
			w.tensor(g, "initializer", Initializer{Graph: path})
		case g.num == 11 && main:
			w.m.Inputs = w.value(g, "input", w.m.Inputs)
			w.m.inputsAt = append(w.m.inputsAt, Range{g.at, g.end() - g.at})
		case g.num == 12 && main:
			w.m.Outputs = w.value(g, "output", w.m.Outputs)
			w.m.outputsAt = append(w.m.outputsAt, Range{g.at, g.end() - g.at})
		case g.num == 15:
			w.sparse(g, "sparse_initializer", Initializer{Graph: path})
		}
	})
}

func (w *walker) value(f field, name string, to []Value) []Value {
	var v Value
	w.submessage(f, name, func(g field) {
		switch g.num {
		case 1:
			v.Name = w.text(g, "name")
		case 2:
			w.submessage(g, "type", func(h field) { w.valueType(h, &v) })
		}
	})
	w.chargeMemory(f.at, 112)
	return append(to, v)
}

var valueKinds = map[protowire.Number]string{1: "tensor", 4: "sequence", 5: "map", 7: "opaque",
	8: "sparse_tensor", 9: "optional"}

// valueType reads one field of a TypeProto, without the elements of sequences, maps and optionals.
func (w *walker) valueType(f field, v *Value) {
	kind, ok := valueKinds[f.num]
	if !ok {
		return
	}
	// one of a oneof: the last one counts
	v.Kind, v.Type, v.Shape = kind, 0, nil
	if kind != "tensor" && kind != "sparse_tensor" {
		return
	}
	w.submessage(f, kind+"_type", func(g field) {
		switch g.num {
		case 1:
			v.Type = int32(w.integer(g, "elem_type"))
		case 2:
			v.Shape = nil
			w.submessage(g, "shape", func(h field) {
				if h.num == 1 {
					w.dim(h, v)
				}
			})
		}
	})
}

func (w *walker) dim(f field, v *Value) {
	if len(v.Shape) >= maxRank {
		w.fail(f.at, "dim", "more than %d dimensions", maxRank)
	}
	d := Dim{Value: -1}
	w.submessage(f, "dim", func(g field) {
		switch g.num {
		case 1:
			d.Param, d.Value = "", w.integer(g, "dim_value")
		case 2:
			d.Param, d.Value = w.text(g, "dim_param"), -1
		case 3:
			d.Denotation = w.text(g, "denotation")
		}
	})
	v.Shape = append(v.Shape, d)
	w.chargeMemory(f.at, 40)
}

type nodeLabel struct {
	graph string
	node  string // its name, or "Op[index]" when it has none; "" for a function's own attributes
}

func (l nodeLabel) subgraph(attribute string) string {
	s := attribute
	if l.node != "" {
		s = l.node + "." + attribute
	}
	if l.graph != "" {
		s = l.graph + "/" + s
	}
	return s
}

func (w *walker) node(f field, graph string, index int) {
	c := Context{Graph: graph, Offset: f.at, EmbedMode: 1, MainContext: 1}
	var op string
	attributes := false
	w.submessage(f, "node", func(g field) {
		switch g.num {
		case 1:
			c.Inputs++
		case 2:
			c.Outputs++
		case 3:
			c.Node = w.passing(g, "name")
		case 4:
			op = w.passing(g, "op_type")
		case 5:
			attributes = true
		case 7:
			c.Domain = w.passing(g, "domain")
		}
	})
	label := nodeLabel{graph: graph, node: c.Node}
	if label.node == "" {
		label.node = op + "[" + strconv.Itoa(index) + "]"
	}
	w.count(f, domainName(c.Domain)+"::"+op)
	if op == "EPContext" {
		w.context(f, c, label)
	} else if attributes {
		w.submessage(f, "node", func(g field) {
			if g.num == 5 {
				w.attribute(g, "attribute", label)
			}
		})
	}
}

// passing reads a name that is usually dropped again, without accounting for its memory. keep
// accounts for a name that is kept.
func (w *walker) passing(f field, name string) string {
	before := w.memoryUsed
	s := w.text(f, name)
	w.memoryUsed = before
	return s
}

func (w *walker) count(f field, op string) {
	w.m.OpTypes[op]++
	w.m.Nodes++
	if w.m.OpTypes[op] == 1 {
		w.chargeMemory(f.at, len(op)+64)
	}
}

func (w *walker) attribute(f field, name string, label nodeLabel) {
	var attr string
	var nested, tensors, graphs int
	w.submessage(f, name, func(g field) {
		switch g.num {
		case 1:
			attr = w.passing(g, "name")
		case 5, 6, 10, 11, 22, 23:
			nested++
		}
	})
	if nested == 0 {
		return
	}
	at := Initializer{Graph: label.graph, Node: label.node, Attribute: attr}
	w.submessage(f, name, func(g field) {
		switch g.num {
		case 5, 22:
			// the schema has one, and no writer intends that protobuf merges two
			if tensors++; tensors > 1 {
				w.fail(g.at, attr, "two tensors in one attribute")
			}
		case 6:
			if graphs++; graphs > 1 {
				w.fail(g.at, attr, "two graphs in one attribute")
			}
		}
		switch g.num {
		case 5:
			w.tensor(g, "t", at)
		case 10:
			w.tensor(g, "tensors", at)
		case 22:
			w.sparse(g, "sparse_tensor", at)
		case 23:
			w.sparse(g, "sparse_tensors", at)
		case 6:
			w.nestedGraph(g, "g", label.subgraph(attr))
		case 11:
			graphs++
			w.nestedGraph(g, "graphs", label.subgraph(attr+"["+strconv.Itoa(graphs-1)+"]"))
		}
	})
}

// nestedGraph accounts for the path, which every tensor in the graph shares, until the graph ends.
func (w *walker) nestedGraph(f field, name, path string) {
	before := w.memoryUsed
	w.chargeMemory(f.at, len(path))
	held := w.memoryUsed - before
	w.graph(f, name, path)
	w.memoryUsed -= held
}

// present reports whether an optional field was seen.
func (f field) present() bool { return f.num != 0 }

// maxKeys bounds the entries of one tensor's external_data: four in the schema, and a handful of
// ORT's.
const maxKeys = 256

// Values of TensorProto.data_location.
const (
	dataInGraph = iota
	dataExternal
)

func (w *walker) tensor(f field, name string, of Initializer) (called string) {
	before := w.memoryUsed
	w.current = of // reused for each tensor
	t := &w.current
	t.At = f.at
	var external []field
	location := int64(dataInGraph)
	w.submessage(f, name, func(g field) {
		switch g.num {
		case 1:
			t.Shape = w.integers(g, "dims", maxRank, t.Shape)
		case 2:
			t.Type = int32(w.integer(g, "data_type"))
		case 4, 5, 6, 7, 10, 11:
			t.typed(g)
		case 8:
			if s := w.text(g, "name"); t.Part == "" || s != "" {
				t.Name = s
			}
		case 9:
			t.Offset, t.Length = g.off, g.n
			w.want(g, "raw_data", protowire.BytesType)
		case 13:
			if len(external) >= maxKeys {
				w.fail(g.at, "external_data", "more than %d entries", maxKeys)
			}
			external = append(external, g)
		case 14:
			location = w.integer(g, "data_location")
		}
	})
	w.path = append(w.path, name)
	defer func() { w.path = w.path[:len(w.path)-1] }()
	for _, d := range t.Shape {
		if d < 0 {
			w.fail(f.at, "dims", "tensor %q has a negative dimension, %d", t.Name, d)
		}
	}
	switch location {
	case dataInGraph: // all readers ignore external_data without this mark
	case dataExternal:
		w.external(f, external, t)
	default:
		w.fail(f.at, "data_location", "tensor %q: %d is neither 0 (in the model) nor 1 (external)",
			t.Name, location)
	}
	w.memoryUsed = before // only its file's name is kept
	if w.err != nil {
		return ""
	}
	if t.Location != "" {
		w.inFile(t)
	}
	w.each(w, t)
	return t.Name
}

// inFile records that a tensor is in a file of external data.
func (w *walker) inFile(t *Initializer) {
	i, known := w.files[t.Location]
	if !known {
		i = len(w.m.External)
		w.files[t.Location] = i
		w.m.External = append(w.m.External,
			ExternalFile{Location: t.Location, Tensor: t.Name, At: t.At})
		w.chargeMemory(t.At, 1024+len(t.Location)+3*(len(t.Name)+8*len(t.Shape)))
	}
	f := &w.m.External[i]
	if !known || t.endInFile() > f.farthest.endInFile() {
		f.farthest = t.onlyExternal(f.Location)
	}
	if need, known := t.Bytes(); known && t.Length > 0 && need > t.Length &&
		f.tight.Location == "" {
		f.tight = t.onlyExternal(f.Location)
	}
}

// onlyExternal returns the part of the tensor that its check needs.
func (t *Initializer) onlyExternal(location string) Initializer {
	return Initializer{Name: t.Name, Location: location, Type: t.Type, Shape: t.Shape,
		Sparse: t.Sparse, Offset: t.Offset, Length: t.Length, At: t.At}
}

// typed records data in a field of its element type. If it is packed in one piece, as all writers
// do, it has a range.
func (t *Initializer) typed(f field) {
	if t.Typed {
		t.Length = 0
		return
	}
	t.Typed = true
	t.Offset = f.off
	if f.typ == protowire.BytesType && f.num != 6 { // string_data is one field for each string
		t.Length = f.n
	}
}

func (w *walker) sparse(f field, name string, t Initializer) {
	t.Sparse = true
	parts := []string{"values", "indices"}
	var found [2]field
	w.submessage(f, name, func(g field) {
		if g.num != 1 && g.num != 2 {
			return
		}
		if found[g.num-1].present() {
			w.fail(g.at, parts[g.num-1], "occurs twice")
		}
		found[g.num-1] = g
	})
	if !found[0].present() {
		return
	}
	for i, part := range parts {
		if t.Part = part; found[i].present() {
			t.Name = w.tensor(found[i], name+"."+part, t)
		}
	}
}

func (w *walker) external(f field, entries []field, t *Initializer) {
	// ORT ignores further bytes in the graph file
	t.Offset, t.Length, t.Typed = 0, -1, false
	seen := map[string]bool{}
	for _, e := range entries {
		k, v := w.pair(e, "external_data")
		key := w.exact(k, "external_data.key", maxName)
		// refused, because readers differ in which one they use, and the digest must cover the used
		// bytes
		if seen[key] {
			w.fail(e.at, "external_data."+key, "tensor %q: occurs twice", t.Name)
		}
		seen[key] = true
		if w.externalKey(v, key, t); w.err != nil {
			return
		}
	}
	if t.Location == "" {
		w.fail(f.at, "external_data.location",
			"tensor %q: its data is external, but no file is named", t.Name)
	}
	if t.Length > math.MaxInt64-t.Offset {
		w.fail(f.at, "external_data.length", "tensor %q: offset %d and length %d overflow", t.Name,
			t.Offset, t.Length)
	}
}

func (w *walker) externalKey(v field, key string, t *Initializer) {
	switch key {
	case "location":
		t.Location = w.exact(v, "external_data.location", maxPath)
		if why := locationProblem(t.Location); why != "" {
			w.fail(v.at, "external_data.location", "tensor %q: file %q: %s", t.Name,
				t.Location, why)
		}
	case "offset":
		t.Offset = w.decimal(v, key, t.Name)
	case "length":
		// the onnx package and ORT both take 0 for "not given", and read by the tensor's shape
		if t.Length = w.decimal(v, key, t.Name); t.Length == 0 {
			t.Length = -1
		}
	case "checksum":
		// ORT never checks it
	default:
		t.OtherKeys = append(t.OtherKeys, key)
	}
}

func (w *walker) decimal(v field, key, tensor string) int64 {
	s := w.exact(v, "external_data."+key, 64)
	n, err := strconv.ParseUint(s, 10, 63)
	if err != nil {
		w.fail(v.at, "external_data."+key, "tensor %q: %q is not a number of bytes between 0 "+
			"and 2^63-1", tensor, s)
	}
	return int64(n)
}
