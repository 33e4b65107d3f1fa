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

// digestMagic starts the record that is hashed for a model with external data. It is not valid
// ONNX, so a record never has the digest of a graph file.
const digestMagic = "\x00epcached model 1\n"

// Digest returns the identity of a model's content. m is the result of Read for graph. open opens
// the file of each location, and is called once for each; sum hashes. Digest closes no files.
//
// Without external data it is the BLAKE3 digest of the file, so b3sum agrees. With external data it
// is the BLAKE3 digest of this record, numbers being 8 bytes, little-endian:
//
//	digestMagic
//	digest of the graph file, 32 bytes; its size
//	number of external files
//	for each, in the byte order of their locations:
//	    number of ranges
//	    for each, in order of offset: offset, length, digest of its bytes
//
// The ranges are those of the file's tensors, with what overlaps or touches joined: so tied weights
// are hashed once, and a hostile model cannot have one byte hashed a million times. The locations
// themselves are part of the graph. A tensor without a length counts to the end of its file; one
// with keys outside the schema (ORT's prepacked weights) makes the whole file count.
//
// A range beyond its file is a *FormatError that names tensor, file and numbers; errors of open and
// sum are returned wrapped.
func Digest(ctx context.Context, m *Model, graph Source, open func(location string) (Source, error),
	sum Sum) ([32]byte, error) {
	var none [32]byte
	if graph.Size() != m.Size {
		return none, m.formatErrorAt(-1, "",
			fmt.Sprintf("its size is %d and was %d: it changed while being read",
				graph.Size(), m.Size))
	}
	d, err := sum(ctx, graph, 0, m.Size)
	if err != nil {
		return none, fmt.Errorf("hash %s: %w", m.Name, err)
	}
	if len(m.External)+len(m.Whole) == 0 {
		return d, nil
	}
	err = withGate(ctx, m.Name, func(most int64, leave func()) error {
		files, err := m.byLocation(ctx, graph, most)
		if err != nil {
			return err
		}
		if most == smallKept {
			leave() // hashing may take long
		}
		rec := append([]byte(digestMagic), d[:]...)
		rec = binary.LittleEndian.AppendUint64(rec, uint64(m.Size))
		rec = binary.LittleEndian.AppendUint64(rec, uint64(len(files)))
		for _, f := range files {
			if rec, err = m.appendFile(ctx, rec, f, open, sum); err != nil {
				return err
			}
		}
		if d, err = sum(ctx, bytes.NewReader(rec), 0, int64(len(rec))); err != nil {
			return fmt.Errorf("hash %s: %w", m.Name, err)
		}
		return nil
	})
	return d, err
}

// spansOf is a file with the ranges of its tensors.
type spansOf struct {
	location string
	tensors  *ExternalFile // nil: only the whole file counts
	spans    []span        // a range beyond the end means to the end
}

// byLocation walks the graph again, because a Model has no tensors, and returns only ranges, which
// take little memory.
func (m *Model) byLocation(ctx context.Context, graph Source, most int64) (files []spansOf,
	err error) {
	at := map[string]int{}
	for i, location := range m.Locations() {
		at[location] = i
		files = append(files, spansOf{location: location})
	}
	for i, f := range m.External {
		files[at[f.Location]].tensors = &m.External[i]
	}
	for _, location := range m.Whole {
		f := &files[at[location]]
		f.spans = append(f.spans, span{0, math.MaxInt64})
	}
	if len(m.External) == 0 {
		return files, nil
	}
	_, err = walk(ctx, m.Name, graph, most, func(w *walker, t *Initializer) {
		i, known := at[t.Location]
		switch {
		case t.Location == "":
		case !known || files[i].tensors == nil:
			w.fail(t.At, "external_data", "%s", changedWhileRead)
		case files[i].add(t):
			w.chargeMemory(t.At, 8)
		}
	})
	return files, err
}

// add adds the range of a tensor, and reports whether that took memory.
func (f *spansOf) add(t *Initializer) bool {
	s := span{t.Offset, t.Length}
	switch {
	case len(t.OtherKeys) > 0:
		s = span{0, math.MaxInt64}
	case s.n < 0:
		s.n = math.MaxInt64 - s.off
	}
	if n := len(f.spans); n > 0 && f.spans[n-1].end() == s.off {
		f.spans[n-1].n += s.n
		return false
	}
	f.spans = append(f.spans, s)
	return true
}

const changedWhileRead = "it changed while being read"

func (m *Model) appendFile(ctx context.Context, rec []byte, file spansOf,
	open func(string) (Source, error), sum Sum) ([]byte, error) {
	src, err := open(file.location)
	if err != nil {
		return nil, fmt.Errorf("%s: external data %q: %w", m.Name, file.location, err)
	}
	if file.tensors != nil {
		if err := file.tensors.checkSize(m.Name, src.Size()); err != nil {
			return nil, err
		}
	}
	spans, err := m.joined(file.spans, src.Size())
	if err != nil {
		return nil, err
	}
	rec = binary.LittleEndian.AppendUint64(rec, uint64(len(spans)))
	for _, s := range spans {
		d, err := sum(ctx, src, s.off, s.n)
		if err != nil {
			return nil, fmt.Errorf("%s: hash external data %q, %d bytes from %d: %w", m.Name,
				file.location, s.n, s.off, err)
		}
		rec = binary.LittleEndian.AppendUint64(rec, uint64(s.off))
		rec = binary.LittleEndian.AppendUint64(rec, uint64(s.n))
		rec = append(rec, d[:]...)
	}
	return rec, nil
}

// joined returns a file's ranges in order, joined where they overlap or touch; size is the file's.
func (m *Model) joined(all []span, size int64) ([]span, error) {
	slices.SortFunc(all, func(a, b span) int { return cmp.Compare(a.off, b.off) })
	out := all[:0]
	for _, s := range all {
		if s.off > size {
			return nil, m.formatErrorAt(-1, "", changedWhileRead)
		}
		s.n = min(s.n, size-s.off)
		if n := len(out); n > 0 && s.off <= out[n-1].end() {
			out[n-1].n = max(out[n-1].end(), s.end()) - out[n-1].off
		} else {
			out = append(out, s)
		}
	}
	return out, nil
}
