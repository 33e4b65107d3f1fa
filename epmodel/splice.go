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
				if err == nil || err == io.EOF {
					err = io.ErrUnexpectedEOF
				}
				return fmt.Errorf("read at offset %d: %w", off, err)
			}
			if _, err := w.Write(b); err != nil {
				return err
			}
			off, left = off+int64(len(b)), left-int64(len(b))
		}
	}
	return nil
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

func (s *Splice) addBytes(b []byte) { s.add(bytes.NewReader(b)) }

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

func (s *Splice) addField(num protowire.Number, payload *Splice) {
	head := protowire.AppendTag(nil, num, protowire.BytesType)
	s.addBytes(protowire.AppendVarint(head, uint64(payload.size)))
	s.addSplice(payload)
}
