package weights

import (
	"context"
	"hash/maphash"

	"github.com/epcached/epcached/epmodel"
)

const (
	window = 1 << 20 // of the binary, at a time
	// spend bounds what is hashed in vain: so many times the binary. A binary that was made for that is not gone through to its end.
	spend = 8
	// maxFound bounds what is found of one binary.
	maxFound = 1 << 16
)

// Find looks for the weights in a range of a binary, and gives what stands there, in order and apart from each other;
// a tensor may have several ranges. Errors are those of ctx and of reading.
func (x *Index) Find(ctx context.Context, bin epmodel.Source, within epmodel.Range) ([]epmodel.Named, error) {
	s := &search{Index: x, left: spend*within.Length + window}
	buf := make([]byte, max(0, min(window+2*tileBytes, within.Length)))
	for at := int64(0); at < within.Length && s.left > 0 && len(s.out) < maxFound; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		b := buf[:min(int64(len(buf)), within.Length-at)]
		if err := readFull(bin, b, within.Offset+at); err != nil {
			return nil, err
		}
		at += s.window(b, within.Offset+at, at+int64(len(b)) == within.Length)
	}
	return s.out, nil
}

type search struct {
	*Index
	left int64 // bytes that may still be hashed in vain
	out  []epmodel.Named

	// The latest that was found.
	form  *form
	unit  int // in the form
	delta int // from the one before it; 1 at first
	end   int64
}

// window goes through b, which stands at, and returns how far it came: all of it if nothing follows, else as far as whole units are there.
func (s *search) window(b []byte, at int64, last bool) int64 {
	to := len(b)
	if !last {
		to = window
	}
	i := 0
	for i < to && s.left > 0 && len(s.out) < maxFound {
		n := s.following(b[i:], at+int64(i))
		if n == 0 {
			n = s.anywhere(b[i:], at+int64(i))
		}
		i += max(n, 1)
	}
	return int64(i)
}

// following tries what comes next after what was found just before, and returns its length.
func (s *search) following(b []byte, at int64) int {
	if s.form == nil || at != s.end {
		return 0
	}
	f, next := s.form, s.unit+s.delta
	if next < 0 || next >= f.count {
		return 0
	}
	n := f.size(next)
	if len(b) < n {
		return 0
	}
	if maphash.Bytes(s.seed, b[:n]) != s.units[f.first+next].sum {
		s.left -= int64(n)
		return 0
	}
	s.found(f, next, at, n)
	return n
}

func (s *search) anywhere(b []byte, at int64) int {
	if len(b) < leastUnit {
		return 0
	}
	h := hashOf(b)
	if bit := s.bit(h); s.filter[bit/64]>>(bit%64)&1 == 0 {
		return 0
	}
	for u := s.heads[h&uint64(len(s.heads)-1)]; u != 0; u = s.units[u-1].next {
		f := s.formOf(int(u - 1))
		i := int(u-1) - f.first
		n := f.size(i)
		if len(b) < n {
			continue
		}
		if maphash.Bytes(s.seed, b[:n]) == s.units[u-1].sum {
			s.found(f, i, at, n)
			return n
		}
		s.left -= int64(n)
	}
	return 0
}

// found adds a unit to what was found, or to the latest of it.
func (s *search) found(f *form, i int, at int64, n int) {
	length := int64(n)
	if s.form == f && s.end == at {
		s.delta = i - s.unit
		s.out[len(s.out)-1].Length += length
	} else {
		s.delta = 1
		s.out = append(s.out, f.tensor.Named(f.name, epmodel.Range{Offset: at, Length: length}))
	}
	s.form, s.unit, s.end = f, i, at+length
}
