package epmodel

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// digestMagic starts the record that is hashed for a model with external data. It is no valid ONNX file, so no graph file's own
// digest can be that of a record.
const digestMagic = "\x00epcached model 1\n"

// Digest gives the identity of a model's content. m is what Read found in graph; open gives the file of each location, once for
// each; sum hashes. Nothing is closed.
//
// Without external data it is the BLAKE3 digest of the file, so b3sum agrees. With external data it is the BLAKE3 digest of this
// record, numbers being 8 bytes, little-endian:
//
//	digestMagic
//	digest of the graph file, 32 bytes; its size
//	number of external files
//	for each, in the byte order of their locations:
//	    number of ranges
//	    for each, in order of offset: offset, length, digest of its bytes
//
// The ranges are those of the file's tensors, with what overlaps or touches joined: so tied weights are hashed once, and a model
// cannot ask for one byte to be hashed a million times. The locations themselves are part of the graph. A tensor without a length
// counts to the end of its file; one with keys outside the schema (ORT's prepacked weights) makes the whole file count.
//
// A range beyond its file is a *FormatError that names tensor, file and numbers; errors of open and sum are returned wrapped.
func Digest(ctx context.Context, m *Model, graph Source, open func(location string) (Source, error), sum Sum) ([32]byte, error) {
	var none [32]byte
	if graph.Size() != m.Size {
		return none, m.wrong(-1, "", fmt.Sprintf("its size is %d and was %d: it changed while being read", graph.Size(), m.Size))
	}
	d, err := sum(ctx, graph, 0, m.Size)
	if err != nil {
		return none, fmt.Errorf("hash %s: %w", m.Name, err)
	}
	groups := m.byLocation()
	if len(groups) == 0 {
		return d, nil
	}
	rec := append([]byte(digestMagic), d[:]...)
	rec = binary.LittleEndian.AppendUint64(rec, uint64(m.Size))
	rec = binary.LittleEndian.AppendUint64(rec, uint64(len(groups)))
	for _, g := range groups {
		if rec, err = m.appendFile(ctx, rec, g, open, sum); err != nil {
			return none, err
		}
	}
	d, err = sum(ctx, bytes.NewReader(rec), 0, int64(len(rec)))
	if err != nil {
		return none, fmt.Errorf("hash %s: %w", m.Name, err)
	}
	return d, nil
}

// externalFile is a file with the tensors (their indices) that are in it.
type externalFile struct {
	location string
	tensors  []int
	whole    bool // all bytes count, whatever the tensors are
}

func (m *Model) byLocation() (files []externalFile) {
	at := map[string]int{}
	for i, location := range m.Locations() {
		at[location] = i
		files = append(files, externalFile{location: location})
	}
	for _, location := range m.Whole {
		files[at[location]].whole = true
	}
	for i, t := range m.Initializers {
		if t.Location != "" {
			f := &files[at[t.Location]]
			f.tensors = append(f.tensors, i)
		}
	}
	return files
}

func (m *Model) appendFile(ctx context.Context, rec []byte, file externalFile,
	open func(string) (Source, error), sum Sum) ([]byte, error) {
	src, err := open(file.location)
	if err != nil {
		return nil, fmt.Errorf("%s: external data %q: %w", m.Name, file.location, err)
	}
	spans, err := m.joined(file, src.Size())
	if err != nil {
		return nil, err
	}
	rec = binary.LittleEndian.AppendUint64(rec, uint64(len(spans)))
	for _, s := range spans {
		d, err := sum(ctx, src, s.off, s.n)
		if err != nil {
			return nil, fmt.Errorf("%s: hash external data %q, %d bytes from %d: %w", m.Name, file.location, s.n, s.off, err)
		}
		rec = binary.LittleEndian.AppendUint64(rec, uint64(s.off))
		rec = binary.LittleEndian.AppendUint64(rec, uint64(s.n))
		rec = append(rec, d[:]...)
	}
	return rec, nil
}

// joined gives the ranges of the tensors in a file of the given size, in order, what overlaps or touches made one.
func (m *Model) joined(file externalFile, size int64) ([]span, error) {
	all := make([]span, 0, len(file.tensors)+1)
	if file.whole {
		all = append(all, span{0, size})
	}
	for _, i := range file.tensors {
		t := m.Initializers[i]
		if err := t.fits(m.Name, size); err != nil {
			return nil, err
		}
		s := span{t.Offset, t.Length}
		if len(t.OtherKeys) > 0 {
			s = span{0, math.MaxInt64}
		}
		if s.n < 0 || s.n > size-s.off {
			s.n = size - s.off
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b span) int { return cmp.Compare(a.off, b.off) })
	out := all[:1]
	for _, s := range all[1:] {
		last := &out[len(out)-1]
		if s.off > last.end() {
			out = append(out, s)
			continue
		}
		last.n = max(last.end(), s.end()) - last.off
	}
	return out, nil
}
