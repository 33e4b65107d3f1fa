package wire

import (
	"bytes"
	"encoding/binary"
	"maps"
	"math"
	"slices"
	"unicode/utf8"
	"unsafe"

	"google.golang.org/protobuf/encoding/protowire"
)

// Package proto takes a fifth of a hit that comes alone, because its code and tables are in no
// cache then. So the two messages of a hit, Acquire and AcquireReply, are encoded and decoded here.
// Fields that hits do not have, fields in another order and malformed ones are left to package
// proto.

// AppendHit appends the encoding of an envelope. It reports false if that is for package proto to
// do.
func AppendHit(b []byte, e *Envelope) (_ []byte, ok bool) {
	c := &codec{b: b, writing: true}
	e.pass(c)
	return c.b, !c.failed
}

// Encoded returns a reply that is encoded already, except for its descriptor and the elapsed time.
// Its fields cannot be read. It returns nil if the reply is for package proto to encode. Several
// requests may be answered with copies by Again.
func (m *AcquireReply) Encoded() *AcquireReply {
	c := &codec{writing: true}
	if m.pass(c); c.failed {
		return nil
	}
	return &AcquireReply{unknownFields: c.b}
}

// Again returns a copy of a reply from Encoded.
func (m *AcquireReply) Again() *AcquireReply {
	return &AcquireReply{unknownFields: m.unknownFields}
}

// maxHit is more than most requests and answers take. The strings of a message share its memory,
// and some may be kept for long.
const maxHit = 4 << 10

// ParseHit returns the envelope that is encoded in b, which it does not keep. It returns nil if
// package proto is to decode it.
func ParseHit(b []byte) *Envelope {
	if len(b) > maxHit {
		return nil
	}
	e, c := new(Envelope), &codec{b: bytes.Clone(b)}
	c.next(0)
	if e.pass(c); !c.ended() {
		return nil
	}
	return e
}

// Body returns the bytes of an envelope behind its own fields, which identify an equal message, nil
// if they are malformed.
func Body(envelope []byte) []byte {
	for len(envelope) > 0 {
		number, kind, size := protowire.ConsumeTag(envelope)
		if size < 0 || number >= firstBody {
			return envelope
		}
		value := protowire.ConsumeFieldValue(number, kind, envelope[size:])
		if value < 0 {
			return nil
		}
		envelope = envelope[size+value:]
	}
	return nil
}

// firstBody is the lowest number of a message that an envelope carries.
const firstBody = 20

// fieldCodec is a message. pass has c read or write each of its fields, in the order of their
// numbers; several of one kind by the number of the first.
type fieldCodec interface{ pass(c *codec) }

type message[M any] interface {
	*M
	fieldCodec
}

func (e *Envelope) pass(c *codec) {
	numbers(c, 1, &e.Request)
	numbers(c, 2, &e.Descriptors)
	numbers(c, 3, &e.DeadlineMs)
	acquire, reply := e.GetAcquire(), e.GetAcquireReply()
	one(c, 20, &acquire)
	one(c, 21, &reply)
	switch {
	case (acquire == nil) == (reply == nil):
		c.fail()
	case c.writing:
		c.end(e.unknownFields)
	case acquire != nil:
		e.Body = &Envelope_Acquire{acquire}
	default:
		e.Body = &Envelope_AcquireReply{reply}
	}
}

func (m *Acquire) pass(c *codec) {
	one(c, 1, &m.Model)
	many(c, 2, &m.Eps)
	entries(c, 3, &m.SessionOptions)
	c.text(6, &m.GraphOptimizationLevel)
	c.bools(7, &m.Embed)
	c.text(8, &m.Route)
	one(c, 9, &m.Runtime)
	numbers(c, 10, &m.OnMiss)
	c.text(11, &m.Store)
	numbers(c, 12, &m.DeadlineMs)
	c.bools(13, &m.StrictOrt)
	c.bools(16, &m.KeepGoing)
	c.doubles(17, &m.VerifyOutput)
	c.bools(18, &m.HoldsView, &m.Adopt)
	c.end(m.unknownFields, m.FreeDimensions != nil, m.FreeDimensionsByDenotation != nil,
		m.Group != nil, m.Output != nil)
}

func (m *Model) pass(c *codec) {
	numbers(c, 1, &m.Fd)
	c.text(2, &m.Name)
	many(c, 3, &m.External)
	c.text(4, &m.Path)
	c.end(m.unknownFields)
}

func (m *ExternalFile) pass(c *codec) {
	c.text(1, &m.Location)
	numbers(c, 2, &m.Fd)
	c.end(m.unknownFields)
}

func (m *ExecutionProvider) pass(c *codec) {
	c.text(1, &m.Name)
	many(c, 2, &m.Devices)
	entries(c, 3, &m.Options)
	c.end(m.unknownFields, m.OptionFds != nil)
}

func (m *Device) pass(c *codec) {
	c.text(1, &m.Type)
	numbers(c, 2, &m.VendorId, &m.DeviceId)
	entries(c, 4, &m.Metadata)
	c.end(m.unknownFields)
}

func (m *Runtime) pass(c *codec) {
	c.text(1, &m.Directory, &m.OrtVersion, &m.OrtLibrary)
	many(c, 4, &m.EpLibraries)
	c.end(m.unknownFields)
}

func (m *EpLibrary) pass(c *codec) {
	c.text(1, &m.Ep, &m.Path)
	c.optional(3, &m.Fd)
	many(c, 4, &m.Beside)
	c.bools(5, &m.Complete)
	c.end(m.unknownFields)
}

func (m *AcquireReply) pass(c *codec) {
	// First the fields that differ from hit to hit, because the others may be encoded already.
	c.optional(10, &m.Fd)
	c.doubles(18, &m.ElapsedSeconds)
	c.text(1, &m.Outcome, &m.RequestKey, &m.Build, &m.ModelDigest, &m.Ep, &m.SdkVersion,
		&m.HardwareArchitecture, &m.Compatibility, &m.Why)
	if !c.writing { // package proto writes it here
		c.optional(10, &m.Fd)
	}
	c.text(11, &m.View, &m.Graph)
	many(c, 13, &m.Files)
	entries(c, 14, &m.ProviderOptions)
	entries(c, 15, &m.SessionOptions)
	c.text(16, &m.GraphOptimizationLevel)
	c.doubles(17, &m.CompileSeconds)
	if !c.writing {
		c.doubles(18, &m.ElapsedSeconds)
	}
	c.text(19, &m.Record, &m.Runtime)
	c.text(23, &m.CompatibilitySource, &m.CompatibilityReason, &m.Job)
	numbers(c, 28, &m.Member)
	c.bools(29, &m.Unkept)
	c.end(m.unknownFields, m.Warnings != nil, m.Explanation != nil, m.Claim != nil,
		m.Members != nil)
}

func (m *File) pass(c *codec) {
	c.text(1, &m.Name)
	numbers(c, 2, &m.Size)
	c.text(3, &m.Digest)
	c.end(m.unknownFields)
}

func (m *StringMap) pass(c *codec) {
	entries(c, 1, &m.Entries)
	c.end(m.unknownFields)
}

// entry is a map's entry, which protobuf encodes as a message. V is string or *StringMap.
type entry[V any] struct {
	key   string
	value V
}

func (e *entry[V]) pass(c *codec) {
	c.text(1, &e.key)
	switch p := any(&e.value).(type) {
	case *string:
		c.text(2, p)
	case **StringMap:
		if one(c, 2, p); *p == nil {
			c.fail()
		}
	}
}

// codec writes the fields that are passed, or reads them one after the other.
type codec struct {
	b       []byte // the bytes written, or left to read
	writing bool
	failed  bool

	number protowire.Number // of the field that is read next; 0: no field is left
	kind   protowire.Type
}

func (c *codec) fail() { c.failed, c.number = true, 0 }

// ended reports whether the whole message was read without an error.
func (c *codec) ended() bool { return !c.failed && c.number == 0 }

// end writes the fields that this version does not know. It fails if others are set.
func (c *codec) end(unknown []byte, others ...bool) {
	if !c.writing {
		return
	}
	c.b = append(c.b, unknown...)
	for _, set := range others {
		c.failed = c.failed || set
	}
}

// next skips a value of that size, and reads the next field's tag. A negative size means that the
// value is malformed.
func (c *codec) next(size int) {
	if size >= 0 {
		c.b = c.b[size:]
		if c.number = 0; len(c.b) == 0 {
			return
		}
		c.number, c.kind, size = protowire.ConsumeTag(c.b)
	}
	if size < 0 {
		c.fail()
		return
	}
	c.b = c.b[size:]
}

// isNext reports whether the field is read next. One of another type fails.
func (c *codec) isNext(n protowire.Number, kind protowire.Type) bool {
	if c.number == n && c.kind != kind {
		c.fail()
	}
	return c.number == n
}

// varint writes a number that is set, or reads one.
func (c *codec) varint(n protowire.Number, v uint64, set bool) (_ uint64, read bool) {
	if c.writing && set {
		c.b = protowire.AppendTag(c.b, n, protowire.VarintType)
		c.b = protowire.AppendVarint(c.b, v)
	}
	if !c.isNext(n, protowire.VarintType) {
		return 0, false
	}
	v, size := protowire.ConsumeVarint(c.b)
	c.next(size)
	return v, true
}

func numbers[N ~uint32 | ~uint64 | ~int32 | ~int64](c *codec, n protowire.Number, p ...*N) {
	for i, p := range p {
		if v, read := c.varint(n+protowire.Number(i), uint64(*p), *p != 0); read {
			*p = N(v)
		}
	}
}

func (c *codec) bools(n protowire.Number, p ...*bool) {
	for i, p := range p {
		if v, read := c.varint(n+protowire.Number(i), 1, *p); read {
			*p = v != 0
		}
	}
}

func (c *codec) optional(n protowire.Number, p **uint32) {
	var now uint32
	if *p != nil {
		now = **p
	}
	if v, read := c.varint(n, uint64(now), *p != nil); read {
		*p = new(uint32(v))
	}
}

func (c *codec) doubles(n protowire.Number, p ...*float64) {
	for _, p := range p {
		if bits := math.Float64bits(*p); c.writing && bits != 0 {
			c.b = protowire.AppendTag(c.b, n, protowire.Fixed64Type)
			c.b = protowire.AppendFixed64(c.b, bits)
		} else if c.isNext(n, protowire.Fixed64Type) {
			bits, size := protowire.ConsumeFixed64(c.b)
			*p = math.Float64frombits(bits)
			c.next(size)
		}
		n++
	}
}

// bytes reads a text or a message.
func (c *codec) bytes(n protowire.Number) (b []byte, read bool) {
	if read = c.isNext(n, protowire.BytesType); read {
		var size int
		b, size = protowire.ConsumeBytes(c.b)
		c.next(size)
	}
	return b, read
}

func (c *codec) text(n protowire.Number, p ...*string) {
	for _, p := range p {
		if b, read := c.bytes(n); read {
			*p = unsafe.String(unsafe.SliceData(b), len(b)) // b is ParseHit's own
		}
		if *p != "" && !utf8.ValidString(*p) {
			c.fail()
		}
		if *p != "" && c.writing {
			c.b = protowire.AppendTag(c.b, n, protowire.BytesType)
			c.b = protowire.AppendString(c.b, *p)
		}
		n++
	}
}

func entries[V any](c *codec, n protowire.Number, p *map[string]V) {
	switch {
	case !c.writing:
	case len(*p) > 1: // sorted, because equal requests are recognised by their bytes
		for _, key := range slices.Sorted(maps.Keys(*p)) {
			c.child(n, &entry[V]{key, (*p)[key]})
		}
	default:
		for key, value := range *p {
			c.child(n, &entry[V]{key, value})
		}
	}
	for c.number == n {
		e := new(entry[V])
		c.child(n, e)
		if *p == nil {
			*p = make(map[string]V)
		}
		(*p)[e.key] = e.value
	}
}

func one[M any, P message[M]](c *codec, n protowire.Number, p **M) {
	if c.number == n {
		*p = new(M)
	}
	if *p != nil {
		c.child(n, P(*p))
	}
}

func many[M any, P message[M]](c *codec, n protowire.Number, p *[]*M) {
	if c.writing {
		for _, m := range *p {
			c.child(n, P(m))
		}
	}
	for c.number == n {
		*p = append(*p, new(M))
		c.child(n, P((*p)[len(*p)-1]))
	}
}

func (c *codec) child(n protowire.Number, m fieldCodec) {
	if b, read := c.bytes(n); read {
		outer := *c
		*c = codec{b: b}
		c.next(0)
		if m.pass(c); !c.ended() {
			outer.fail()
		}
		*c = outer
	}
	if !c.writing {
		return
	}
	c.b = append(protowire.AppendTag(c.b, n, protowire.BytesType), 0)
	begin := len(c.b)
	m.pass(c)
	var length [binary.MaxVarintLen64]byte
	size := len(c.b) - begin
	after := binary.PutUvarint(length[:], uint64(size))
	c.b = append(c.b, length[1:after]...) // space for more than one byte
	copy(c.b[begin+after-1:], c.b[begin:begin+size])
	copy(c.b[begin-1:], length[:after])
}
