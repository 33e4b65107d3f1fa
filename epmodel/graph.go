package epmodel

import "google.golang.org/protobuf/encoding/protowire"

// maxRank bounds the dimensions of a tensor. ORT's kernels end at 8 or so.
const maxRank = 1024

// graph walks a GraphProto. path is its place in the terms of Initializer.Graph.
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
		case g.num == 12 && main:
			w.m.Outputs = w.value(g, "output", w.m.Outputs)
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
	w.keep(f.at, 96)
	return append(to, v)
}

var valueKinds = map[protowire.Number]string{1: "tensor", 4: "sequence", 5: "map", 7: "opaque", 8: "sparse_tensor", 9: "optional"}

// valueType reads one field of a TypeProto. What sequences, maps and optionals hold is left out.
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
	w.keep(f.at, 40)
}
