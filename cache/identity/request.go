// Package identity decides when two requests are equal, and when two builds of one request are not.
//
// Terms are the part of a request that the result of a compile depends on, as an application
// spelled it. A Record is the canonical spelling of all equal terms: every option is known and
// normalised, defaults are left out, devices are resolved, files are named by their content. Its
// digest is the request key; that and the execution provider's fingerprint make the build key.
// Manifests contain records, so a change of the encoding would make stored builds unreachable;
// tests pin the encoding.
//
// Options that are unknown, or that clients may not set, are refused with an *apierr.Error. Terms
// and records only open files of options.
//
// Models finds a model's digest, from a memo under its files' stamps or by hashing them. Sources
// remembers where the files are, and opens them again.
//
// The package is safe for concurrent use. Start reading at Terms.Record and Models.Identify.
package identity

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

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

// Terms are the part of a request that the result of a compile depends on, as the client spelled
// it.
type Terms struct {
	Model  cas.Digest
	Group  []cas.Digest // models that are compiled in one group with it, in order
	Member bool         // the request is for a group that contains the model
	CompileTerms
}

// CompileTerms are the Terms without the models.
type CompileTerms struct {
	EPs []EP
	compilers.Session
	Embed  bool
	Route  string
	Output Output
}

// Record returns the terms in their canonical spelling, or an *apierr.Error that says what is wrong
// with them. allowed are unknown options that the administrator permits. devicesOf finds the
// devices that an EP's terms select; its errors are returned unchanged.
func (t *Terms) Record(ctx context.Context, allowed Allowed,
	devicesOf func(EP) ([]compilers.Device, error)) (Record, error) {
	out := Record{Version: recordVersion, Model: t.Model, Embed: t.Embed, Group: t.Group,
		Member: t.Member, Session: compilers.Session{FreeDimensions: t.FreeDimensions}}
	if out.FreeDimensions == nil {
		out.FreeDimensions = map[string]int64{}
	}
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
	if out.GraphOptimizationLevel,
		err = canonicalLevel(t.GraphOptimizationLevel); err != nil {
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

// Devices converts devices to those of a record.
func Devices(devices []compilers.Device) []RecordDevice {
	out := make([]RecordDevice, len(devices))
	for i, d := range devices {
		out[i] = RecordDevice(d)
	}
	return out
}

// fileDigests returns the digests of the options' files, because only the content of a file
// matters.
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

type Output struct {
	// InitializersFile is the base name of a file for initializers that are not in contexts; "":
	// they are in the graph.
	InitializersFile      string
	InitializersThreshold int64 // in bytes; smaller initializers stay in the graph
	// InitializersInSource leaves initializers in the source's external data, and these files
	// become part of the build.
	InitializersInSource bool
	NodeNamePrefix       string // ep.context_node_name_prefix
	Complete             bool   // no node may be left to the CPU: session.disable_cpu_ep_fallback
}

// RecordOutput is the part of an Output that is not a session option.
type RecordOutput struct {
	InitializersFile      string `json:"initializers_file,omitempty"`
	InitializersThreshold int64  `json:"initializers_threshold,omitempty"`
	InitializersInSource  bool   `json:"initializers_in_source,omitempty"`
}

// FoldIntoSession moves those output options that are also session options into session, so that
// equal requests have equal keys.
func (o Output) FoldIntoSession(session map[string]string) (map[string]string, Output, error) {
	entries := make(map[string]string)
	if o.NodeNamePrefix != "" {
		entries["ep.context_node_name_prefix"] = o.NodeNamePrefix
	}
	if o.Complete {
		entries["session.disable_cpu_ep_fallback"] = "1"
	}
	if len(entries) == 0 {
		return session, o, nil
	}
	for key, value := range session {
		wish, wished := entries[key]
		if !wished {
			entries[key] = value
			continue
		}
		if same, err := compilers.CanonicalValue(sessionKeys[key].Kind, value); err != nil ||
			same != wish {
			return session, o, apierr.New(apierr.BadRequest, err, "session option %q is %q, and "+
				"the requested output makes it %q", key, value, wish)
		}
	}
	o.NodeNamePrefix, o.Complete = "", false
	return entries, o, nil
}

// asGiven returns the rest as the client spelled it, nil for the default.
func (o Output) asGiven() *RecordOutput {
	if o == (Output{}) {
		return nil
	}
	return &RecordOutput{o.InitializersFile, o.InitializersThreshold, o.InitializersInSource}
}

// canonical returns the rest in its canonical spelling, nil for the default. It refuses
// combinations that ONNX Runtime cannot write.
func (o Output) canonical(route string) (*RecordOutput, error) {
	out := o.asGiven()
	if out == nil {
		return nil, nil
	}
	bySession := route == compilers.RouteSessionOptions
	switch {
	case out.InitializersThreshold < 0:
		return nil, apierr.New(apierr.BadRequest, nil, "external initializers from %d bytes: "+
			"must not be negative", out.InitializersThreshold)
	case out.InitializersThreshold > 0 && out.InitializersFile == "":
		return nil, apierr.New(apierr.BadRequest, nil, "external initializers from %d bytes: no "+
			"file named for them", out.InitializersThreshold)
	case out.InitializersFile != "" && !isPlainName(out.InitializersFile):
		return nil, apierr.New(apierr.BadRequest, nil,
			"external initializers in %q: not the name of a file beside the graph",
			Truncated(out.InitializersFile))
	case out.InitializersFile != "" && out.InitializersInSource:
		return nil, apierr.New(apierr.BadRequest, nil, "initializers cannot both stay in the "+
			"source's files and be written to %q", out.InitializersFile)
	case bySession && out.InitializersInSource:
		return nil, apierr.New(apierr.BadRequest, nil, "initializers that stay in the source's "+
			"files: not possible on the route %s", route).WithHint("omit the route")
	case bySession && out.InitializersThreshold > 0:
		return nil, apierr.New(apierr.BadRequest, nil, "external initializers from %d bytes: "+
			"ONNX Runtime has no such threshold on the route %s", out.InitializersThreshold, route).
			WithHint("omit the route")
	}
	return out, nil
}

// isPlainName reports whether a client may choose this name for a file. It refuses names that end
// in .onnx, because graphs have such names.
func isPlainName(name string) bool {
	return len(name) <= 100 && name == filepath.Base(name) && name[0] != '.' &&
		!strings.ContainsFunc(name, func(r rune) bool {
			return r <= ' ' || r >= 0x7f || r == '\\' || r == ':'
		}) &&
		!strings.HasSuffix(name, ".onnx")
}

// encode returns the manifestpb.RequestedOutput.
func (o *RecordOutput) encode() []byte {
	b := appendBytes(nil, 1, []byte(o.InitializersFile))
	b = appendNumber(b, 2, uint64(o.InitializersThreshold))
	return appendNumber(b, 3, protowire.EncodeBool(o.InitializersInSource))
}

func (o *RecordOutput) output() Output {
	if o == nil {
		return Output{}
	}
	return Output{InitializersFile: o.InitializersFile,
		InitializersThreshold: o.InitializersThreshold,
		InitializersInSource:  o.InitializersInSource}
}

// Initializers converts the output options for a compiler.
func (o *RecordOutput) Initializers() compilers.Initializers {
	if o == nil {
		return compilers.Initializers{}
	}
	return compilers.Initializers{File: o.InitializersFile, Threshold: o.InitializersThreshold,
		InSource: o.InitializersInSource}
}
