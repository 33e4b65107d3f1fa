package epmodel

import "google.golang.org/protobuf/encoding/protowire"

// maxRank bounds the dimensions of a tensor. ORT's kernels end at 8 or so.
const maxRank = 1024

// graph walks a GraphProto. path is its place in the terms of Initializer.Graph.
func (w *walker) graph(f field, name, path string) error {
	nodes, main := 0, name == "graph"
	return w.submessage(f, name, func(g field) (err error) {
		switch g.num {
		case 1:
			err = w.node(g, path, nodes)
			nodes++
		case 2:
			if main {
				w.m.GraphName, err = w.text(g, "name")
			}
		case 5:
			err = w.tensor(g, "initializer", Initializer{Graph: path})
		case 11:
			if main {
				w.m.Inputs, err = w.value(g, "input", w.m.Inputs)
			}
		case 12:
			if main {
				w.m.Outputs, err = w.value(g, "output", w.m.Outputs)
			}
		case 15:
			err = w.sparse(g, "sparse_initializer", Initializer{Graph: path})
		}
		return err
	})
}

// value appends a ValueInfoProto.
func (w *walker) value(f field, name string, to []Value) ([]Value, error) {
	var v Value
	err := w.submessage(f, name, func(g field) (err error) {
		switch g.num {
		case 1:
			v.Name, err = w.text(g, "name")
		case 2:
			err = w.submessage(g, "type", func(h field) error { return w.valueType(h, &v) })
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return append(to, v), w.keep(f.at, 96)
}

var valueKinds = map[protowire.Number]string{1: "tensor", 4: "sequence", 5: "map", 7: "opaque", 8: "sparse_tensor", 9: "optional"}

// valueType reads one field of a TypeProto. What sequences, maps and optionals hold is left out.
func (w *walker) valueType(f field, v *Value) error {
	kind, ok := valueKinds[f.num]
	if !ok {
		return nil
	}
	// one of a oneof: the last one counts
	v.Kind, v.Type, v.Shape = kind, 0, nil
	if kind != "tensor" && kind != "sparse_tensor" {
		return nil
	}
	return w.submessage(f, kind+"_type", func(g field) error {
		switch g.num {
		case 1:
			t, err := w.integer(g, "elem_type")
			v.Type = int32(t)
			return err
		case 2:
			v.Shape = nil
			return w.submessage(g, "shape", func(h field) error {
				if h.num != 1 {
					return nil
				}
				if len(v.Shape) >= maxRank {
					return w.fail(h.at, "dim", "more than %d dimensions", maxRank)
				}
				return w.dim(h, v)
			})
		}
		return nil
	})
}

func (w *walker) dim(f field, v *Value) error {
	d := Dim{Value: -1}
	err := w.submessage(f, "dim", func(g field) (err error) {
		switch g.num {
		case 1:
			d.Param = ""
			d.Value, err = w.integer(g, "dim_value")
		case 2:
			d.Value = -1
			d.Param, err = w.text(g, "dim_param")
		case 3:
			d.Denotation, err = w.text(g, "denotation")
		}
		return err
	})
	v.Shape = append(v.Shape, d)
	if err != nil {
		return err
	}
	return w.keep(f.at, 40)
}
