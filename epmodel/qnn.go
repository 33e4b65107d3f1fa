package epmodel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// QNN's context binary for its HTP backend, as of SDK 2.49 to 2.51. Numbers are little-endian:
//
//	 0  00 00 00 02  00 00 00 03
//	24  offset of the backend's part, 8 bytes
//	32  its size, 8 bytes
//
// What stands between tells of graphs, and of their inputs and outputs. The backend's part:
//
//	 0  4, 8 bytes; 0, 8 bytes
//	16  version, 8 bytes (4 with SDK 2.49, 6 with 2.51)
//	24  n, 8 bytes: length of what follows
//	32  a flatbuffer of n bytes; its root's third field is a vector of sections
//
// A section has a name, a size, an alignment, another number, and its offset from the beginning of the part. "ROOT" lists graphs and some of
// their nodes, "PICKLE/<number>/<graph>" is what the graph was compiled to, with its weights, and "WEIGHTS/<number>" has those that several
// graphs share. No tensor has a name of its own, nor is there a table of weights.
const (
	qnnMagic     = "\x00\x00\x00\x02\x00\x00\x00\x03"
	qnnHeader    = 40
	qnnPart      = 32
	maxQNNTable  = 1 << 20
	qnnPartition = "PICKLE/"
	qnnShared    = "WEIGHTS/"
)

func qnnRanges(name string, bin Source) ([]Named, error) {
	var h [qnnHeader]byte
	if bin.Size() < int64(len(h)) {
		return nil, nil
	}
	if err := readAt(name, bin, h[:], 0); err != nil || string(h[:8]) != qnnMagic {
		return nil, err
	}
	off, size := binary.LittleEndian.Uint64(h[24:]), binary.LittleEndian.Uint64(h[32:])
	if all := uint64(bin.Size()); off > all || size > all-off || size < qnnPart {
		return nil, &FormatError{name, 24, "backend", fmt.Sprintf("%d bytes from %d reach beyond the file of %d, or are too few", size, off, all)}
	}
	var p [qnnPart]byte
	if err := readAt(name, bin, p[:], int64(off)); err != nil {
		return nil, err
	}
	if binary.LittleEndian.Uint64(p[0:]) != 4 || binary.LittleEndian.Uint64(p[8:]) != 0 {
		return nil, nil // another backend's
	}
	n := binary.LittleEndian.Uint64(p[24:])
	if n > size-qnnPart || n > maxQNNTable {
		return nil, &FormatError{name, int64(off) + 24, "sections", fmt.Sprintf("%d bytes in a part of %d", n, size)}
	}
	b := make([]byte, n)
	if err := readAt(name, bin, b, int64(off)+qnnPart); err != nil {
		return nil, err
	}
	sections, err := qnnSections(b)
	if err != nil {
		return nil, &FormatError{name, int64(off) + qnnPart, "sections", err.Error()}
	}
	out := []Named{{Name: "header", Kind: HeadKind, Range: Range{0, int64(off)}}}
	for _, s := range sections {
		if s.offset > size || s.size > size-s.offset {
			return nil, &FormatError{name, int64(off) + qnnPart, "sections", fmt.Sprintf("section %.80q: %d bytes from %d reach beyond the %d of the part", s.name, s.size, s.offset, size)}
		}
		one := Named{Name: s.name, Kind: HeadKind, Range: Range{int64(off + s.offset), int64(s.size)}}
		switch {
		case strings.HasPrefix(s.name, qnnPartition):
			one.Kind = PartitionKind
			if _, graph, ok := strings.Cut(s.name[len(qnnPartition):], "/"); ok {
				one.Name = graph
			}
		case strings.HasPrefix(s.name, qnnShared):
			one.Kind = WeightsKind
		}
		one.Name = shortName(one.Name)
		out = append(out, one)
	}
	return out, nil
}

type qnnSection struct {
	name         string
	size, offset uint64
}

func qnnSections(b []byte) (out []qnnSection, err error) {
	root, err := flatTable(b, 0)
	if err != nil {
		return nil, err
	}
	at, err := root.field(2, 4)
	if err != nil || at == 0 {
		return nil, err
	}
	at, n, err := flatVector(b, at)
	if err != nil || n > len(b)/4 { // as many offsets
		return nil, errors.Join(err, errors.New("a vector that reaches beyond the end"))
	}
	for i := range n {
		t, err := flatTable(b, at+4*i)
		if err != nil {
			return nil, err
		}
		s := qnnSection{}
		if s.size, err = t.number(1); err != nil {
			return nil, err
		}
		if s.offset, err = t.number(4); err != nil {
			return nil, err
		}
		if at, err := t.field(0, 4); err != nil {
			return nil, err
		} else if at > 0 {
			from, length, err := flatVector(b, at)
			if err != nil || length > min(len(b)-from, maxPath) {
				return nil, errors.Join(err, errors.New("a name that reaches beyond the end, or is too long"))
			}
			s.name = string(b[from : from+length])
		}
		out = append(out, s)
	}
	return out, nil
}

type table struct {
	b      []byte
	at     int // of the table
	fields int // offset of the places of its fields
	count  int
}

func flatOffset(b []byte, at int) (int, error) {
	if at < 0 || at > len(b)-4 {
		return 0, fmt.Errorf("an offset at %d, beyond the end", at)
	}
	to := int64(at) + int64(binary.LittleEndian.Uint32(b[at:]))
	if to > int64(len(b)-4) {
		return 0, fmt.Errorf("an offset at %d leads to %d, beyond the end", at, to)
	}
	return int(to), nil
}

func flatTable(b []byte, at int) (t table, err error) {
	if t.at, err = flatOffset(b, at); err != nil {
		return t, err
	}
	v := int64(t.at) - int64(int32(binary.LittleEndian.Uint32(b[t.at:])))
	if v < 0 || v > int64(len(b)-4) {
		return t, fmt.Errorf("a table at %d without its description", t.at)
	}
	length := int(binary.LittleEndian.Uint16(b[v:]))
	if length < 4 || length > len(b)-int(v) {
		return t, fmt.Errorf("a table at %d whose description has %d bytes", t.at, length)
	}
	t.b, t.fields, t.count = b, int(v)+4, (length-4)/2
	return t, nil
}

// field gives the place of a field of so many bytes; 0: the table has none.
func (t *table) field(i, size int) (int, error) {
	if i >= t.count {
		return 0, nil
	}
	off := int(binary.LittleEndian.Uint16(t.b[t.fields+2*i:]))
	if off == 0 {
		return 0, nil
	}
	if off > len(t.b)-size-t.at {
		return 0, fmt.Errorf("field %d of the table at %d lies beyond the end", i, t.at)
	}
	return t.at + off, nil
}

func (t *table) number(i int) (uint64, error) {
	at, err := t.field(i, 8)
	if at == 0 || err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(t.b[at:]), nil
}

// flatVector gives the place of the elements of a vector or text that the offset at leads to, and how many there are.
func flatVector(b []byte, at int) (from, n int, err error) {
	if from, err = flatOffset(b, at); err != nil {
		return 0, 0, err
	}
	count := binary.LittleEndian.Uint32(b[from:])
	if uint64(count) > uint64(len(b)) {
		return 0, 0, fmt.Errorf("a vector at %d of %d elements", from, count)
	}
	return from + 4, int(count), nil
}
