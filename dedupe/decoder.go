package dedupe

import (
	"encoding/binary"
	"fmt"
	"math"
)

// decoder reads a body. After the first error it gives zeros, so callers look once at the end.
type decoder struct {
	b   []byte
	at  int
	err error
}

func (d *decoder) fail(field, format string, args ...any) {
	if d.err == nil {
		d.err = &FormatError{Offset: int64(headerSize + d.at), Field: field, Reason: fmt.Sprintf(format, args...)}
	}
}

func (d *decoder) fixed(field string, n int) []byte {
	if d.err != nil {
		return nil
	}
	if len(d.b)-d.at < n {
		d.fail(field, "the body ends within it")
		return nil
	}
	d.at += n
	return d.b[d.at-n : d.at]
}

func (d *decoder) int64(field string) int64 {
	b := d.fixed(field, 8)
	if b == nil {
		return 0
	}
	v := binary.LittleEndian.Uint64(b)
	if v > math.MaxInt64 {
		d.at -= 8
		d.fail(field, "%d", v)
		return 0
	}
	return int64(v)
}

// count reads how many things of each bytes follow: more than the body can hold takes no memory.
func (d *decoder) count(field string, most, each int) int {
	b := d.fixed(field, 4)
	if b == nil {
		return 0
	}
	v := int64(binary.LittleEndian.Uint32(b))
	if v > int64(most) || v*int64(each) > int64(len(d.b)-d.at) {
		d.at -= 4
		d.fail(field, "%d, more than there can be", v)
		return 0
	}
	return int(v)
}

// uvarint reads an unsigned varint below 2^63 in its shortest form.
func (d *decoder) uvarint(field string) int64 {
	if d.err != nil {
		return 0
	}
	v, n := binary.Uvarint(d.b[d.at:])
	if n <= 0 || v > math.MaxInt64 || n > 1 && d.b[d.at+n-1] == 0 {
		d.fail(field, "no number, or not in its shortest form")
		return 0
	}
	d.at += n
	return int64(v)
}

func (d *decoder) varint(field string) int64 {
	if d.err != nil {
		return 0
	}
	v, n := binary.Varint(d.b[d.at:])
	if n <= 0 || n > 1 && d.b[d.at+n-1] == 0 {
		d.fail(field, "no number, or not in its shortest form")
		return 0
	}
	d.at += n
	return v
}

func (d *decoder) containers(r *Recipe, n int) {
	if d.err != nil || n == 0 {
		return
	}
	r.Containers = make([]Container, n)
	for i := range r.Containers {
		copy(r.Containers[i].Digest[:], d.fixed("container", 32))
		r.Containers[i].Size = d.int64("container size")
	}
}

func (d *decoder) extents(r *Recipe, n int) {
	if d.err != nil || n == 0 {
		return
	}
	r.Extents = make([]Extent, n)
	ends := make([]int64, r.sources())
	at := int64(0)
	for i := range r.Extents {
		start := d.at
		head := d.uvarint("extent")
		e := Extent{At: at, Length: d.uvarint("extent length"), Container: int(head >> 1)}
		delta := d.varint("extent from")
		if head&1 != 0 {
			e.Period = d.uvarint("extent period")
		}
		if d.err != nil {
			return
		}
		if e.Container < len(ends) {
			e.From = ends[e.Container] + delta // a sum that wraps is negative, or beyond any container
		}
		err := r.validateExtent(i, e, at)
		if err == nil && head&1 != 0 && e.Period == 0 {
			err = invalid(fmt.Sprintf("extent %d", i), "repeated, with a period of 0")
		}
		if err != nil {
			err.Offset = int64(headerSize + start)
			d.err = err
			return
		}
		ends[e.Container] = e.From + e.used()
		at += e.Length
		r.Extents[i] = e
	}
}

// frames reads the table of frames. What each states is for Validate.
func (d *decoder) frames(f *Frames) {
	f.Size = d.int64("literals")
	each := d.fixed("frame size", 4)
	if d.err != nil {
		return
	}
	f.Each = int64(binary.LittleEndian.Uint32(each))
	if f.Each == 0 || f.Size > MaxSize || f.count() > int64(len(d.b)-d.at)/frameEntry {
		d.at -= 4
		d.fail("frame size", "%d bytes, and %d come out of what has a table of %d", f.Each, f.Size, len(d.b)-d.at)
		return
	}
	f.Table = make([]Frame, f.count())
	for i := range f.Table {
		b := d.fixed("frame", frameEntry)
		f.Table[i].Stored = int64(binary.LittleEndian.Uint32(b))
		copy(f.Table[i].Sum[:], b[4:])
	}
}
