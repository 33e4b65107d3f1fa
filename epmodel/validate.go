package epmodel

import (
	"fmt"
	"math"
	"slices"
)

// Validate judges an artefact before it is stored or served. files has the size of every file of it but the graph, under its name
// in the artefact ("x.bin", "sub/x.bin"); further ones do no harm. It holds that
//   - there is at least one EPContext node, of the domain com.microsoft, with embed_mode and main_context 0 or 1;
//   - every node that holds a context names a file or has bytes; a node that holds none has a node of the same source that does;
//   - every reference is a clean relative name of one of the files, so none leaves the artefact;
//   - external data lies inside its file;
//   - the graph is one that protobuf can take: else a *TooLargeError.
//
// What is inside context binaries is not looked at, with the exception of [BinaryReferences], which callers add for each.
func Validate(m *Model, files map[string]int64) error {
	if len(m.Contexts) == 0 {
		return m.wrong(-1, "graph.node", "no EPContext node: "+m.NodeSummary(8))
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
			return m.wrong(c.Offset, "attribute.main_context", fmt.Sprintf("node %q takes its context from another node of %q, and there is none with main_context 1", c.Node, c.Source))
		}
	}
	if err := ValidateReferences(m.Name, m.Sidecars(), files); err != nil {
		return err
	}
	for _, t := range m.Initializers {
		if t.Location == "" {
			continue
		}
		if err := t.fits(m.Name, files[t.Location]); err != nil {
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
		if why := badArtefactName(r.Name); why != "" {
			why = fmt.Sprintf("node %q: file %q: %s", r.Node, r.Name, why)
			return nil, m.wrong(r.Offset, r.Attribute, why)
		}
		names = append(names, r.Name)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// ValidateReferences checks that references of file (a graph, or a context binary) are clean relative names of files.
func ValidateReferences(file string, refs []Reference, files map[string]int64) error {
	for _, r := range refs {
		size, there := files[r.File()]
		why := badArtefactName(r.File())
		switch {
		case why != "":
			why = ": " + why
		case !there:
			why = " is not part of the artefact"
		case size == 0 && r.Attribute != "external_data":
			why = " is empty"
		default:
			continue
		}
		return &FormatError{file, r.Offset, r.Attribute, fmt.Sprintf("node %q: file %q%s", r.Node, r.Name, why)}
	}
	return nil
}

func (m *Model) validateContext(c Context) error {
	switch {
	case c.Domain != "com.microsoft":
		return m.wrong(c.Offset, "domain", fmt.Sprintf("EPContext node %q is of the domain %q; ORT knows it in \"com.microsoft\"", c.Node, c.Domain))
	case c.EmbedMode != 0 && c.EmbedMode != 1:
		return m.wrong(c.Offset, "attribute.embed_mode", fmt.Sprintf("node %q: %d is neither 0 nor 1", c.Node, c.EmbedMode))
	case c.MainContext != 0 && c.MainContext != 1:
		return m.wrong(c.Offset, "attribute.main_context", fmt.Sprintf("node %q: %d is neither 0 nor 1", c.Node, c.MainContext))
	case c.MainContext == 1 && c.DLCContext == "" && c.CacheContext == "" && c.Inline.Length == 0:
		return m.wrong(c.Offset, "attribute.ep_cache_context", fmt.Sprintf("node %q has no context: neither bytes nor a file", c.Node))
	}
	return nil
}

func (m *Model) wrong(at int64, field, reason string) error {
	return &FormatError{File: m.Name, Offset: at, Field: field, Reason: reason}
}

func (t Initializer) fits(graph string, size int64) error {
	end := t.Offset
	if t.Length > 0 {
		end += t.Length // Read has refused what overflows
	}
	if end <= size {
		return t.filled(graph, size)
	}
	what := fmt.Sprintf("%d bytes from offset %d", t.Length, t.Offset)
	if t.Length < 0 {
		what = fmt.Sprintf("offset %d", t.Offset)
	}
	return &FormatError{graph, t.At, "external_data", fmt.Sprintf("tensor %q: %s of %q: beyond its end at %d", t.Name, what, t.Location, size)}
}

// filled checks that the range is enough for the tensor's type and shape. More may stand in it.
func (t Initializer) filled(graph string, size int64) error {
	have := t.Length
	if have <= 0 {
		have = size - t.Offset // to the end
	}
	need, known := t.Bytes()
	if !known || need <= have {
		return nil
	}
	reason := fmt.Sprintf("tensor %q: needs %d bytes, and has %d from offset %d of %q, which ends at %d", t.Name, need, have, t.Offset, t.Location, size)
	return &FormatError{graph, t.At, "external_data", reason}
}

// elementBits are the sizes of TensorProto's data types; types that are not named have none of their own, or are newer.
var elementBits = map[int32]int64{
	1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128,
	16: 16, 17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2,
}

// Bytes is the size that type and shape ask for, if it can be said.
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
