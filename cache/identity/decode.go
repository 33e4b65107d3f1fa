package identity

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
)

// Decode reads what Encode wrote, and nothing else: what it gives encodes to the same bytes. A record of a
// later version, or with fields that this one does not know, is an error.
func Decode(record []byte) (Record, error) {
	r := Record{SessionOptions: map[string]string{}, FreeDimensions: map[string]int64{}, FreeDimensionsByDenotation: map[string]int64{}}
	err := eachField(record, func(f field) error {
		switch f.number {
		case 1:
			r.Version = int(f.varint)
		case 2:
			return f.digest(&r.Model)
		case 3:
			ep, err := decodeEP(f.bytes)
			r.EPs = append(r.EPs, ep)
			return err
		case 4:
			return f.string(r.SessionOptions)
		case 5:
			return f.number64(r.FreeDimensions)
		case 6:
			return f.number64(r.FreeDimensionsByDenotation)
		case 7:
			r.GraphOptimizationLevel = string(f.bytes)
		case 8:
			r.Embed = f.varint != 0
		case 9:
			r.Route = string(f.bytes)
		case 10:
			output, err := decodeOutput(f.bytes)
			r.Output = output
			return err
		case 20:
			var d cas.Digest
			err := f.digest(&d)
			r.Group = append(r.Group, d)
			return err
		case 21:
			r.Member = f.varint != 0
		}
		return nil // a field that is not known makes the comparison below fail
	})
	if err != nil {
		return Record{}, fmt.Errorf("request record: %w", err)
	}
	if r.Version != recordVersion {
		return Record{}, fmt.Errorf("request record: version %d, not %d", r.Version, recordVersion)
	}
	if again := r.Encode(); string(again) != string(record) {
		return Record{}, errors.New("request record: it has fields that are not known, or in another order")
	}
	return r, nil
}

func decodeEP(b []byte) (RecordEP, error) {
	ep := RecordEP{Devices: []RecordDevice{}, Options: map[string]string{}, Files: map[string]string{}}
	return ep, eachField(b, func(f field) error {
		switch f.number {
		case 1:
			ep.Name = string(f.bytes)
		case 2:
			d, err := decodeDevice(f.bytes)
			ep.Devices = append(ep.Devices, d)
			return err
		case 3:
			return f.string(ep.Options)
		case 4:
			return f.string(ep.Files)
		}
		return nil
	})
}

func decodeDevice(b []byte) (RecordDevice, error) {
	var d RecordDevice
	return d, eachField(b, func(f field) error {
		switch f.number {
		case 1:
			d.Type = string(f.bytes)
		case 2:
			d.VendorID = uint32(f.varint)
		case 3:
			d.DeviceID = uint32(f.varint)
		case 4:
			if d.Metadata == nil {
				d.Metadata = map[string]string{}
			}
			return f.string(d.Metadata)
		}
		return nil
	})
}

type field struct {
	number protowire.Number
	varint uint64
	bytes  []byte
}

func eachField(b []byte, fn func(field) error) error {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		f := field{number: number}
		switch kind {
		case protowire.VarintType:
			f.varint, n = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			f.bytes, n = protowire.ConsumeBytes(b)
		default:
			return fmt.Errorf("field %d: wire type %d", number, kind)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		if err := fn(f); err != nil {
			return err
		}
	}
	return nil
}

func (f field) pair() (key string, value field, err error) {
	err = eachField(f.bytes, func(part field) error {
		switch part.number {
		case 1:
			key = string(part.bytes)
		case 2:
			value = part
		}
		return nil
	})
	return key, value, err
}

func (f field) string(m map[string]string) error {
	key, value, err := f.pair()
	m[key] = string(value.bytes)
	return err
}

func (f field) number64(m map[string]int64) error {
	key, value, err := f.pair()
	m[key] = int64(value.varint)
	return err
}

func (f field) digest(d *cas.Digest) error {
	if len(f.bytes) != len(d) {
		return fmt.Errorf("digest of a model of %d bytes", len(f.bytes))
	}
	copy(d[:], f.bytes)
	return nil
}

// Terms gives terms that mean the record. Of options that name a file only digests are kept, so that a request with such options cannot be
// made again.
func (r *Record) Terms() (Terms, error) {
	for _, ep := range r.EPs {
		if len(ep.Files) > 0 {
			return Terms{}, fmt.Errorf("option %q of %s names a file, and only its digest is kept", slices.Sorted(maps.Keys(ep.Files))[0], ep.Name)
		}
	}
	return Terms{Model: r.Model, Group: r.Group, Member: r.Member, EPs: r.eps(), SessionOptions: r.SessionOptions, FreeDimensions: r.FreeDimensions,
		FreeDimensionsByDenotation: r.FreeDimensionsByDenotation, GraphOptimizationLevel: r.GraphOptimizationLevel,
		Embed: r.Embed, Route: r.Route, Output: r.Output.output()}, nil
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
