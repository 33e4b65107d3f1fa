package modelfile

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/epmodel"
)

// Inspected is what inspect prints of an ONNX file; as JSON too.
type Inspected struct {
	File            string            `json:"file"`
	Size            int64             `json:"size"`
	ModelDigest     string            `json:"model_digest,omitempty"`
	IRVersion       int64             `json:"ir_version"`
	Opsets          map[string]int64  `json:"opsets"`
	Producer        string            `json:"producer"`
	ProducerVersion string            `json:"producer_version"`
	GraphName       string            `json:"graph_name"`
	Nodes           int               `json:"nodes"`
	Inputs          []valueResult     `json:"inputs"`
	Outputs         []valueResult     `json:"outputs"`
	Metadata        map[string]string `json:"metadata"`
	Compatibility   map[string]string `json:"compatibility"` // by execution provider
	Contexts        []contextResult   `json:"contexts"`
	Sidecars        []sidecarResult   `json:"sidecars"`
	// Problem says why it does not load as a compiled model.
	Problem string `json:"problem,omitempty"`
}

type valueResult struct {
	Name  string `json:"name"`
	Shape []any  `json:"shape"` // numbers, and names of free dimensions
}

type contextResult struct {
	Node                 string            `json:"node"`
	Graph                string            `json:"graph,omitempty"`
	Source               string            `json:"source"`
	PartitionName        string            `json:"partition_name"`
	SDKVersion           string            `json:"sdk_version"`
	HardwareArchitecture string            `json:"hardware_architecture"`
	ONNXModelFilename    string            `json:"onnx_model_filename"`
	EmbedMode            int64             `json:"embed_mode"`
	MainContext          int64             `json:"main_context"`
	MaxSize              int64             `json:"max_size"`
	CacheContext         string            `json:"cache_context,omitempty"` // the sidecar's name
	InlineBytes          int64             `json:"inline_bytes"`
	Notes                string            `json:"notes,omitempty"`
	Attributes           map[string]string `json:"attributes,omitempty"`

	// AttributeBytes has the sizes of attributes that are long, or neither text nor number.
	AttributeBytes map[string]int64 `json:"attribute_bytes,omitempty"`
}

type sidecarResult struct {
	Name      string `json:"name"`
	Node      string `json:"node"`
	Attribute string `json:"attribute"`
	Present   bool   `json:"present"`
	Size      int64  `json:"size"`
	Problem   string `json:"problem,omitempty"`
}

// Inspect reads an ONNX file and finds the files that it refers to. It fails if the file cannot be
// read. Other problems of a compiled model are in Problem.
func Inspect(ctx context.Context, path string) (*Inspected, error) {
	m, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	model, source, err := m.Read(ctx)
	if err != nil {
		return nil, err
	}
	out := describe(path, source.Size(), model)
	files := map[string]int64{}
	out.Sidecars = sidecarsOf(m, model, files)
	if len(model.Contexts) > 0 {
		if err := epmodel.Validate(model, files); err != nil {
			out.Problem = err.Error()
		}
	}
	// A digest needs every file that is referred to; missing files are reported among the sidecars.
	if d, err := m.Digest(ctx); err == nil {
		out.ModelDigest = d.String()
	} else if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return out, nil
}

func describe(path string, size int64, m *epmodel.Model) *Inspected {
	out := &Inspected{
		File: path, Size: size, IRVersion: m.IRVersion, Opsets: make(map[string]int64),
		Producer: m.Producer, ProducerVersion: m.ProducerVersion, GraphName: m.GraphName,
		Nodes: m.Nodes, Inputs: valuesOf(m.Inputs), Outputs: valuesOf(m.Outputs),
		Metadata: m.Metadata, Compatibility: m.CompatibilityInfo(),
		Contexts: make([]contextResult, len(m.Contexts)), Sidecars: []sidecarResult{},
	}
	if out.Metadata == nil {
		out.Metadata = map[string]string{}
	}
	for _, o := range m.Opsets {
		out.Opsets[o.Domain] = o.Version
	}
	for i, c := range m.Contexts {
		out.Contexts[i] = contextResult{
			Node: c.Node, Graph: c.Graph, Source: c.Source, PartitionName: c.PartitionName,
			SDKVersion: c.SDKVersion, HardwareArchitecture: c.HardwareArchitecture,
			ONNXModelFilename: c.ONNXModelFilename, EmbedMode: c.EmbedMode,
			MainContext: c.MainContext, MaxSize: c.MaxSize, CacheContext: c.CacheContext,
			InlineBytes: c.Inline.Length, Notes: c.Notes, Attributes: c.Attributes,
			AttributeBytes: make(map[string]int64, len(c.Long)),
		}
		for name, at := range c.Long {
			out.Contexts[i].AttributeBytes[name] = at.Length
		}
	}
	return out
}

func valuesOf(values []epmodel.Value) []valueResult {
	out := make([]valueResult, len(values))
	for i, v := range values {
		out[i] = valueResult{v.Name, make([]any, len(v.Shape))}
		for j, d := range v.Shape {
			switch {
			case d.Value >= 0:
				out[i].Shape[j] = d.Value
			case d.Param != "":
				out[i].Shape[j] = d.Param
			default:
				out[i].Shape[j] = "?"
			}
		}
	}
	return out
}

// sidecarsOf looks for the files that the model refers to, and adds the existing ones to files.
func sidecarsOf(m *Model, model *epmodel.Model, files map[string]int64) []sidecarResult {
	if info, err := m.File.Stat(); err == nil {
		files[info.Name()] = info.Size()
	}
	out := []sidecarResult{}
	for _, ref := range model.Sidecars() {
		s := sidecarResult{Name: ref.Name, Node: ref.Node, Attribute: ref.Attribute}
		if size, err := m.ExternalSize(ref.Name); err == nil {
			s.Present, s.Size, files[ref.Name] = true, size, size
		} else {
			s.Problem = err.Error()
		}
		out = append(out, s)
	}
	return out
}

// Rows returns the table that describes the file.
func (i *Inspected) Rows() [][]string {
	rows := [][]string{
		{"file", term.Printable(i.File) + "  " + term.Bytes(i.Size)},
		{"model digest", term.TextOrDash(i.ModelDigest)},
		{"IR version", fmt.Sprint(i.IRVersion)},
	}
	for _, domain := range slices.Sorted(maps.Keys(i.Opsets)) {
		rows = append(rows, []string{"opset",
			fmt.Sprintf("%s %d", term.TextOrDash(domain), i.Opsets[domain])})
	}
	rows = append(rows, []string{"producer",
		term.TextOrDash(strings.TrimSpace(i.Producer + " " + i.ProducerVersion))},
		[]string{"graph", fmt.Sprintf("%s, %d nodes", term.TextOrDash(i.GraphName), i.Nodes)})
	for _, v := range i.Inputs {
		rows = append(rows, v.row("input"))
	}
	for _, v := range i.Outputs {
		rows = append(rows, v.row("output"))
	}
	for _, key := range slices.Sorted(maps.Keys(i.Metadata)) {
		rows = append(rows, []string{"metadata",
			term.Printable(key) + " = " + term.Printable(i.Metadata[key])})
	}
	for _, c := range i.Contexts {
		rows = append(rows, []string{"context", c.line()})
		for _, more := range c.attributeLines() {
			rows = append(rows, []string{"", more})
		}
	}
	for _, s := range i.Sidecars {
		state := term.Bytes(s.Size)
		if !s.Present {
			state = "missing: " + term.Printable(s.Problem)
		}
		rows = append(rows, []string{"refers to",
			fmt.Sprintf("%s (%s of %s): %s", term.Printable(s.Name), s.Attribute,
				term.TextOrDash(s.Node), state)})
	}
	if i.Problem != "" {
		rows = append(rows, []string{"problem", term.Printable(i.Problem)})
	}
	return rows
}

func (v valueResult) row(what string) []string {
	return []string{what, term.Printable(v.Name) + " " + term.Printable(fmt.Sprint(v.Shape))}
}

func (c *contextResult) line() string {
	where := "in the graph, " + term.Bytes(c.InlineBytes)
	switch {
	case c.MainContext == 0:
		where = "in another node's"
	case c.EmbedMode == 0:
		where = "in " + term.TextOrDash(c.CacheContext)
	}
	return fmt.Sprintf("%s: source %s, SDK %s, hardware %s, partition %s, %s",
		term.TextOrDash(c.Node), term.TextOrDash(c.Source), term.TextOrDash(c.SDKVersion),
		term.TextOrDash(c.HardwareArchitecture), term.TextOrDash(c.PartitionName), where)
}

// attributeLines lists the long attributes, each on its own line.
func (c *contextResult) attributeLines() (lines []string) {
	add := func(name, value string) {
		lines = append(lines, "  "+term.Printable(name)+" = "+term.Printable(value))
	}
	if c.ONNXModelFilename != "" {
		add("onnx_model_filename", c.ONNXModelFilename)
	}
	if c.MaxSize != 0 {
		add("max_size", fmt.Sprint(c.MaxSize))
	}
	if c.Notes != "" {
		add("notes", c.Notes)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Attributes)) {
		add(name, c.Attributes[name])
	}
	for _, name := range slices.Sorted(maps.Keys(c.AttributeBytes)) {
		add(name, term.Count(int(c.AttributeBytes[name]), "byte"))
	}
	return lines
}
