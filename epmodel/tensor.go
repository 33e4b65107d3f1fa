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
func (w *walker) tensor(f field, name string, t Initializer) {
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
	case dataInGraph: // external_data without this mark is not used by anybody
	case dataExternal:
		w.external(f, external, &t)
	default:
		w.fail(f.at, "data_location", "tensor %q: %d is neither 0 (in the model) nor 1 (external)", t.Name, location)
	}
	w.m.Initializers = append(w.m.Initializers, t)
	w.keep(f.at, 288)
}

// typed records data in a field of its element type. Packed in one piece, as all writers do, it has a range; in pieces it has not.
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
			w.fail(g.at, parts[g.num-1], "stands twice")
		}
		found[g.num-1] = g
	})
	if !found[0].present() {
		return
	}
	for i, part := range parts {
		if t.Part = part; found[i].present() {
			w.tensor(found[i], name+"."+part, t)
			t.Name = w.m.Initializers[len(w.m.Initializers)-1].Name
		}
	}
}

func (w *walker) external(f field, entries []field, t *Initializer) {
	// bytes in the graph file besides are ignored by ORT
	t.Offset, t.Length, t.Typed = 0, -1, false
	seen := map[string]bool{}
	for _, e := range entries {
		k, v := w.pair(e, "external_data")
		key := w.exact(k, "external_data.key", maxName)
		// readers differ in which of two would count, and the digest must cover what is read
		if seen[key] {
			w.fail(e.at, "external_data."+key, "tensor %q: stands twice", t.Name)
		}
		seen[key] = true
		if w.externalKey(v, key, t); w.err != nil {
			return
		}
	}
	if t.Location == "" {
		w.fail(f.at, "external_data.location", "tensor %q: its data is external, but no file is named", t.Name)
	}
	if t.Length > math.MaxInt64-t.Offset {
		w.fail(f.at, "external_data.length", "tensor %q: offset %d and length %d overflow", t.Name, t.Offset, t.Length)
	}
}

func (w *walker) externalKey(v field, key string, t *Initializer) {
	switch key {
	case "location":
		t.Location = w.exact(v, "external_data.location", maxPath)
		if why := badLocation(t.Location); why != "" {
			w.fail(v.at, "external_data.location", "tensor %q: file %q: %s", t.Name, t.Location, why)
		}
		if known, ok := w.files[t.Location]; ok {
			t.Location = known
		} else {
			w.files[t.Location] = t.Location
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
		w.fail(v.at, "external_data."+key, "tensor %q: %q is no number of bytes between 0 and 2^63-1", tensor, s)
	}
	return int64(n)
}
