package identity

import (
	"context"
	"os"

	"lukechampine.com/blake3"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// EP is one execution provider of a request, with its devices and options.
type EP struct {
	Name    string
	Devices []compilers.Device
	Options map[string]string
	Files   map[string]*os.File // options that name a file, by option
}

// Terms are what of a request decides what is compiled, in whatever spelling they came.
type Terms struct {
	Model  cas.Digest
	Group  []cas.Digest // of further models that are compiled with it, in order
	Member bool         // it is for a group that has the model among its members

	EPs                        []EP
	SessionOptions             map[string]string
	FreeDimensions             map[string]int64
	FreeDimensionsByDenotation map[string]int64
	GraphOptimizationLevel     string
	Embed                      bool
	Route                      string
	Output                     Output
}

// Spelling digests the terms as they came. Those with option files are not remembered: a descriptor is not a
// spelling.
func (t *Terms) Spelling() ([32]byte, bool) {
	raw := Record{Version: recordVersion, Model: t.Model, SessionOptions: t.SessionOptions, FreeDimensions: t.FreeDimensions,
		FreeDimensionsByDenotation: t.FreeDimensionsByDenotation, GraphOptimizationLevel: t.GraphOptimizationLevel,
		Embed: t.Embed, Route: t.Route, Output: t.Output.spelled(), Group: t.Group, Member: t.Member}
	raw.EPs = make([]RecordEP, len(t.EPs))
	for i, ep := range t.EPs {
		if len(ep.Files) > 0 {
			return [32]byte{}, false
		}
		raw.EPs[i] = RecordEP{Name: ep.Name, Options: ep.Options, Devices: Devices(ep.Devices)}
	}
	return blake3.Sum256(raw.Encode()), true
}

// Record brings the terms into their one spelling, or says with an *Error what is wrong with them. allowed are options that an administrator lets
// pass; devicesOf finds the devices that are meant, and its errors are given as they are.
func (t *Terms) Record(ctx context.Context, allowed Allowed, devicesOf func(EP) ([]compilers.Device, error)) (Record, error) {
	out := Record{Version: recordVersion, Model: t.Model, Embed: t.Embed, Group: t.Group, Member: t.Member,
		FreeDimensions: orEmpty(t.FreeDimensions)}
	var err error
	if out.FreeDimensionsByDenotation, err = Denotations(t.FreeDimensionsByDenotation); err != nil {
		return Record{}, err
	}
	if out.SessionOptions, err = allowed.canonicalSession(t.SessionOptions); err != nil {
		return Record{}, err
	}
	if out.Route, err = canonicalRoute(t.Route); err != nil {
		return Record{}, err
	}
	if out.Output, err = t.Output.canonical(out.Route); err != nil {
		return Record{}, err
	}
	if out.GraphOptimizationLevel, err = canonicalLevel(t.GraphOptimizationLevel, out.Route); err != nil {
		return Record{}, err
	}
	for _, ep := range t.EPs {
		one := RecordEP{Name: ep.Name}
		if one.Options, err = allowed.canonicalOptions(ep); err != nil {
			return Record{}, err
		}
		if one.Files, err = fileDigests(ctx, ep); err != nil {
			return Record{}, err
		}
		devices, err := devicesOf(ep)
		if err != nil {
			return Record{}, err
		}
		one.Devices = Devices(devices)
		out.EPs = append(out.EPs, one)
	}
	return out, nil
}

// Devices gives devices as they stand in a record.
func Devices(devices []compilers.Device) []RecordDevice {
	out := make([]RecordDevice, len(devices))
	for i, d := range devices {
		out[i] = RecordDevice(d)
	}
	return out
}

func orEmpty(m map[string]int64) map[string]int64 {
	if m == nil {
		return map[string]int64{}
	}
	return m
}

// fileDigests stands for the options that name a file: what counts is its content.
func fileDigests(ctx context.Context, ep EP) (map[string]string, error) {
	out := make(map[string]string, len(ep.Files))
	for name, f := range ep.Files {
		s, err := cas.StampOf(f)
		if err != nil {
			return nil, apierr.New(apierr.BadRequest, err, "option %q of %s", name, ep.Name)
		}
		d, err := cas.Sum(ctx, f, 0, s.Size)
		if err != nil {
			return nil, apierr.New(apierr.BadRequest, err, "option %q of %s", name, ep.Name)
		}
		out[name] = d.String()
	}
	return out, nil
}
