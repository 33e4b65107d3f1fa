package wire

import (
	"bytes"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"pgregory.net/rapid"
)

// aHit is what travels in a hit: the request, and the answer.
func aHit() []*Envelope {
	fd := uint32(1)
	return []*Envelope{
		{Request: 7, Descriptors: 3, DeadlineMs: 1500, Body: &Envelope_Acquire{Acquire: &Acquire{
			Model: &Model{Name: "model.onnx",
				External: []*ExternalFile{{Location: "weights.bin", Fd: 2}}},
			Eps: []*ExecutionProvider{{Name: "QNNExecutionProvider",
				Options: map[string]string{"backend_type": "htp"},
				Devices: []*Device{{Type: "NPU", VendorId: 0x17cb,
					Metadata: map[string]string{"soc": "60"}}, {}}}},
			SessionOptions: map[string]string{"session.disable_cpu_ep_fallback": "1", "": ""},
			Runtime: &Runtime{OrtVersion: "1.31.1", OrtLibrary: "/opt/libonnxruntime.so.1.31.1",
				EpLibraries: []*EpLibrary{{Ep: "QNNExecutionProvider", Path: "/opt/libqnn.so",
					Fd:     &fd,
					Beside: []*ExternalFile{{Location: "libQnnHtp.so", Fd: 1}}, Complete: true}}},
			OnMiss: OnMiss_FAIL, HoldsView: true, DeadlineMs: 1500,
		}}},
		{Request: 1 << 40, Descriptors: 1, Body: &Envelope_AcquireReply{AcquireReply: &AcquireReply{
			Outcome: "hit", RequestKey: "0f", Why: "éq", Fd: new(uint32), View: "/v",
			Graph: "a/b_ctx.onnx",
			Files: []*File{{Name: "a/b_ctx.onnx", Size: 1 << 33, Digest: "ab"}, {}},
			ProviderOptions: map[string]*StringMap{
				"QNNExecutionProvider": {Entries: map[string]string{"a": "b"}}, "": {}},
			SessionOptions: map[string]string{"x": "y"}, CompileSeconds: 2.5,
			ElapsedSeconds: math.Copysign(0, -1), Record: string(make([]byte, 300)), Member: 1,
			Unkept: true,
		}}},
	}
}

// A hit needs no reflection, and means the same to package proto.
func TestHitTravelsWithoutReflection(t *testing.T) {
	for _, e := range aHit() {
		b, ok := AppendHit([]byte("head"), e)
		require.True(t, ok)
		same(t, e, b[4:])
		require.NotNil(t, ParseHit(b[4:]))
		plain, err := proto.Marshal(e)
		require.NoError(t, err)
		got := ParseHit(plain)
		require.NotNil(t, got)
		clear(plain) // it keeps nothing of it
		require.True(t, proto.Equal(e, got), "%v", got)
	}
}

// same fails if the encoding is of another envelope.
func same(t require.TestingT, want *Envelope, b []byte) {
	got := new(Envelope)
	require.NoError(t, proto.Unmarshal(b, got))
	require.True(t, proto.Equal(want, got), "want %v\ngot  %v", want, got)
	agrees(t, b)
}

// Each field, alone and beside others, is written as package proto writes it, or left to that.
func TestAnyFieldsTravel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := &Envelope{Request: rapid.Uint64().Draw(t, "request"),
			Descriptors: rapid.Uint32().Draw(t, "descriptors"),
			DeadlineMs:  rapid.Int64().Draw(t, "deadline"),
			Body: rapid.SampledFrom([]isEnvelope_Body{&Envelope_Acquire{Acquire: new(Acquire)},
				&Envelope_AcquireReply{AcquireReply: new(AcquireReply)}}).Draw(t, "body")}
		m := e.ProtoReflect()
		e.Body = proto.CloneOf(e).Body // drawn ones are shared
		body := m.WhichOneof(m.Descriptor().Oneofs().Get(0))
		fill(t, m.Mutable(body).Message(), 0)
		b, ok := AppendHit(nil, e)
		if !ok {
			var err error
			b, err = proto.Marshal(e)
			require.NoError(t, err)
		}
		same(t, e, b)
	})
}

// fill sets some of the fields of a message.
func fill(t *rapid.T, m protoreflect.Message, depth int) {
	few := rapid.IntRange(0, 3)
	for i := range m.Descriptor().Fields().Len() {
		f := m.Descriptor().Fields().Get(i)
		if depth > 3 || few.Draw(t, string(f.Name())) > 0 {
			continue
		}
		switch {
		case f.IsMap():
			for range few.Draw(t, "entries") {
				key := scalar(t, f.MapKey()).MapKey()
				if f.MapValue().Message() == nil {
					m.Mutable(f).Map().Set(key, scalar(t, f.MapValue()))
				} else {
					fill(t, m.Mutable(f).Map().Mutable(key).Message(), depth+1)
				}
			}
		case f.IsList():
			for range few.Draw(t, "elements") {
				if f.Message() == nil {
					m.Mutable(f).List().Append(scalar(t, f))
				} else {
					fill(t, m.Mutable(f).List().AppendMutable().Message(), depth+1)
				}
			}
		case f.Message() != nil:
			fill(t, m.Mutable(f).Message(), depth+1)
		default:
			m.Set(f, scalar(t, f))
		}
	}
	if few.Draw(t, "unknown") == 0 {
		m.SetUnknown([]byte{0xa0, 0x3f, 1}) // field 1012
	}
}

func scalar(t *rapid.T, f protoreflect.FieldDescriptor) protoreflect.Value {
	name := string(f.Name())
	switch f.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(rapid.String().Draw(t, name))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(rapid.Bool().Draw(t, name))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(rapid.Uint32().Draw(t, name))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(rapid.Uint64().Draw(t, name))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(rapid.Int64().Draw(t, name))
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(rapid.Float64().Draw(t, name))
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(rapid.Int32().Draw(t, name)))
	}
	panic(f.FullName())
}

// Malformed messages are left to package proto, which refuses them.
func TestMalformedHitsAreLeftToProto(t *testing.T) {
	for _, e := range aHit() {
		b, ok := AppendHit(nil, e)
		require.True(t, ok)
		for i := range b {
			broken := bytes.Clone(b)
			broken[i] = 0xff
			agrees(t, broken)
			agrees(t, b[:i])
		}
	}
	_, ok := AppendHit(nil,
		&Envelope{Body: &Envelope_AcquireReply{AcquireReply: &AcquireReply{Why: "\xff"}}})
	require.False(t, ok)
}

// agrees fails if ParseHit takes what package proto refuses, or for another message.
func agrees(t require.TestingT, b []byte) {
	own := ParseHit(b)
	if own == nil {
		return
	}
	want := new(Envelope)
	require.NoError(t, proto.Unmarshal(b, want))
	require.True(t, proto.Equal(want, own), "want %v\ngot  %v", want, own)
}

func FuzzParseHit(f *testing.F) {
	for _, e := range aHit() {
		b, err := proto.Marshal(e)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) { agrees(t, b) })
}

// A reply that was encoded ahead is sent as the reply itself, with a descriptor and a time.
func TestEncodedReply(t *testing.T) {
	want := proto.CloneOf(aHit()[1])
	reply := want.GetAcquireReply()
	reply.Fd, reply.ElapsedSeconds = nil, 0
	encoded := reply.Encoded()
	require.NotNil(t, encoded)
	reply.Fd, reply.ElapsedSeconds = new(uint32), 0.25
	for range 2 {
		again := encoded.Again()
		again.Fd, again.ElapsedSeconds = new(uint32), 0.25
		b, ok := AppendHit(nil, &Envelope{Request: want.Request, Descriptors: 1,
			Body: &Envelope_AcquireReply{AcquireReply: again}})
		require.True(t, ok)
		same(t, want, b)
		require.NotNil(t, ParseHit(b))
	}
	require.Nil(t, (&AcquireReply{Warnings: []string{"w"}}).Encoded())
}

// A message's bytes are found behind the envelope's own fields, and do not depend on maps' order.
func TestBody(t *testing.T) {
	e := aHit()[0]
	b, _ := AppendHit(nil, e)
	other := proto.CloneOf(e)
	other.Request, other.Descriptors, other.DeadlineMs = 1<<50, 0, 3
	again, _ := AppendHit(nil, other)
	require.Equal(t, Body(b), Body(again))
	got := new(Envelope)
	require.NoError(t, proto.Unmarshal(Body(b), got))
	require.True(t, proto.Equal(e.GetAcquire(), got.GetAcquire()))
	require.Zero(t, got.Request)
	require.Empty(t, Body(nil))
	require.Empty(t, Body([]byte{0x08}))
}
