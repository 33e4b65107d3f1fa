package identity

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/index/manifestpb"
)

// Record is a request in its canonical spelling: equal requests have equal records.
type Record struct {
	Version int        `json:"version"`
	Model   cas.Digest `json:"model"`
	EPs     []RecordEP `json:"eps"`
	compilers.Session
	Embed  bool          `json:"embed"`
	Route  string        `json:"route"`
	Output *RecordOutput `json:"output,omitempty"`
	Group  []cas.Digest  `json:"-"` // models of a group after the first one, in order
	// the key is for finding a group by one of its models
	Member bool `json:"member,omitempty"`
}

// RecordEP is an execution provider in a record.
type RecordEP struct {
	Name    string            `json:"name"`
	Devices []RecordDevice    `json:"devices"`
	Options map[string]string `json:"options"`
	Files   map[string]string `json:"files,omitempty"` // option -> digest of the file
}

// RecordDevice is a device in a record.
type RecordDevice struct {
	Type     string            `json:"type"`
	VendorID uint32            `json:"vendor_id"`
	DeviceID uint32            `json:"device_id"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// recordVersion is the first field of every record, so that a later epcached knows what it
// reads.
const recordVersion = 1

// Encode returns the bytes whose digest is the request key: a manifestpb.Request in its canonical
// encoding. The number of a field is never reused, and a new field is omitted at its default, so
// that existing keys stay valid.
func (r *Record) Encode() []byte {
	b := make([]byte, 0, 512)
	b = appendNumber(b, 1, uint64(r.Version))
	b = appendBytes(b, 2, r.Model[:])
	for _, ep := range r.EPs {
		b = appendBytes(b, 3, ep.encode())
	}
	b = appendStrings(b, 4, r.SessionOptions)
	b = appendInts(b, 5, r.FreeDimensions)
	b = appendInts(b, 6, r.FreeDimensionsByDenotation)
	b = appendBytes(b, 7, []byte(r.GraphOptimizationLevel))
	b = appendNumber(b, 8, protowire.EncodeBool(r.Embed))
	b = appendBytes(b, 9, []byte(r.Route))
	if r.Output != nil {
		b = appendBytes(b, 10, r.Output.encode())
	}
	for i := range r.Group {
		b = appendBytes(b, 20, r.Group[i][:])
	}
	if r.Member {
		b = appendNumber(b, 21, 1)
	}
	return b
}

func (ep *RecordEP) encode() []byte {
	b := appendBytes(nil, 1, []byte(ep.Name))
	for _, d := range ep.Devices {
		m := appendBytes(nil, 1, []byte(d.Type))
		m = appendNumber(m, 2, uint64(d.VendorID))
		m = appendNumber(m, 3, uint64(d.DeviceID))
		b = appendBytes(b, 2, appendStrings(m, 4, d.Metadata))
	}
	b = appendStrings(b, 3, ep.Options)
	return appendStrings(b, 4, ep.Files)
}

// Key returns the request key, which is the digest of the record, and the record.
func (r *Record) Key() (index.RequestKey, []byte) {
	record := r.Encode()
	return index.RequestKey(blake3.Sum256(record)), record
}

// JSON returns the record as JSON, for messages and for epcachectl why --key.
func (r *Record) JSON() string {
	type plain Record // without the method MarshalJSON
	var group []string
	for i := range r.Group {
		group = append(group, r.Group[i].String())
	}
	b, err := json.Marshal(struct {
		*plain
		Model string   `json:"model"` // overrides the digest, which would be an array of bytes
		Group []string `json:"group,omitempty"`
	}{(*plain)(r), r.Model.String(), group})
	if err != nil {
		return "{}" // cannot happen: there are only strings, numbers and maps of them
	}
	return string(b)
}

func appendBytes(b []byte, field protowire.Number, v []byte) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	return protowire.AppendBytes(b, v)
}

func appendNumber(b []byte, field protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), v)
}

func appendStrings(b []byte, field protowire.Number, m map[string]string) []byte {
	if len(m) == 0 {
		return b // the usual case, at each hit
	}
	for _, k := range slices.Sorted(maps.Keys(m)) {
		b = appendBytes(b, field, appendBytes(appendBytes(nil, 1, []byte(k)), 2, []byte(m[k])))
	}
	return b
}

func appendInts(b []byte, field protowire.Number, m map[string]int64) []byte {
	if len(m) == 0 {
		return b
	}
	for _, k := range slices.Sorted(maps.Keys(m)) {
		b = appendBytes(b, field, appendNumber(appendBytes(nil, 1, []byte(k)), 2, uint64(m[k])))
	}
	return b
}

// ModelOf returns the digest of one of the request's models.
func (r *Record) ModelOf(i int) cas.Digest {
	if i == 0 {
		return r.Model
	}
	return r.Group[i-1]
}

// MemberKey returns the key by which a request for one model finds a group that contains it and has
// the same options.
func (r *Record) MemberKey(member int) index.RequestKey {
	one := *r
	one.Model, one.Group, one.Member = r.ModelOf(member), nil, true
	key, _ := one.Key()
	return key
}

// OnDevicesOf returns the request with the devices that the build was made for. found reports
// whether that request finds the build, by the build's key or, for a member of a group that loads
// alone, by the member's. It is false if the execution providers differ, or the request's devices
// exclude those.
func (r *Record) OnDevicesOf(b *index.Build) (on Record, found bool) {
	made, err := Decode(b.Record)
	if err != nil || len(made.EPs) != len(r.EPs) {
		return *r, false
	}
	on = *r
	on.EPs = slices.Clone(r.EPs)
	for i := range on.EPs {
		if !slices.EqualFunc(r.EPs[i].Devices, made.EPs[i].Devices, deviceCovers) {
			return *r, false
		}
		on.EPs[i].Devices = made.EPs[i].Devices
	}
	key, _ := on.Key()
	i := b.MemberOf(r.Model)
	if !r.Member || i < 0 {
		return on, key == b.RequestKey
	}
	return on, key == b.Members[i].AloneKey && b.LoadCheck == compilers.Passed
}

func deviceCovers(asked, made RecordDevice) bool {
	return (asked.Type == "" || asked.Type == made.Type) &&
		(asked.VendorID == 0 || asked.VendorID == made.VendorID) &&
		(asked.DeviceID == 0 || asked.DeviceID == made.DeviceID) &&
		maps.Equal(asked.Metadata, made.Metadata)
}

// DimensionsText returns what the free dimensions of a build's model were fixed at, such as
// "batch=1, sequence=128": it distinguishes variants of a model. It returns "" if there are none.
func DimensionsText(b *index.Build) string {
	var record struct {
		Named       map[string]int64 `json:"free_dimensions"`
		Denotations map[string]int64 `json:"free_dimensions_by_denotation"`
	}
	if json.Unmarshal([]byte(b.RecordJSON), &record) != nil {
		return "" // perhaps from a later version of epcached
	}
	var out []string
	for _, all := range []map[string]int64{record.Named, record.Denotations} {
		for _, name := range slices.Sorted(maps.Keys(all)) {
			out = append(out, fmt.Sprintf("%s=%d", name, all[name]))
		}
	}
	return strings.Join(out, ", ")
}

// Decode reads the bytes that Encode wrote, and accepts no others: its result encodes to the same
// bytes. A record of a later version, or with fields that this one does not know, is an error.
func Decode(record []byte) (Record, error) {
	var m manifestpb.Request
	if err := proto.Unmarshal(record, &m); err != nil {
		return Record{}, fmt.Errorf("request record: %w", err)
	}
	if m.Version != recordVersion {
		return Record{}, fmt.Errorf("request record: version %d, not %d", m.Version, recordVersion)
	}
	r := Record{Version: recordVersion, Model: digestOf(m.Model), Embed: m.Embed, Route: m.Route,
		Member: m.Member,
		Session: compilers.Session{SessionOptions: notNil(m.SessionOptions),
			FreeDimensions:             notNil(m.FreeDimensions),
			FreeDimensionsByDenotation: notNil(m.FreeDimensionsByDenotation),
			GraphOptimizationLevel:     m.GraphOptimizationLevel}}
	for _, ep := range m.Eps {
		one := RecordEP{Name: ep.Name, Devices: []RecordDevice{}, Options: notNil(ep.Options),
			Files: notNil(ep.Files)}
		for _, d := range ep.Devices {
			one.Devices = append(one.Devices,
				RecordDevice{d.Type, d.VendorId, d.DeviceId, d.Metadata})
		}
		r.EPs = append(r.EPs, one)
	}
	if o := m.Output; o != nil {
		r.Output = &RecordOutput{o.InitializersFile, o.InitializersThreshold,
			o.InitializersInSource}
	}
	for _, d := range m.Group {
		r.Group = append(r.Group, digestOf(d))
	}
	if !bytes.Equal(r.Encode(), record) {
		return Record{},
			errors.New("request record: it has fields that are not known, or in another order")
	}
	return r, nil
}

// digestOf returns b as a digest. If b has another length, the result differs from it, so that
// Decode finds that the record does not encode to the same bytes.
func digestOf(b []byte) (d cas.Digest) {
	copy(d[:], b)
	return d
}

func notNil[V any](m map[string]V) map[string]V {
	if m == nil {
		return map[string]V{}
	}
	return m
}

// Terms returns terms that lead to this record. It fails if options name files, because records
// have only digests of these.
func (r *Record) Terms() (Terms, error) {
	for _, ep := range r.EPs {
		if len(ep.Files) > 0 {
			return Terms{}, fmt.Errorf("option %q of %s names a file, and only its digest is kept",
				slices.Sorted(maps.Keys(ep.Files))[0], ep.Name)
		}
	}
	return Terms{Model: r.Model, Group: r.Group, Member: r.Member,
		CompileTerms: CompileTerms{EPs: r.eps(), Session: r.Session, Embed: r.Embed, Route: r.Route,
			Output: r.Output.output()}}, nil
}

func (r *Record) eps() []EP {
	out := make([]EP, len(r.EPs))
	for i, ep := range r.EPs {
		out[i] = EP{Name: ep.Name, Options: ep.Options}
		for _, d := range ep.Devices {
			out[i].Devices = append(out[i].Devices, compilers.Device(d))
		}
	}
	return out
}
