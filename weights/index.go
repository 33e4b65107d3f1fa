// Package weights finds the tensors of an ONNX model in what a compiler made of it, for people who want to know what a context binary
// consists of. Binaries of most execution providers name nothing that is in them; but weights stand in them as they are, or in one of
// few other forms, and those can be made of the model and looked for.
//
// What is found is there: every byte of it was compared, by a hash of 64 bits with a key of its own. What stands in a form that is not
// known here (quantised, folded into other tensors) is not found, and no guess is made. Of tensors with the same bytes one is named.
//
// Nothing here decides what is stored, or how.
package weights

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"

	"github.com/epcached/epcached/epmodel"
)

// Model is a source model, its graph read.
type Model struct {
	*epmodel.Model
	Graph    epmodel.Source
	External map[string]epmodel.Source // by location; what is not there is not looked for
}

const (
	// maxUnits bounds the memory of an Index: 24 bytes each, or 33. A model of 6 GiB of float32 has as many.
	maxUnits = 1 << 22
	// maxSame bounds how many units that begin alike are told apart.
	maxSame = 4
	// beginning is how much of a unit it is found by.
	beginning = 16
)

// ErrTooLarge means that the models have more weights than are looked for.
var ErrTooLarge = errors.New("its source model is too large to be looked for in it")

// Index has the weights of some models, to be found in binaries. It takes 100 MiB at most, and 1 MiB for 10 MiB of
// weights else.
type Index struct {
	seed    maphash.Seed
	tensors []tensor
	forms   []form
	units   []unit
	heads   []uint32 // by beginning: 1 + the first unit that begins so
	filter  []uint64 // a bit for each beginning; one that is not set is none
}

type unit struct {
	sum  uint64
	next uint32 // 1 + the next one that begins alike
}

// NewIndex reads the weights of the models, all of them once or twice. What a model says of its tensors and does not fit is left out.
func NewIndex(ctx context.Context, models ...Model) (*Index, error) {
	x := &Index{seed: maphash.MakeSeed()}
	for i := range models {
		x.tensors = append(x.tensors, models[i].tensors()...)
	}
	if x.plan(true) != nil {
		if err := x.plan(false); err != nil {
			return nil, err
		}
	}
	for i := 0; i < len(x.forms); i++ {
		f := &x.forms[i]
		var err error
		if f.name != Float16Tiles {
			err = f.tensor.flat(ctx, f, func(i int, b []byte) { x.add(f.first+i, b) })
		} else { // both orders in one go
			i++
			err = f.tensor.tiled(ctx, func(at int, rows, columns []byte) {
				x.add(f.first+at, rows)
				x.add(f.first+f.count+at, columns)
			})
		}
		if err != nil {
			return nil, fmt.Errorf("read %.200q: %w", f.tensor.Name, err)
		}
	}
	return x, nil
}

func (m *Model) tensors() (out []tensor) {
	for _, one := range m.Initializers {
		t := tensor{Initializer: one, data: m.Graph, at: one.Offset, length: one.Length}
		size := m.Size
		if one.Location != "" {
			source, ok := m.External[one.Location]
			if !ok {
				continue
			}
			if t.data, size = source, source.Size(); t.length < 0 {
				t.length = size - t.at
			}
		}
		if t.length < leastUnit || t.at < 0 || t.at > size-t.length {
			continue
		}
		if sizeOf(one.Type) > 0 {
			if n, known := one.Bytes(); !known || n != t.length {
				t.Type = 0 // bytes
			} else if m, ok := matrixOf(one.Shape); ok {
				t.matrix = m
			}
		}
		out = append(out, t)
	}
	return out
}

// plan makes the forms, and room for their units. pieces: also those of which tables are made.
func (x *Index) plan(pieces bool) error {
	x.forms = nil
	all := int64(0)
	add := func(t *tensor, name string, length, unit int64) {
		if count := int((length + unit - 1) / unit); length >= leastUnit {
			x.forms = append(x.forms, form{tensor: t, name: name, first: int(all), count: count, unit: unit, length: length})
			all += int64(count)
		}
	}
	for i := range x.tensors {
		t := &x.tensors[i]
		if all > maxUnits {
			break
		}
		add(t, AsItIs, t.length, unitOf(t.length))
		if t.Type == typeFloat {
			unit := unitOf(t.length / 2)
			if piece := pieceOf(t.Shape); pieces && piece > 0 {
				unit = min(unit, piece)
			}
			add(t, Float16, t.length/2, unit)
		}
		tiles := t.matrix.tiles() * tileBytes // in both orders
		add(t, Float16Tiles, tiles, tileBytes)
		add(t, Float16Tiles, tiles, tileBytes)
	}
	if all > maxUnits {
		return ErrTooLarge
	}
	x.units = make([]unit, all)
	slots := 1 << 10
	for int64(slots) < 2*all {
		slots *= 2
	}
	x.heads, x.filter = make([]uint32, slots), make([]uint64, slots/16) // four bits a slot
	return nil
}

// add takes a unit in. One that begins with the same number again and again is looked for behind others only, for zeros are everywhere;
// and so is a tensor's short end.
func (x *Index) add(i int, b []byte) {
	x.units[i].sum = maphash.Bytes(x.seed, b)
	if len(b) < leastUnit || bytes.Equal(b[:beginning-4], b[4:beginning]) {
		return
	}
	h := hashOf(b)
	slot := h & uint64(len(x.heads)-1)
	same := 0
	for u := x.heads[slot]; u != 0; u = x.units[u-1].next {
		if same++; same == maxSame || x.units[u-1].sum == x.units[i].sum {
			return
		}
	}
	x.units[i].next, x.heads[slot] = x.heads[slot], uint32(i+1)
	bit := x.bit(h)
	x.filter[bit/64] |= 1 << (bit % 64)
}

func hashOf(b []byte) uint64 {
	h := binary.LittleEndian.Uint64(b)*0x9e3779b97f4a7c15 ^ binary.LittleEndian.Uint64(b[8:])
	h *= 0xd6e8feb86659fd93
	return h ^ h>>32
}

func (x *Index) bit(h uint64) uint64 { return h >> 16 & uint64(64*len(x.filter)-1) }

func (x *Index) formOf(u int) *form {
	i, found := slices.BinarySearchFunc(x.forms, u, func(f form, u int) int { return f.first - u })
	if !found {
		i--
	}
	return &x.forms[i]
}

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
