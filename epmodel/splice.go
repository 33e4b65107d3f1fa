package epmodel

import (
	"bytes"
	"context"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protowire"
)

// Splice is a file that is put together from spans of others and a few new bytes. Nothing of it is in memory but the plan.
type Splice struct {
	base   io.ReaderAt // the file that is rewritten
	pieces []piece
	size   int64
}

// piece is n bytes from off, of src or else of the file that is rewritten.
type piece struct {
	src    io.ReaderAt
	off, n int64
}

// spliceBuffer is large enough that a copy costs the memory's speed and not the calls'.
const spliceBuffer = 1 << 20

// Size is the length of the file in bytes.
func (s *Splice) Size() int64 { return s.size }

// WriteTo writes the file. What ended before its time since the plan was made is an error, as is a cancelled ctx.
func (s *Splice) WriteTo(ctx context.Context, w io.Writer) error {
	buf := make([]byte, min(spliceBuffer, max(s.size, 1)))
	for _, p := range s.pieces {
		if p.src == nil {
			p.src = s.base
		}
		for off, left := p.off, p.n; left > 0; {
			if err := ctx.Err(); err != nil {
				return err
			}
			b := buf[:min(left, int64(len(buf)))]
			if n, err := p.src.ReadAt(b, off); n < len(b) {
				return fmt.Errorf("read at offset %d: %w", off, unexpectedEnd(err))
			}
			if _, err := w.Write(b); err != nil {
				return err
			}
			off, left = off+int64(len(b)), left-int64(len(b))
		}
	}
	return nil
}

func unexpectedEnd(err error) error {
	if err == nil || err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// keep appends n bytes of the file that is rewritten; what goes on where the last piece ended becomes one with it.
func (s *Splice) keep(off, n int64) {
	s.size += n
	if last := len(s.pieces) - 1; last >= 0 && s.pieces[last].src == nil && s.pieces[last].off+s.pieces[last].n == off {
		s.pieces[last].n += n
		return
	}
	s.pieces = append(s.pieces, piece{nil, off, n})
}

func (s *Splice) add(src Source) {
	s.pieces = append(s.pieces, piece{src, 0, src.Size()})
	s.size += src.Size()
}

func (s *Splice) addSplice(t *Splice) {
	for _, p := range t.pieces {
		if p.src == nil {
			s.keep(p.off, p.n)
			continue
		}
		s.pieces, s.size = append(s.pieces, p), s.size+p.n
	}
}

// addField appends a length-delimited field with a new payload. Its length is written in the shortest form.
func (s *Splice) addField(num protowire.Number, payload *Splice) {
	head := protowire.AppendTag(nil, num, protowire.BytesType)
	s.add(bytes.NewReader(protowire.AppendVarint(head, uint64(payload.size))))
	s.addSplice(payload)
}

// splicer rewrites single nodes of a model. Everything else is copied as it stands, to the byte; of the messages around a change
// the lengths alone are written anew.
type splicer struct {
	*reader
	change map[int64]func(node field) (*Splice, error) // gives the new payload of the NodeProto that begins at an offset
}

// message rewrites a message. at are the offsets of the nodes in it that change, ascending.
func (r *splicer) message(s span, at []int64) (*Splice, error) {
	out := new(Splice)
	err := r.reader.message(s, "", func(f field) error {
		inside := 0
		for inside < len(at) && at[inside] < f.end() {
			inside++
		}
		if inside == 0 {
			out.keep(f.at, f.end()-f.at)
			return nil
		}
		payload, err := r.payload(f, at[:inside])
		if err != nil {
			return err
		}
		at = at[inside:]
		out.addField(f.num, payload)
		return nil
	})
	return out, err
}

// payload rewrites what a field holds: a node that changes, or a message with such nodes further down.
func (r *splicer) payload(f field, at []int64) (*Splice, error) {
	if err := r.want(f, fmt.Sprintf("field %d", f.num), protowire.BytesType); err != nil {
		return nil, err
	}
	change := r.change[f.at]
	switch {
	case change == nil:
		r.path = append(r.path, fmt.Sprintf("field %d", f.num)) // counts towards the depth
		defer func() { r.path = r.path[:len(r.path)-1] }()
		return r.message(f.span, at)
	case len(at) > 1:
		return nil, r.fail(f.at, "node", "an EPContext node stands in a subgraph of another")
	}
	return change(f)
}
