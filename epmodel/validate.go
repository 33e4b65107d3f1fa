package epmodel

import (
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
	"unicode/utf8"
)

// Validate checks an artefact before it is stored or served. files has the size of each of its
// files but the graph, by name in the artefact ("x.bin", "sub/x.bin"), and may have more. It checks
// that
//   - there is at least one EPContext node, of the domain com.microsoft, with embed_mode and
//     main_context 0 or 1;
//   - every node that holds a context names a file or has bytes; a node that holds none has a node
//     of the same source that does;
//   - every reference is a clean relative name of one of the files, so none leaves the artefact;
//   - external data lies inside its file;
//   - protobuf can read the graph: otherwise a *TooLargeError.
//
// It does not look into context binaries; callers add [BinaryReferences] for each.
func Validate(m *Model, files map[string]int64) error {
	if len(m.Contexts) == 0 {
		return m.formatErrorAt(-1, "graph.node", "no EPContext node: "+m.NodeSummary(8))
	}
	if m.Size > MaxGraph {
		return &TooLargeError{m.Name, m.Size, MaxGraph}
	}
	main := map[string]bool{}
	for _, c := range m.Contexts {
		if err := m.validateContext(c); err != nil {
			return err
		}
		if c.MainContext == 1 {
			main[c.Source] = true
		}
	}
	for _, c := range m.Contexts {
		if c.MainContext == 0 && !main[c.Source] {
			return m.formatErrorAt(c.Offset, "attribute.main_context", fmt.Sprintf("node %q "+
				"uses the context of another node of %q, and none has main_context "+
				"1", c.Node, c.Source))
		}
	}
	if err := ValidateReferences(m.Name, m.Sidecars(), files); err != nil {
		return err
	}
	for _, f := range m.External {
		if err := f.checkSize(m.Name, files[f.Location]); err != nil {
			return err
		}
	}
	return nil
}

// ArtefactFiles lists the files besides the graph that an artefact consists of, sorted, each once.
// A reference that Validate would refuse for its name is an error. Context binaries can refer to
// further files: see [BinaryReferences].
func (m *Model) ArtefactFiles() ([]string, error) {
	var names []string
	for _, r := range m.Sidecars() {
		if why := artefactNameProblem(r.Name); why != "" {
			why = fmt.Sprintf("node %q: file %q: %s", r.Node, r.Name, why)
			return nil, m.formatErrorAt(r.Offset, r.Attribute, why)
		}
		names = append(names, r.Name)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// ValidateReferences checks that references of file (a graph, or a context binary) are clean
// relative names of files.
func ValidateReferences(file string, refs []Reference, files map[string]int64) error {
	for _, r := range refs {
		size, there := files[r.File()]
		why := artefactNameProblem(r.File())
		switch {
		case why != "":
			why = ": " + why
		case !there:
			why = " is not one of the build's files"
		case size == 0 && r.Attribute != "external_data":
			why = " is empty"
		default:
			continue
		}
		return &FormatError{file, r.Offset, r.Attribute,
			fmt.Sprintf("node %q: file %q%s", r.Node, r.Name, why)}
	}
	return nil
}

func (m *Model) validateContext(c Context) error {
	switch {
	case c.Domain != "com.microsoft":
		return m.formatErrorAt(c.Offset, "domain",
			fmt.Sprintf("EPContext node %q is of the domain %q; ORT knows it in \"com.microsoft\"",
				c.Node, c.Domain))
	case c.EmbedMode != 0 && c.EmbedMode != 1:
		return m.formatErrorAt(c.Offset, "attribute.embed_mode",
			fmt.Sprintf("node %q: %d is neither 0 nor 1", c.Node, c.EmbedMode))
	case c.MainContext != 0 && c.MainContext != 1:
		return m.formatErrorAt(c.Offset, "attribute.main_context",
			fmt.Sprintf("node %q: %d is neither 0 nor 1", c.Node, c.MainContext))
	case c.MainContext == 1 && c.DLCContext == "" && c.CacheContext == "" && c.Inline.Length == 0:
		return m.formatErrorAt(c.Offset, "attribute.ep_cache_context",
			fmt.Sprintf("node %q has no context: neither bytes nor a file", c.Node))
	}
	return nil
}

func (m *Model) formatErrorAt(at int64, field, reason string) error {
	return &FormatError{File: m.Name, Offset: at, Field: field, Reason: reason}
}

// checkSize checks that every tensor of the file is inside it.
func (f *ExternalFile) checkSize(graph string, size int64) error {
	if f.tight.Location != "" && f.farthest.endInFile() <= size {
		return f.tight.checkRange(graph, size)
	}
	return f.farthest.checkRange(graph, size)
}

// endInFile returns the size that the tensor's file must have.
func (t Initializer) endInFile() int64 {
	n := max(t.Length, 0) // cannot overflow: Read refuses that
	if need, known := t.Bytes(); n == 0 && known {
		n = min(need, math.MaxInt64-t.Offset)
	}
	return t.Offset + n
}

func (t Initializer) checkRange(graph string, size int64) error {
	end := t.Offset
	if t.Length > 0 {
		end += t.Length // cannot overflow: Read refuses that
	}
	if end <= size {
		return t.coversShape(graph, size)
	}
	what := fmt.Sprintf("%d bytes from offset %d", t.Length, t.Offset)
	if t.Length < 0 {
		what = fmt.Sprintf("offset %d", t.Offset)
	}
	return &FormatError{graph, t.At, "external_data",
		fmt.Sprintf("tensor %q: %s of %q: beyond its end at %d", t.Name, what, t.Location, size)}
}

// coversShape checks that the range is large enough for the tensor's type and shape.
func (t Initializer) coversShape(graph string, size int64) error {
	have := t.Length
	if have <= 0 {
		have = size - t.Offset // to the end
	}
	need, known := t.Bytes()
	if !known || need <= have {
		return nil
	}
	reason := fmt.Sprintf(
		"tensor %q: needs %d bytes, and has %d from offset %d of %q, which ends at %d", t.Name,
		need, have, t.Offset, t.Location, size)
	return &FormatError{graph, t.At, "external_data", reason}
}

// elementBits are the sizes of TensorProto's data types; types that are not named have none of
// their own, or are newer.
var elementBits = map[int32]int64{
	1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64,
	15: 128, 16: 16, 17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2,
}

// Bytes returns the size by type and shape, if it is known.
func (t Initializer) Bytes() (size int64, known bool) {
	bits, known := elementBits[t.Type]
	if !known || t.Sparse {
		return 0, false
	}
	for _, n := range t.Shape {
		if n < 0 || n > 0 && bits > math.MaxInt64/n {
			return 0, false
		}
		bits *= n
	}
	return bits/8 + min(bits%8, 1), true
}

// compatibilityPrefix starts the metadata keys of ORT for what EPs state about an artefact.
const compatibilityPrefix = "ep_compatibility_info."

// Locations are the external data files of the model, sorted, each once, as spelled in the model,
// and those of Whole. Read has checked them.
func (m *Model) Locations() []string {
	all := slices.Clone(m.Whole)
	for _, f := range m.External {
		all = append(all, f.Location)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// WrapsIR reports whether every EPContext node only names a model in OpenVINO's own format (IR), an
// .xml file with the weights in a .bin file beside it. Such a model is not compiled: the execution
// provider compiles it at each load.
func (m *Model) WrapsIR() bool {
	other := func(c Context) bool { return !c.wrapsIR() }
	return len(m.Contexts) > 0 && !slices.ContainsFunc(m.Contexts, other)
}

func (c Context) wrapsIR() bool {
	return strings.HasPrefix(c.Source, "OpenVINO") && c.EmbedMode == 0 && c.MainContext == 1 &&
		c.DLCContext == "" && len(c.WeightLocations) == 0 &&
		locationProblem(c.CacheContext) == "" &&
		path.Ext(c.CacheContext) == ".xml" // OpenVINO loads .XML too, and cannot compile it
}

func isIR(name string) bool { return strings.EqualFold(path.Ext(name), ".xml") }

func weightsOfIR(name string) string { return strings.TrimSuffix(name, path.Ext(name)) + ".bin" }

func (m *Model) filesOfIR() (files []string) {
	for _, c := range m.Contexts {
		files = append(files, c.CacheContext, weightsOfIR(c.CacheContext))
	}
	slices.Sort(files)
	return slices.Compact(files)
}

// Sidecars lists every reference to a file outside the graph, in file order; the same file may come
// several times. Names are as written and not checked: Validate does that. Context binaries can
// refer to further files: see [BinaryReferences].
func (m *Model) Sidecars() []Reference {
	var refs []Reference
	for _, c := range m.Contexts {
		refs = append(refs, c.sidecars()...)
	}
	for _, f := range m.External {
		refs = append(refs, Reference{Node: f.Tensor, Attribute: "external_data", Name: f.Location,
			Offset: f.At})
	}
	return refs
}

func (c Context) sidecars() []Reference {
	var refs []Reference
	add := func(attribute, name string) {
		refs = append(refs, Reference{Node: c.Node, Attribute: attribute, Name: name,
			Offset: c.Offset})
	}
	if c.CacheContext != "" {
		add("ep_cache_context", c.CacheContext)
		if isIR(c.CacheContext) {
			add("ep_cache_context", weightsOfIR(c.CacheContext))
		}
	}
	if c.DLCContext != "" {
		add("ep_dlc_context", c.DLCContext)
	}
	for _, l := range c.WeightLocations {
		add("weights_metadata_map", l)
	}
	return refs
}

// CompatibilityInfo returns the compatibility string of each EP: EP name -> string. Only EPs that
// are the source of one of the nodes count: metadata of a source model survives compilation, so a
// string of another EP may be a left-over.
func (m *Model) CompatibilityInfo() map[string]string {
	info := map[string]string{}
	for _, c := range m.Contexts {
		if s, ok := m.Metadata[compatibilityPrefix+c.Source]; ok && c.Source != "" {
			info[c.Source] = s
		}
	}
	return info
}

const maxPath = 4096 // PATH_MAX: nothing longer can be opened

// memoryTag is the location that ORT writes for tensors in its own memory; offset is then an
// address. In a file it would make ORT read arbitrary memory.
const memoryTag = "_ORT_MEM_ADDR_"

// locationProblem returns what is wrong with an external data location, "" if nothing is. It
// accepts every spelling of a file below the model's directory, because ONNX Runtime opens them
// all: "./w.bin", "w//x", "w/../x". Separators and drive letters of Windows are refused where they
// could leave the directory there.
func locationProblem(s string) string {
	slashed := path.Clean(strings.ReplaceAll(s, `\`, "/"))
	switch {
	case s == "" || path.Clean(s) == ".":
		return "names no file"
	case len(s) > maxPath:
		return "the name is too long"
	case !utf8.ValidString(s) ||
		strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return "the name has control characters or is not UTF-8"
	case strings.Contains(s, memoryTag):
		return "refers to memory of the process, not to a file"
	case s[0] == '/' || s[0] == '\\' || len(s) > 1 && s[1] == ':':
		return "is absolute; it must be relative to the model's directory"
	case slashed == ".." || strings.HasPrefix(slashed, "../"):
		return "lies outside the model's directory"
	case slices.Contains([]string{"", ".", ".."}, s[strings.LastIndex(s, "/")+1:]):
		return "is a directory's name"
	}
	return ""
}

// File returns the name of the file in its clean spelling. Where an EP leaves weights in the source
// model's external data, the name is the model's own spelling, such as "./w.bin". It has to open in
// the artefact, which has no directories but those of its files: therefore "s/../w.bin" stays as it
// is, and is refused.
func (r Reference) File() string {
	if r.Attribute != "weights_metadata_map" || slices.Contains(strings.Split(r.Name, "/"), "..") {
		return r.Name
	}
	return path.Clean(r.Name)
}

// artefactNameProblem is stricter: a reference inside an artefact must be the name of one of its
// files, spelled in the one clean way.
func artefactNameProblem(s string) string {
	if why := locationProblem(s); why != "" {
		return strings.Replace(why, "the model's directory", "the artefact", 1)
	}
	if strings.Contains(s, `\`) || path.Clean(s) != s {
		return "is not a clean relative name"
	}
	return ""
}
