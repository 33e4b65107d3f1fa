package unixsock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/epcached/epcached/unixsock/wire"
)

// violation is a breach of the framing rules. It ends the connection, because the start of the next
// frame, and the frame that each descriptor belongs to, are then unknown.
func violation(format string, args ...any) *Error {
	return &Error{Class: wire.ErrorClass_BAD_REQUEST,
		Text: "protocol: " + fmt.Sprintf(format, args...), Err: ErrProtocol}
}

var errTooLarge = errors.New("does not fit into a frame")

var buffers = sync.Pool{New: func() any { b := make([]byte, 0, firstBufferCapacity); return &b }}

func putBuffer(b *[]byte) {
	if cap(*b) <= keepBufferCapacity {
		buffers.Put(b)
	}
}

// encode makes a frame of an envelope, length included, in a buffer for putBuffer.
func encode(e *wire.Envelope) (*[]byte, error) {
	b := buffers.Get().(*[]byte)
	var err error
	frame, ok := wire.AppendHit(append((*b)[:0], 0, 0, 0, 0), e)
	if !ok {
		frame, err = proto.MarshalOptions{}.MarshalAppend(frame[:4], e)
	}
	if err == nil && len(frame)-4 > MaxFrame {
		err = fmt.Errorf("%w: %d bytes, at most %d go into one", errTooLarge,
			len(frame)-4, MaxFrame)
	}
	if err == nil && len(frame) == 4 {
		err = fmt.Errorf("an empty message")
	}
	if err != nil {
		putBuffer(b)
		return nil, err
	}
	binary.LittleEndian.PutUint32(frame, uint32(len(frame)-4))
	*b = frame
	return b, nil
}

// decode reads an envelope from a frame's bytes, which it does not keep.
func decode(payload []byte) (*wire.Envelope, error) {
	e := wire.ParseHit(payload)
	if e == nil {
		e = new(wire.Envelope)
		if err := proto.Unmarshal(payload, e); err != nil {
			return nil, violation("a frame of %d bytes is not an envelope", len(payload))
		}
	}
	if e.GetDescriptors() > MaxDescriptors {
		return nil, violation("a frame names %d descriptors; %d are allowed", e.GetDescriptors(),
			MaxDescriptors)
	}
	return e, nil
}

// envelope returns the next frame's envelope, its descriptors, which the caller owns, and the
// frame's bytes, which are valid until the next call.
func (s *stream) envelope(timeout time.Duration) (e *wire.Envelope, fds []int, payload []byte,
	_ error) {
	payload, at, err := s.frame(timeout)
	if err != nil {
		return nil, nil, nil, err
	}
	if e, err = decode(payload); err != nil {
		return nil, nil, nil, err
	}
	fds, err = s.takeDescriptors(at, int(e.GetDescriptors()))
	return e, fds, payload, err
}

var bodyOneof = (*wire.Envelope)(nil).ProtoReflect().Descriptor().Oneofs().ByName("body")

// bodyFields has the fields of an envelope by their message types, which are all different.
var bodyFields = func() map[protoreflect.MessageDescriptor]protoreflect.FieldDescriptor {
	fields := make(map[protoreflect.MessageDescriptor]protoreflect.FieldDescriptor)
	for i := range bodyOneof.Fields().Len() {
		field := bodyOneof.Fields().Get(i)
		fields[field.Message()] = field
	}
	return fields
}()

// envelopeOf makes an envelope that carries the message; a nil one is an empty one of its kind.
func envelopeOf(number uint64, message proto.Message) *wire.Envelope {
	e := &wire.Envelope{Request: number}
	switch m := message.(type) { // of hits: reflection takes longer
	case *wire.Acquire:
		if m != nil {
			e.Body = &wire.Envelope_Acquire{Acquire: m}
			return e
		}
	case *wire.AcquireReply:
		if m != nil {
			e.Body = &wire.Envelope_AcquireReply{AcquireReply: m}
			return e
		}
	}
	m := message.ProtoReflect()
	if !m.IsValid() {
		m = m.New()
	}
	e.ProtoReflect().Set(bodyFields[m.Descriptor()], protoreflect.ValueOfMessage(m))
	return e
}

// bodyOf returns the message that an envelope carries, nil if there is none or it is unknown.
func bodyOf(e *wire.Envelope) proto.Message {
	m := e.ProtoReflect()
	field := m.WhichOneof(bodyOneof)
	if field == nil {
		return nil
	}
	return m.Get(field).Message().Interface()
}
