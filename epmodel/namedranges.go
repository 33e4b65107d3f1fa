package epmodel

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// Named is a range of a file that has a name.
type Named struct {
	Name  string
	Kind  string // one of the kinds below
	Type  string // of a tensor, as the file says: "f32", "FLOAT"; may be empty
	Shape string // of a tensor: "768x768"; "" for a scalar, or where it is not known
	Range
}

// The kinds of ranges.
const (
	TensorKind    = "tensor"
	PartitionKind = "partition" // the compiled code of one EPContext node
	GraphKind     = "graph"     // OpenVINO's description of the computation
	HeadKind      = "head"      // the container's own records
	WeightsKind   = "weights"   // weights that several partitions share
)

const maxNamed = 1 << 16 // bounds the ranges of one file. Large models have some thousands

const maxRangeName = 256

// NamedRanges lists the ranges of a context binary, or of any other file beside a graph, that have
// names, ordered by offset; a range within another follows it. OpenVINO's container and the
// compiled model of its CPU device name partitions and tensors; other binaries have no names, which
// is no error. A range that does not fit is a *FormatError.
func NamedRanges(ctx context.Context, name string, bin Source) ([]Named, error) {
	c, err := readContainer(name, bin)
	if c == nil || err != nil {
		return nil, err
	}
	out := append([]Named{{Name: "header", Kind: HeadKind, Range: Range{0, openvinoHeader}},
		{Name: "metadata", Kind: HeadKind, Range: c.position}}, c.blobs...)
	for _, blob := range c.blobs {
		found, err := compiledRanges(ctx, name, bin, blob.Range)
		if err != nil {
			return nil, err
		}
		if out = append(out, found...); len(out) > maxNamed {
			return nil, &FormatError{name, blob.Offset, "xml",
				fmt.Sprintf("more than %d named ranges", maxNamed)}
		}
	}
	SortNamed(out)
	return out, nil
}

// NamedTensors reads a model, and lists tensors in the graph's file, and contexts in its nodes.
func NamedTensors(ctx context.Context, name string, graph Source) (m *Model, out []Named,
	err error) {
	err = withGate(ctx, name, func(most int64, _ func()) error {
		out = nil
		m, err = walk(ctx, name, graph, most, func(w *walker, t *Initializer) {
			if t.Location == "" && t.Length > 0 && len(out) < maxNamed {
				out = append(out, t.named(Range{t.Offset, t.Length}))
				w.chargeMemory(t.At, 128+3*len(out[len(out)-1].Name))
			}
		})
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	for _, c := range m.Contexts {
		if c.Inline.Length > 0 && len(out) < maxNamed {
			out = append(out, Named{Name: shortName(c.PartitionName), Kind: PartitionKind,
				Range: c.Inline})
		}
	}
	SortNamed(out)
	return m, out, nil
}

// named names a range that has the tensor. A constant without a name has that of its node.
func (t *Initializer) named(r Range) Named {
	return Named{Name: shortName(cmp.Or(t.Name, t.Node)), Kind: TensorKind, Type: typeName(t.Type),
		Shape: shapeText(t.Shape), Range: r}
}

// SortNamed orders ranges by their offsets; a range within another follows it.
func SortNamed(all []Named) {
	slices.SortStableFunc(all, func(a, b Named) int {
		return cmp.Or(cmp.Compare(a.Offset, b.Offset), cmp.Compare(b.Length, a.Length))
	})
}

// The format that OpenVINO exports for its CPU device, as of 2026.4. Numbers are little-endian:
//
//	0   "RR_UPCVO"
//	8   version, 4 bytes (1)
//	12  n, 8 bytes: length of a text that says what the blob needs
//	20  the text
//	.   six numbers of 8 bytes: offset and size of settings, of constants, and of the model, from
//	    here on
//
// The model is OpenVINO's XML, masked with a fixed key. Its layers of the type Const have their
// place among the constants.
const (
	compiledMagic = "RR_UPCVO"
	maxNeeds      = 1 << 16
	maxXML        = 64 << 20
)

var compiledMask = []byte{0x30, 0x60, 0x70, 0x02, 0x04, 0x08, 0x3f, 0x6f, 0x72, 0x74, 0x78, 0x7f}

func compiledRanges(ctx context.Context, name string, bin Source, blob Range) ([]Named, error) {
	var h [20]byte
	if blob.Length < int64(len(h)) {
		return nil, nil
	}
	if err := readAt(name, bin, h[:], blob.Offset); err != nil {
		return nil, err
	}
	if string(h[:8]) != compiledMagic || binary.LittleEndian.Uint32(h[8:]) != 1 {
		return nil, nil
	}
	needs := binary.LittleEndian.Uint64(h[12:])
	if needs > maxNeeds || int64(needs)+20+48 > blob.Length {
		return nil, &FormatError{name, blob.Offset + 12, "needs",
			fmt.Sprintf("a text of %d bytes in a blob of %d", needs, blob.Length)}
	}
	at := blob.Offset + 20 + int64(needs)
	var places [48]byte
	if err := readAt(name, bin, places[:], at); err != nil {
		return nil, err
	}
	part := func(i int, field string) (Range, error) {
		off, n := binary.LittleEndian.Uint64(places[16*i:]),
			binary.LittleEndian.Uint64(places[16*i+8:])
		if left := uint64(blob.Offset + blob.Length - at); off > left || n > left-off {
			return Range{}, &FormatError{name, at + int64(16*i), field,
				fmt.Sprintf("%d bytes from %d reach beyond the %d of the blob", n, off, left)}
		}
		return Range{at + int64(off), int64(n)}, nil
	}
	constants, err := part(1, "constants")
	if err != nil {
		return nil, err
	}
	model, err := part(2, "model")
	if err != nil {
		return nil, err
	}
	if model.Length > maxXML {
		return nil, &FormatError{name, model.Offset, "model",
			fmt.Sprintf("%d bytes long, more than %d", model.Length, maxXML)}
	}
	out := []Named{{Name: "model", Kind: GraphKind, Range: model}}
	tensors, err := constantsOf(ctx, name, bin, model, constants)
	return append(out, tensors...), err
}

func readAt(name string, bin Source, p []byte, off int64) error {
	if n, err := bin.ReadAt(p, off); n < len(p) {
		return fmt.Errorf("%s: read at offset %d: %w", name, off, err)
	}
	return nil
}

type unmasked struct {
	r   io.Reader
	key []byte
	at  int
}

func (u *unmasked) Read(p []byte) (int, error) {
	n, err := u.r.Read(p)
	for i := range p[:n] {
		p[i] ^= u.key[u.at%len(u.key)]
		u.at++
	}
	return n, err
}

func constantsOf(ctx context.Context, name string, bin Source, model,
	constants Range) ([]Named, error) {
	begin := make([]byte, min(model.Length, int64(len("<?xml"))))
	if err := readAt(name, bin, begin, model.Offset); err != nil {
		return nil, err
	}
	in := &watchedReader{r: io.NewSectionReader(bin, model.Offset, model.Length)}
	var text io.Reader = in
	if !bytes.Equal(begin, []byte("<?xml")) {
		text = &unmasked{r: in, key: compiledMask}
		for i := range begin {
			begin[i] ^= compiledMask[i]
		}
		if !bytes.Equal(begin, []byte("<?xml")) {
			return nil, nil // masked with another key, so the names are unknown
		}
	}
	d := xml.NewDecoder(text)
	var out []Named
	layer, constant := "", false
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		token, err := d.RawToken()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			if in.err != nil {
				return nil, fmt.Errorf("%s: read: %w", name, in.err)
			}
			return nil, &FormatError{name, model.Offset + d.InputOffset(), "xml", err.Error()}
		}
		start, ok := token.(xml.StartElement)
		switch {
		case !ok:
		case start.Name.Local == "layer":
			layer, constant = attribute(start, "name"), attribute(start, "type") == "Const"
		case start.Name.Local == "data" && constant:
			constant = false
			t, err := constantAt(start, constants)
			if err != nil {
				return nil, &FormatError{name, model.Offset + d.InputOffset(), "data",
					fmt.Sprintf("layer %.80q: %v", layer, err)}
			}
			if t.Length == 0 {
				continue
			}
			t.Name = shortName(layer)
			if out = append(out, t); len(out) > maxNamed {
				return nil, &FormatError{name, model.Offset + d.InputOffset(), "xml",
					fmt.Sprintf("more than %d constants", maxNamed)}
			}
		}
	}
}

func constantAt(e xml.StartElement, constants Range) (Named, error) {
	off, err := strconv.ParseUint(attribute(e, "offset"), 10, 63)
	if err != nil {
		return Named{}, fmt.Errorf("offset %.40q is not a number", attribute(e, "offset"))
	}
	n, err := strconv.ParseUint(attribute(e, "size"), 10, 63)
	if err != nil {
		return Named{}, fmt.Errorf("size %.40q is not a number", attribute(e, "size"))
	}
	if all := uint64(constants.Length); off > all || n > all-off {
		return Named{}, fmt.Errorf("%d bytes from %d reach beyond the %d of all constants",
			n, off, all)
	}
	shape := strings.ReplaceAll(strings.ReplaceAll(attribute(e, "shape"), " ", ""), ",", "x")
	return Named{Kind: TensorKind, Type: shortName(attribute(e, "element_type")),
		Shape: shortName(shape), Range: Range{constants.Offset + int64(off), int64(n)}}, nil
}

func attribute(e xml.StartElement, name string) string {
	for _, a := range e.Attr {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

func shortName(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxRangeName)], "") }

func shapeText(shape []int64) string {
	var sizes []string
	for _, n := range shape {
		sizes = append(sizes, strconv.FormatInt(n, 10))
	}
	return strings.Join(sizes, "x")
}

// typeNames are those of TensorProto.DataType, in its order.
var typeNames = []string{"", "float", "uint8", "int8", "uint16", "int16", "int32", "int64",
	"string", "bool", "float16", "double", "uint32", "uint64",
	"complex64", "complex128", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2",
	"float8e5m2fnuz", "uint4", "int4", "float4e2m1"}

func typeName(t int32) string {
	if t > 0 && int(t) < len(typeNames) {
		return typeNames[t]
	}
	return ""
}
