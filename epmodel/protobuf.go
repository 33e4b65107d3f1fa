package epmodel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// Bounds on hostile input. Each is far above what real models have.
const (
	// nested messages; protobuf's own limit, so a deeper model cannot be loaded anyway
	maxDepth         = 100
	maxName          = 64 << 10  // names of nodes, tensors, operators, dimensions
	maxText          = 1 << 20   // metadata values; longer ones are left out
	maxKept          = 16 << 20  // memory of everything that Read keeps, estimated
	smallKept        = 256 << 10 // of nearly every model: see Gate
	randomWindow     = 4 << 10   // read after a jump: usually a tensor's header, then the next jump
	sequentialWindow = 64 << 10  // read when going on where the last window ended
	// tag and value of any field but the payload of a length-delimited one
	headerMax = 24
)

type span struct{ off, n int64 }

func (s span) end() int64 { return s.off + s.n }

// field is one record of a message: for a length-delimited one the span of its payload, else the
// span and value of the number.
type field struct {
	num protowire.Number
	typ protowire.Type
	at  int64 // offset of the tag
	span
	value uint64
}

// reader walks messages through a window over the file. It holds at most the window in memory.
// After the first error, which it keeps, it stops, and its results are invalid.
type reader struct {
	ctx         context.Context
	src         Source
	name        string
	size        int64
	window      []byte
	start       int64    // file offset of window[0]
	path        []string // names of the messages that are open
	fields      uint64   // seen so far; ctx is checked after a number of them
	memoryUsed  int64
	memoryLimit int64 // bounds kept
	err         error
	buf         [sequentialWindow]byte
}

// fail keeps the error for a field of the message that is open, unless there is one.
func (r *reader) fail(at int64, name, format string, args ...any) {
	if r.err != nil {
		return
	}
	parts := r.path
	if len(parts) > 12 { // only both ends of a deep chain are informative
		parts = append(append(append([]string{}, parts[:4]...), "..."), parts[len(parts)-6:]...)
	}
	if name != "" {
		parts = append(append([]string{}, parts...), name)
	}
	r.err = &FormatError{File: r.name, Offset: at, Field: strings.Join(parts, "."),
		Reason: fmt.Sprintf(format, args...)}
}

// chargeMemory accounts for n bytes (and a little for their container) that stay in memory.
func (r *reader) chargeMemory(at int64, n int) {
	r.memoryUsed += int64(n) + 32
	switch {
	case r.memoryUsed <= r.memoryLimit:
	case r.memoryLimit < maxKept && r.err == nil:
		r.err = errLarge
	default:
		r.fail(at, "", "names and tables need more than %d MiB of memory", maxKept>>20)
	}
}

// peek returns up to n bytes from off until the next call, fewer at the end, none after an error.
func (r *reader) peek(off int64, n int) []byte {
	n = int(min(int64(n), r.size-off))
	if rel := off - r.start; rel >= 0 && rel+int64(n) <= int64(len(r.window)) {
		return r.window[rel : rel+int64(n)]
	}
	want := int64(randomWindow)
	if end := r.start + int64(len(r.window)); len(r.window) > 0 && off <= end && off >= r.start {
		want = sequentialWindow
	}
	want = min(max(want, int64(n)), r.size-off)
	r.window = nil
	if !r.readAt(r.buf[:want], off) {
		return nil
	}
	r.window, r.start = r.buf[:want], off
	return r.window[:n]
}

func (r *reader) readAt(p []byte, off int64) (ok bool) {
	n, err := r.src.ReadAt(p, off)
	switch {
	case n == len(p):
		return true
	case err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		r.fail(off+int64(n), "",
			"the file ends here, but its size was %d: it changed while being read", r.size)
	case r.err == nil:
		r.err = fmt.Errorf("%s: read at offset %d: %w", r.name, off, err)
	}
	return false
}

// message calls fn for every field of the message in s. name is the field that holds it, for
// errors.
func (r *reader) message(s span, name string, fn func(field)) {
	if len(r.path) >= maxDepth {
		r.fail(s.off, name, "messages are nested more than %d deep", maxDepth)
	}
	if name != "" {
		r.path = append(r.path, name)
		defer func() { r.path = r.path[:len(r.path)-1] }()
	}
	for pos := s.off; pos < s.end() && r.err == nil; {
		f := r.field(pos, s.end())
		if r.err == nil {
			fn(f)
		}
		pos = f.end()
	}
}

func (r *reader) field(pos, end int64) (f field) {
	if r.fields++; r.fields%4096 == 0 {
		if err := r.ctx.Err(); err != nil {
			r.err = fmt.Errorf("%s: %w", r.name, err)
			return f
		}
	}
	b := r.peek(pos, int(min(headerMax, end-pos)))
	num, typ, n := protowire.ConsumeTag(b)
	if n < 0 {
		r.fail(pos, "", "no protobuf field tag: %v", protowire.ParseError(n))
		return f
	}
	f = field{num: num, typ: typ, at: pos, span: span{off: pos + int64(n)}}
	m := 0
	switch typ {
	case protowire.VarintType:
		f.value, m = protowire.ConsumeVarint(b[n:])
	case protowire.Fixed32Type:
		var v uint32
		v, m = protowire.ConsumeFixed32(b[n:])
		f.value = uint64(v)
	case protowire.Fixed64Type:
		f.value, m = protowire.ConsumeFixed64(b[n:])
	case protowire.BytesType:
		f.value, m = protowire.ConsumeVarint(b[n:])
	default:
		r.fail(pos, fmt.Sprintf("field %d", num), "wire type %d is not used in ONNX", typ)
	}
	if m < 0 {
		r.fail(pos, fmt.Sprintf("field %d", num), "bad value: %v", protowire.ParseError(m))
	}
	f.n = int64(m)
	if typ == protowire.BytesType {
		f.off += int64(m)
		if left := end - f.off; f.value > uint64(left) {
			r.fail(pos, fmt.Sprintf("field %d", num),
				"its length is %d, but %d bytes are left in %s", f.value, left, r.holder(end))
		}
		f.n = int64(f.value)
	}
	return f
}

// holder names the file or message that ends at end, to distinguish a truncated file from a wrong
// length inside a message.
func (r *reader) holder(end int64) string {
	if end == r.size {
		return "the file (truncated?)"
	}
	return "the message that holds it"
}

func (r *reader) want(f field, name string, typ protowire.Type) field {
	if f.typ != typ {
		r.fail(f.at, name, "wire type %d, not %d", f.typ, typ)
	}
	return f
}

func (r *reader) integer(f field, name string) int64 {
	return int64(r.want(f, name, protowire.VarintType).value)
}

func (r *reader) submessage(f field, name string, fn func(field)) {
	r.message(r.want(f, name, protowire.BytesType).span, name, fn)
}

func (r *reader) bytes(f field, name string, limit int) []byte {
	r.want(f, name, protowire.BytesType)
	if f.n > int64(limit) {
		r.fail(f.at, name, "%d bytes long, more than %d", f.n, limit)
	}
	if r.chargeMemory(f.at, int(f.n)); r.err != nil {
		return nil
	}
	p := make([]byte, f.n)
	if f.n <= randomWindow {
		copy(p, r.peek(f.off, int(f.n)))
	} else {
		r.readAt(p, f.off)
	}
	return p
}

// text reads a name for messages. It replaces invalid UTF-8, because protobuf libraries accept it,
// and names decide nothing.
func (r *reader) text(f field, name string) string {
	return strings.ToValidUTF8(string(r.bytes(f, name, maxName)), "\uFFFD")
}

func (r *reader) exact(f field, name string, limit int) string {
	b := r.bytes(f, name, limit)
	if !utf8.Valid(b) {
		r.fail(f.at, name, "not UTF-8")
	}
	return string(b)
}

func (r *reader) pair(f field, name string) (key, value field) {
	key = field{typ: protowire.BytesType, at: f.at, span: span{off: f.off}}
	value = key
	r.submessage(f, name, func(g field) {
		switch g.num {
		case 1:
			key = r.want(g, "key", protowire.BytesType)
		case 2:
			value = r.want(g, "value", protowire.BytesType)
		}
	})
	return key, value
}

func (r *reader) integers(f field, name string, limit int, into []int64) []int64 {
	add := func(at int64, v uint64) {
		if len(into) >= limit {
			r.fail(at, name, "more than %d values", limit)
		}
		into = append(into, int64(v))
		r.chargeMemory(at, 8)
	}
	if f.typ == protowire.VarintType {
		add(f.at, f.value)
		return into
	}
	r.want(f, name, protowire.BytesType)
	for pos := f.off; pos < f.end() && r.err == nil; {
		v, n := protowire.ConsumeVarint(r.peek(pos, int(min(10, f.end()-pos))))
		if n < 0 {
			r.fail(pos, name, "bad value: %v", protowire.ParseError(n))
			break
		}
		add(pos, v)
		pos += int64(n)
	}
	return into
}
