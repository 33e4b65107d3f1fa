package epmodel

import (
	"math"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"
)

// maxKeys bounds the entries of one tensor's external_data: four in the schema, and a handful of ORT's.
const maxKeys = 256

// Values of TensorProto.data_location.
const (
	dataInGraph = iota
	dataExternal
)

// tensor appends a TensorProto to the initializers. t brings the place: graph, node, attribute, part.
func (w *walker) tensor(f field, name string, t Initializer) error {
	t.At = f.at
	var external []field
	location := int64(dataInGraph)
	err := w.submessage(f, name, func(g field) (err error) {
		switch g.num {
		case 1:
			t.Shape, err = w.integers(g, "dims", maxRank, t.Shape)
		case 2:
			var v int64
			v, err = w.integer(g, "data_type")
			t.Type = int32(v)
		case 4, 5, 6, 7, 10, 11:
			err = w.typed(g, &t)
		case 8:
			var s string
			s, err = w.text(g, "name")
			if t.Part == "" || s != "" {
				t.Name = s
			}
		case 9:
			t.Offset, t.Length = g.off, g.n
			err = w.want(g, "raw_data", protowire.BytesType)
		case 13:
			if len(external) >= maxKeys {
				return w.fail(g.at, "external_data", "more than %d entries", maxKeys)
			}
			external = append(external, g)
		case 14:
			location, err = w.integer(g, "data_location")
		}
		return err
	})
	if err != nil {
		return err
	}
	w.path = append(w.path, name)
	defer func() { w.path = w.path[:len(w.path)-1] }()
	for _, d := range t.Shape {
		if d < 0 {
			return w.fail(f.at, "dims", "tensor %q has a negative dimension, %d", t.Name, d)
		}
	}
	switch location {
	case dataInGraph: // external_data without this mark is not used by anybody
	case dataExternal:
		if err := w.external(f, external, &t); err != nil {
			return err
		}
	default:
		return w.fail(f.at, "data_location", "tensor %q: %d is neither 0 (in the model) nor 1 (external)", t.Name, location)
	}
	w.m.Initializers = append(w.m.Initializers, t)
	return w.keep(f.at, 288)
}

// typed records data in a field of its element type. Packed in one piece, as all writers do, it has a range; in pieces it has not.
func (w *walker) typed(f field, t *Initializer) error {
	if t.Typed {
		t.Length = 0
		return nil
	}
	t.Typed = true
	t.Offset = f.off
	if f.typ == protowire.BytesType && f.num != 6 { // string_data is one field for each string
		t.Length = f.n
	}
	return nil
}

// sparse reads a SparseTensorProto: two tensors under the name of the first.
func (w *walker) sparse(f field, name string, t Initializer) error {
	t.Sparse = true
	var values, indices field
	err := w.submessage(f, name, func(g field) error {
		if g.num != 1 && g.num != 2 {
			return nil
		}
		part, where := "values", &values
		if g.num == 2 {
			part, where = "indices", &indices
		}
		if where.num != 0 {
			return w.fail(g.at, part, "stands twice")
		}
		*where = g
		return nil
	})
	if err != nil || values.num == 0 {
		return err
	}
	first := len(w.m.Initializers)
	t.Part = "values"
	if err := w.tensor(values, name+".values", t); err != nil {
		return err
	}
	if indices.num == 0 {
		return nil
	}
	t.Part, t.Name = "indices", w.m.Initializers[first].Name
	return w.tensor(indices, name+".indices", t)
}

// external reads where a tensor's data stands outside the graph file.
func (w *walker) external(f field, entries []field, t *Initializer) error {
	// bytes in the graph file besides are ignored by ORT
	t.Offset, t.Length, t.Typed = 0, -1, false
	seen := map[string]bool{}
	for _, e := range entries {
		k, v, err := w.pair(e, "external_data")
		if err != nil {
			return err
		}
		key, err := w.exact(k, "external_data.key", maxName)
		if err != nil {
			return err
		}
		// readers differ in which of two would count, and the digest must cover what is read
		if seen[key] {
			return w.fail(e.at, "external_data."+key, "tensor %q: stands twice", t.Name)
		}
		seen[key] = true
		if err := w.externalKey(v, key, t); err != nil {
			return err
		}
	}
	if t.Location == "" {
		return w.fail(f.at, "external_data.location", "tensor %q: its data is external, but no file is named", t.Name)
	}
	if t.Length > math.MaxInt64-t.Offset {
		return w.fail(f.at, "external_data.length", "tensor %q: offset %d and length %d overflow", t.Name, t.Offset, t.Length)
	}
	return nil
}

func (w *walker) externalKey(v field, key string, t *Initializer) (err error) {
	switch key {
	case "location":
		if t.Location, err = w.exact(v, "external_data.location", maxPath); err != nil {
			return err
		}
		if why := badLocation(t.Location); why != "" {
			return w.fail(v.at, "external_data.location", "tensor %q: file %q: %s", t.Name, t.Location, why)
		}
		if known, ok := w.files[t.Location]; ok {
			t.Location = known
		} else {
			w.files[t.Location] = t.Location
		}
	case "offset":
		t.Offset, err = w.decimal(v, key, t.Name)
	case "length":
		// the onnx package and ORT both take 0 for "not given", and read by the tensor's shape
		if t.Length, err = w.decimal(v, key, t.Name); t.Length == 0 {
			t.Length = -1
		}
	case "checksum":
		// ORT never checks it
	default:
		t.OtherKeys = append(t.OtherKeys, key)
	}
	return err
}

// decimal reads a number that ONNX writes as text.
func (w *walker) decimal(v field, key, tensor string) (int64, error) {
	s, err := w.exact(v, "external_data."+key, 64)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(s, 10, 63)
	if err != nil {
		return 0, w.fail(v.at, "external_data."+key, "tensor %q: %q is no number of bytes between 0 and 2^63-1", tensor, s)
	}
	return int64(n), nil
}
