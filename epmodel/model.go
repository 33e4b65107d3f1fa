package epmodel

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
)

// Model is what Read finds in an ONNX file. Sizes and offsets are in bytes.
type Model struct {
	Name            string // as given to Read; names the file in errors
	Size            int64  // of the graph file
	IRVersion       int64
	Opsets          []Opset // the model's own imports, in file order
	Producer        string
	ProducerVersion string
	GraphName       string
	// of metadata_props, without values longer than 1 MiB
	Metadata map[string]string
	// of the main graph; where initializers are listed as inputs too (IR < 4) so they are here
	Inputs  []Value
	Outputs []Value
	// of every graph and function, constants in node attributes included, in file order
	External []ExternalFile
	// every EPContext node, of every graph and function, in file order
	Contexts []Context
	// "domain::Op" -> number of nodes; the default domain is "ai.onnx"
	OpTypes map[string]int
	Nodes   int // of every graph and function
	// Whole lists files that are wholly part of the model: those of WrapsIR. Callers may add some.
	Whole []string

	about     map[fact]Range // fields that describe the model, up to 1 MiB
	inputsAt  []Range        // of the entries of graph.input
	outputsAt []Range        // of the entries of graph.output
}

// Opset is one entry of opset_import. The default domain "" is given as "ai.onnx".
type Opset struct {
	Domain  string
	Version int64
}

// Value is an input or output of the main graph.
type Value struct {
	Name string
	// "tensor", "sparse_tensor", "sequence", "map", "optional", "opaque"; "" when no type is stated
	Kind  string
	Type  int32 // element type, TensorProto.DataType; 0 unless Kind is a tensor
	Shape []Dim // nil for a scalar and for an unknown rank
}

// Dim is one dimension: a Value, or else the name of a free dimension, or neither (-1 and "").
type Dim struct {
	Value      int64 // -1 when free
	Param      string
	Denotation string // what it stands for, such as "DATA_BATCH"; most models say nothing
}

// Range is a run of bytes of the graph file. Length 0 means that there is none.
type Range struct {
	Offset, Length int64
}

// ExternalFile is a file with external data of at least one tensor.
type ExternalFile struct {
	Location string
	Tensor   string // the first tensor in it
	At       int64  // offset of that tensor in the graph file

	// farthest is the tensor that needs most of the file; tight is one that is larger than its own
	// range. The file is valid if both are, so Model needs no memory for each tensor.
	farthest, tight Initializer
}

// Initializer is a constant tensor and the place of its bytes.
type Initializer struct {
	Name string
	// Graph is "" for the main graph, otherwise the path to it: "node/attribute" of each level,
	// "function domain::name" first for a function's body
	Graph     string
	Node      string // for a tensor in a node's attribute: the node
	Attribute string // for a tensor in a node's attribute: the attribute
	Part      string // for a sparse tensor: "values" or "indices"
	Type      int32  // TensorProto.DataType
	Shape     []int64
	Sparse    bool
	// the data is in float_data, string_data, ...; Length is then 0 unless it is packed in one
	// piece
	Typed    bool
	Location string // external data file; "" when the bytes are in the graph file
	Offset   int64  // in Location, or in the graph file
	Length   int64  // -1: to the end of the file (external data without a length)
	// keys of external_data outside the schema, such as ORT's prepacked_N: they may refer to
	// further ranges of the file
	OtherKeys []string
	At        int64 // offset of the TensorProto in the graph file
}

// Context is an EPContext node. Absent attributes have the defaults of ORT's schema: EmbedMode 1,
// MainContext 1, MaxSize 0.
type Context struct {
	Node                 string // may be empty: names of nodes are optional
	Graph                string // as in Initializer
	Domain               string // "com.microsoft" in every sound artefact
	Source               string // the EP that made it; old files have none
	PartitionName        string
	SDKVersion           string
	HardwareArchitecture string
	ONNXModelFilename    string
	Notes                string
	CacheContext         string // the sidecar's name, when EmbedMode is 0
	// attribute ep_dlc_context: the name of a QNN DLC file, whatever EmbedMode says
	DLCContext string
	// the files that OpenVINO's attribute weights_metadata_map names, each once
	WeightLocations []string
	EmbedMode       int64 // 1: the context is in the node; 0: in a sidecar
	MainContext     int64 // 0: the context is another node's
	MaxSize         int64
	// the embedded bytes in the graph file, when EmbedMode is not 0
	Inline Range
	// every other attribute that is a short text or a number, those outside the schema too
	Attributes map[string]string
	// every other attribute that is neither: the range of its value
	Long            map[string]Range
	Inputs, Outputs int   // how many the node has
	Offset          int64 // of the NodeProto in the graph file
}

// Reference is a mention of a file outside the graph.
type Reference struct {
	Node string // node or tensor that refers
	// "ep_cache_context", "ep_dlc_context", "weights_metadata_map", "external_data"
	Attribute string
	Name      string // as written
	Offset    int64  // in the graph file
}

// Sum returns the BLAKE3 digest of n bytes of r from off. The caller's implementation may use every
// core.
type Sum func(ctx context.Context, r io.ReaderAt, off, n int64) ([32]byte, error)

// FormatError says what is wrong with a model's bytes, and where.
type FormatError struct {
	// the name given to Read, an external data file's location, or a sidecar's name; "" where the
	// reader knows
	File   string
	Offset int64 // in File, of the field at fault; -1 where no single offset is meant
	// in ONNX's words, such as "graph.initializer.external_data"; "" for the file as a whole
	Field  string
	Reason string // what was found, and what was expected
}

func (e *FormatError) Error() string {
	var b strings.Builder
	if e.File != "" {
		b.WriteString(e.File + ": ")
	}
	if e.Offset >= 0 {
		fmt.Fprintf(&b, "offset %d: ", e.Offset)
	}
	if e.Field != "" {
		b.WriteString(e.Field + ": ")
	}
	b.WriteString(e.Reason)
	return b.String()
}

// Source is a file of known size. *bytes.Reader and *io.SectionReader are Sources; [FileSource]
// makes one of a file.
type Source interface {
	io.ReaderAt
	Size() int64
}

// FileSource returns f with the size it has now. Reads go through the descriptor at explicit
// offsets: its position is neither used nor moved. The caller closes f. It must be a regular file,
// because a FIFO or device has no reliable size and can block for ever.
func FileSource(f *os.File) (Source, error) {
	fi, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("size of %s: %w", f.Name(), err)
	}
	if !fi.Mode().IsRegular() {
		return nil, &FormatError{File: f.Name(), Offset: -1,
			Reason: "not a regular file (" + fi.Mode().Type().String() + ")"}
	}
	return io.NewSectionReader(f, 0, fi.Size()), nil
}

// Within returns a range of a source as a source of its own. A range that reaches beyond it ends
// with it.
func Within(s Source, r Range) Source { return io.NewSectionReader(s, r.Offset, r.Length) }

// NodeSummary returns a line on what a model computes, for messages such as "no EPContext node:
// ...": the number of nodes and the most frequent operators, at most limit of them.
func (m *Model) NodeSummary(limit int) string { return nodeSummary(m.Nodes, m.OpTypes, limit) }

// UncompiledSummary is NodeSummary of the nodes that are no EPContext nodes.
func (m *Model) UncompiledSummary(limit int) string {
	rest := maps.Clone(m.OpTypes)
	delete(rest, "com.microsoft::EPContext")
	return nodeSummary(m.Nodes-len(m.Contexts), rest, limit)
}

func nodeSummary(nodes int, opTypes map[string]int, limit int) string {
	ops := slices.SortedFunc(maps.Keys(opTypes), func(a, b string) int {
		return cmp.Or(cmp.Compare(opTypes[b], opTypes[a]), cmp.Compare(a, b))
	})
	var parts []string
	for i, op := range ops {
		if i == limit {
			parts = append(parts, fmt.Sprintf("and %d more operators", len(ops)-limit))
			break
		}
		short := strings.TrimPrefix(op, "ai.onnx::")
		parts = append(parts, fmt.Sprintf("%d %s", opTypes[op], short))
	}
	noun := "nodes"
	if nodes == 1 {
		noun = "node"
	}
	if len(parts) == 0 {
		return "0 nodes"
	}
	return fmt.Sprintf("%d %s (%s)", nodes, noun, strings.Join(parts, ", "))
}
