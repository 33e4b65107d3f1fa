package identity

import (
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/apierr"
)

// Output says how the compiled model is to be written, beyond Terms.Embed. All of it counts for identity.
type Output struct {
	InitializersFile      string // base name of a file for the initializers that stay outside of contexts; empty: they are in the graph
	InitializersThreshold int64  // bytes; smaller ones stay in the graph
	InitializersInSource  bool   // those that the source has in external data stay there, and those files become part of the build
	NodeNamePrefix        string // ep.context_node_name_prefix
	Complete              bool   // no node may be left to the CPU: session.disable_cpu_ep_fallback
}

// RecordOutput is what of an Output is not a session option.
type RecordOutput struct {
	InitializersFile      string `json:"initializers_file,omitempty"`
	InitializersThreshold int64  `json:"initializers_threshold,omitempty"`
	InitializersInSource  bool   `json:"initializers_in_source,omitempty"`
}

// Fold writes those wishes that are session options where these stand, so that a wish has one spelling.
func (o Output) Fold(session map[string]string) (map[string]string, Output, error) {
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
		if same, err := compilers.CanonicalValue(sessionKeys[key].Kind, value); err != nil || same != wish {
			return session, o, apierr.New(apierr.BadRequest, err, "session option %q is %q, and the output asked for makes it %q", key, value, wish)
		}
	}
	o.NodeNamePrefix, o.Complete = "", false
	return entries, o, nil
}

// spelled is the rest as it came, nil for the default.
func (o Output) spelled() *RecordOutput {
	if o == (Output{}) {
		return nil
	}
	return &RecordOutput{o.InitializersFile, o.InitializersThreshold, o.InitializersInSource}
}

// canonical gives the rest in its one spelling, nil for the default. It refuses what ONNX Runtime has no way to write.
func (o Output) canonical(route string) (*RecordOutput, error) {
	out := o.spelled()
	if out == nil {
		return nil, nil
	}
	bySession := route == compilers.RouteSessionOptions
	switch {
	case out.InitializersThreshold < 0:
		return nil, apierr.New(apierr.BadRequest, nil, "external initializers from %d bytes on: it is 0 or more", out.InitializersThreshold)
	case out.InitializersThreshold > 0 && out.InitializersFile == "":
		return nil, apierr.New(apierr.BadRequest, nil, "external initializers from %d bytes on: no file for them is named", out.InitializersThreshold)
	case out.InitializersFile != "" && !plainName(out.InitializersFile):
		return nil, apierr.New(apierr.BadRequest, nil, "external initializers in %q: not the name of a file beside the graph", Shortened(out.InitializersFile))
	case out.InitializersFile != "" && out.InitializersInSource:
		return nil, apierr.New(apierr.BadRequest, nil, "initializers cannot both stay in the source's files and go into %q", out.InitializersFile)
	case bySession && out.InitializersInSource:
		return nil, apierr.New(apierr.BadRequest, nil, "initializers that stay in the source's files: ONNX Runtime writes none by the route %s", route).WithHint("leave the route out")
	case bySession && out.InitializersThreshold > 0:
		return nil, apierr.New(apierr.BadRequest, nil, "external initializers from %d bytes on: ONNX Runtime has no such bound by the route %s", out.InitializersThreshold, route).
			WithHint("leave the route out")
	}
	return out, nil
}

// plainName tells whether a client may choose this name for a file. Names of graphs and binaries begin with the build key, and have these endings.
func plainName(name string) bool {
	return len(name) <= 100 && name == filepath.Base(name) && name[0] != '.' && !strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '\\' || r == ':' }) &&
		!strings.HasSuffix(name, ".onnx")
}

// encode gives the record of the output: {1 initializers file, 2 threshold (varint), 3 in the source (varint)}.
func (o *RecordOutput) encode() []byte {
	b := appendBytes(nil, 1, []byte(o.InitializersFile))
	b = protowire.AppendVarint(protowire.AppendTag(b, 2, protowire.VarintType), uint64(o.InitializersThreshold))
	return protowire.AppendVarint(protowire.AppendTag(b, 3, protowire.VarintType), protowire.EncodeBool(o.InitializersInSource))
}

func decodeOutput(b []byte) (*RecordOutput, error) {
	o := &RecordOutput{}
	return o, eachField(b, func(f field) error {
		switch f.number {
		case 1:
			o.InitializersFile = string(f.bytes)
		case 2:
			o.InitializersThreshold = int64(f.varint)
		case 3:
			o.InitializersInSource = f.varint != 0
		}
		return nil // a field that is not known makes the record differ from what it encodes to
	})
}

// output gives the output as a request would wish for it. A nil pointer is the default.
func (o *RecordOutput) output() Output {
	if o == nil {
		return Output{}
	}
	return Output{InitializersFile: o.InitializersFile, InitializersThreshold: o.InitializersThreshold, InitializersInSource: o.InitializersInSource}
}

// Initializers gives it as a compiler gets it.
func (o *RecordOutput) Initializers() compilers.Initializers {
	if o == nil {
		return compilers.Initializers{}
	}
	return compilers.Initializers{File: o.InitializersFile, Threshold: o.InitializersThreshold, InSource: o.InitializersInSource}
}
