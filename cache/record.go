package cache

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
)

// decodeRecord reads what encode wrote, and nothing else: what it gives encodes to the same bytes. A record of a
// later version, or with fields that this one does not know, is an error.
func decodeRecord(record []byte) (canonical, error) {
	c := canonical{SessionOptions: map[string]string{}, FreeDimensions: map[string]int64{}, FreeDimensionsByDenotation: map[string]int64{}}
	err := eachField(record, func(f field) error {
		switch f.number {
		case 1:
			c.Version = int(f.varint)
		case 2:
			if copy(c.Model[:], f.bytes) != len(c.Model) || len(f.bytes) != len(c.Model) {
				return fmt.Errorf("model digest of %d bytes", len(f.bytes))
			}
		case 3:
			ep, err := decodeEP(f.bytes)
			c.EPs = append(c.EPs, ep)
			return err
		case 4:
			return f.string(c.SessionOptions)
		case 5:
			return f.number64(c.FreeDimensions)
		case 6:
			return f.number64(c.FreeDimensionsByDenotation)
		case 7:
			c.GraphOptimizationLevel = string(f.bytes)
		case 8:
			c.Embed = f.varint != 0
		case 9:
			c.Route = string(f.bytes)
		case 10:
			output, err := decodeOutput(f.bytes)
			c.Output = output
			return err
		case 20:
			var d cas.Digest
			if copy(d[:], f.bytes) != len(d) || len(f.bytes) != len(d) {
				return fmt.Errorf("digest of a group's model of %d bytes", len(f.bytes))
			}
			c.Group = append(c.Group, d)
		case 21:
			c.Member = f.varint != 0
		}
		return nil // a field that is not known makes the comparison below fail
	})
	if err != nil {
		return canonical{}, fmt.Errorf("request record: %w", err)
	}
	if c.Version != recordVersion {
		return canonical{}, fmt.Errorf("request record: version %d, not %d", c.Version, recordVersion)
	}
	if again := c.encode(); string(again) != string(record) {
		return canonical{}, errors.New("request record: it has fields that are not known, or in another order")
	}
	return c, nil
}

func decodeEP(b []byte) (canonicalEP, error) {
	ep := canonicalEP{Devices: []canonicalDevice{}, Options: map[string]string{}, Files: map[string]string{}}
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

func decodeDevice(b []byte) (canonicalDevice, error) {
	var d canonicalDevice
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

// field is one field of a record: a number, or bytes.
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

// string adds the pair that the field holds.
func (f field) string(m map[string]string) error {
	var key, value string
	err := eachField(f.bytes, func(part field) error {
		switch part.number {
		case 1:
			key = string(part.bytes)
		case 2:
			value = string(part.bytes)
		}
		return nil
	})
	m[key] = value
	return err
}

func (f field) number64(m map[string]int64) error {
	var key string
	var value int64
	err := eachField(f.bytes, func(part field) error {
		switch part.number {
		case 1:
			key = string(part.bytes)
		case 2:
			value = int64(part.varint)
		}
		return nil
	})
	m[key] = value
	return err
}

// again gives terms that mean the record. Of options that name a file only digests are kept, so that a request with such options cannot be
// made again.
func (c *canonical) again() (Terms, error) {
	for _, ep := range c.EPs {
		if len(ep.Files) > 0 {
			return Terms{}, fmt.Errorf("option %q of %s names a file, and only its digest is kept", slices.Sorted(maps.Keys(ep.Files))[0], ep.Name)
		}
	}
	return Terms{Model: c.Model, Group: c.Group, Member: c.Member, EPs: c.request(), SessionOptions: c.SessionOptions, FreeDimensions: c.FreeDimensions,
		FreeDimensionsByDenotation: c.FreeDimensionsByDenotation, GraphOptimizationLevel: c.GraphOptimizationLevel,
		Embed: c.Embed, Route: c.Route, Output: c.Output.request()}, nil
}

// request gives the execution providers as a request would name them.
func (c *canonical) request() []EP {
	out := make([]EP, len(c.EPs))
	for i, ep := range c.EPs {
		out[i] = EP{Name: ep.Name, Options: ep.Options}
		for _, d := range ep.Devices {
			out[i].Devices = append(out[i].Devices, compilers.Device(d))
		}
	}
	return out
}
