package epmodel

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// MaxGraph is protobuf's limit on a message, and so ONNX's on a graph file: 2 GiB less one byte.
const MaxGraph = 1<<31 - 1

// TooLargeError says that a graph, with the contexts inside it, is larger than a graph may be.
type TooLargeError struct {
	File        string
	Size, Limit int64 // bytes
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("%s: with embedded contexts the graph has %d bytes, and ONNX files may "+
		"have at most %d", e.File, e.Size, e.Limit)
}

// FormError says why an artefact cannot be converted from embedded to sidecar, or back.
type FormError struct {
	File, Node string
	Reason     string
}

func (e *FormError) Error() string {
	return fmt.Sprintf("%s: node %q: %s", e.File, e.Node, e.Reason)
}

// DetachedContext is a context that Detach moves out of a graph: the name of its new file, and its
// bytes in the graph file.
type DetachedContext struct {
	Name  string
	Bytes *Splice
}

// Embed plans a graph with the contexts of m's artefact inside: each context in a file beside the
// graph moves into the node that names the file. sidecars has the files of [Model.ContextFiles].
// Nodes with main_context 0, and all other bytes of the graph, stay unchanged. Embed reads only the
// graph's tables.
//
// It fails with a *FormError if the artefact has no context in a file, or one that has to stay
// there, and with a *TooLargeError if the graph would exceed limit, at most MaxGraph.
func Embed(ctx context.Context, m *Model, graph Source, sidecars map[string]Source,
	limit int64) (*Splice, error) {
	s := newForm(ctx, m, graph)
	for _, c := range m.Contexts {
		if !c.isExternal() {
			continue
		}
		if len(c.sidecars()) > 1 {
			return nil, &FormError{m.Name, c.Node, fmt.Sprintf("its context %q needs other "+
				"files beside it", c.CacheContext)}
		}
		bin := sidecars[c.CacheContext]
		if bin == nil {
			return nil, &FormError{m.Name, c.Node, fmt.Sprintf("its context %q is "+
				"missing", c.CacheContext)}
		}
		s.change[c.Offset] = change{1, bin}
	}
	out, err := s.rewrite("no context is in a file")
	if err == nil && out.size > limit {
		return nil, &TooLargeError{m.Name, out.size, limit}
	}
	return out, err
}

// Detach plans a graph with the contexts in files beside it: each context inside a node becomes a
// file, equal ones the same file. output is the name of the new graph; the files are named after
// it, as their EPs would name them. All else is as for Embed.
func Detach(ctx context.Context, m *Model, graph Source, output string, sum Sum) (*Splice,
	[]DetachedContext, error) {
	s := newForm(ctx, m, graph)
	files := detachment{output: output, graph: graph, sum: sum,
		usedNames: map[string]bool{output: true}, lengths: map[int64]int{},
		known: map[[32]byte]string{}}
	for _, r := range m.Sidecars() {
		files.usedNames[r.Name] = true
	}
	for _, c := range m.Contexts {
		files.lengths[c.Inline.Length]++
	}
	for _, c := range m.Contexts {
		if c.MainContext != 1 || c.Inline.Length == 0 {
			continue
		}
		name, err := files.name(ctx, c)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", m.Name, err)
		}
		s.change[c.Offset] = change{0, bytes.NewReader([]byte(name))}
	}
	out, err := s.rewrite("no context is in the graph")
	return out, files.list, err
}

// isExternal reports whether the node holds a context, and in a file.
func (c Context) isExternal() bool {
	return c.MainContext == 1 && c.EmbedMode == 0 && c.CacheContext != ""
}

// ContextFiles are the names of the files that hold contexts, sorted, each once.
func (m *Model) ContextFiles() []string {
	names := map[string]bool{}
	for _, c := range m.Contexts {
		if c.isExternal() {
			names[c.CacheContext] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

type detachment struct {
	output    string
	graph     Source
	sum       Sum
	usedNames map[string]bool
	lengths   map[int64]int       // number of contexts by length; a unique length needs no hash
	known     map[[32]byte]string // by the digest of the bytes
	list      []DetachedContext
}

func (d *detachment) name(ctx context.Context, c Context) (string, error) {
	if d.lengths[c.Inline.Length] == 1 {
		return d.add(c), nil
	}
	digest, err := d.sum(ctx, d.graph, c.Inline.Offset, c.Inline.Length)
	if err != nil {
		return "", err
	}
	if d.known[digest] == "" {
		d.known[digest] = d.add(c)
	}
	return d.known[digest], nil
}

func (d *detachment) add(c Context) string {
	stem := strings.TrimSuffix(d.output, path.Ext(d.output)) + fileSuffix(c.Source)
	name := stem + ".bin"
	// continues from the last number, so that many names take linear time
	for i := max(1, len(d.list)); d.usedNames[name]; i++ {
		name = fmt.Sprintf("%s_%d.bin", stem, i)
	}
	d.usedNames[name] = true
	bytes := new(Splice)
	bytes.add(c.Open(d.graph))
	d.list = append(d.list, DetachedContext{name, bytes})
	return name
}

// fileSuffix returns the text that a context's EP puts between the graph's name and ".bin".
func fileSuffix(source string) string {
	switch source {
	case "":
		return ""
	case "QNNExecutionProvider", "QNN":
		return "_qnn"
	}
	clean := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, source)
	return "_" + clean[:min(len(clean), 100)]
}

// contextForm rewrites a model with changed nodes for contexts. Other bytes stay the same, except
// the lengths of messages that contain these nodes.
type contextForm struct {
	*reader
	change map[int64]change // by the offset of the NodeProto
}

type change struct {
	embedMode int64
	value     Source // of ep_cache_context
}

func newForm(ctx context.Context, m *Model, graph Source) *contextForm {
	return &contextForm{&reader{ctx: ctx, src: graph, name: m.Name, size: graph.Size(),
		memoryLimit: maxKept}, map[int64]change{}}
}

func (s *contextForm) rewrite(none string) (*Splice, error) {
	if len(s.change) == 0 {
		return nil, &FormError{s.name, "", none}
	}
	out := s.around(span{0, s.size}, "", slices.Sorted(maps.Keys(s.change)))
	out.base = s.src
	return out, s.err
}

// around rewrites a message. at has the offsets of the nodes in it that change, ascending.
func (s *contextForm) around(in span, name string, at []int64) *Splice {
	out := new(Splice)
	s.message(in, name, func(f field) {
		n, _ := slices.BinarySearch(at, f.end())
		if n == 0 {
			out.keepRange(f.at, f.end()-f.at)
			return
		}
		inside := at[:n]
		at = at[n:]
		label := fmt.Sprintf("field %d", f.num)
		s.want(f, label, protowire.BytesType)
		switch change, changes := s.change[f.at]; {
		case !changes: // nodes in nested messages do
			out.addField(f.num, s.around(f.span, label, inside))
		case n > 1:
			s.fail(f.at, "node", "an EPContext node is in a subgraph of another")
		default:
			out.addField(f.num, s.node(f, change))
		}
	})
	return out
}

func (s *contextForm) node(f field, c change) *Splice {
	out, mode, value, payload := new(Splice), new(Splice), new(Splice), new(Splice)
	number := protowire.AppendVarint(protowire.AppendTag(nil, 3, protowire.VarintType),
		uint64(c.embedMode))
	mode.addBytes(number)
	payload.add(c.value)
	value.addField(4, payload)
	var hasMode, hasContext bool
	s.message(f.span, "node", func(g field) {
		name := ""
		if g.num == 5 {
			name = s.contextValue(g).name
		}
		switch name {
		case "embed_mode":
			hasMode = true
			out.addField(5, s.attribute(g, 3, mode))
		case "ep_cache_context":
			hasContext = true
			out.addField(5, s.attribute(g, 4, value))
		default:
			out.keepRange(g.at, g.end()-g.at)
		}
	})
	if !hasContext {
		s.fail(f.at, "node", "the attribute ep_cache_context has disappeared: the file changed "+
			"while being read")
	}
	if !hasMode { // the default, 1, applied
		b := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), "embed_mode")
		b = append(b, number...)
		attribute := new(Splice)
		attribute.addBytes(protowire.AppendVarint(protowire.AppendTag(b, 20, protowire.VarintType),
			typeInt))
		out.addField(5, attribute)
	}
	return out
}

// attribute returns an AttributeProto with another value of the field num, in place, or at the end
// if it is missing.
func (s *contextForm) attribute(f field, num protowire.Number, value *Splice) *Splice {
	out, seen := new(Splice), false
	s.message(f.span, "attribute", func(g field) {
		switch {
		case g.num != num:
			out.keepRange(g.at, g.end()-g.at)
		case seen:
			s.fail(g.at, "", "occurs twice in an attribute")
		default:
			seen = true
			out.addSplice(value)
		}
	})
	if !seen {
		out.addSplice(value)
	}
	return out
}

// Splice is a plan for a file that consists of spans of others and a few new bytes.
type Splice struct {
	base   io.ReaderAt // the file that is rewritten
	pieces []piece
	size   int64
}

// piece is n bytes from off, of src or, if that is nil, of the rewritten file.
type piece struct {
	src    io.ReaderAt
	off, n int64
}

const spliceBuffer = 1 << 20 // large enough that the cost of system calls is small

// WriteTo writes the file. It fails if a source is shorter than planned, or if ctx is cancelled.
func (s *Splice) WriteTo(ctx context.Context, w io.Writer) error {
	buf := make([]byte, min(spliceBuffer, max(s.size, 1)))
	for _, p := range s.pieces {
		if p.src == nil {
			p.src = s.base
		}
		for off, left := p.off, p.n; left > 0; {
			if err := ctx.Err(); err != nil {
				return err
			}
			b := buf[:min(left, int64(len(buf)))]
			if n, err := p.src.ReadAt(b, off); n < len(b) {
				if err == nil || err == io.EOF {
					err = io.ErrUnexpectedEOF
				}
				return fmt.Errorf("read at offset %d: %w", off, err)
			}
			if _, err := w.Write(b); err != nil {
				return err
			}
			off, left = off+int64(len(b)), left-int64(len(b))
		}
	}
	return nil
}

// keepRange appends n bytes of the rewritten file, joined to the last piece if they follow it.
func (s *Splice) keepRange(off, n int64) {
	s.size += n
	if last := len(s.pieces) - 1; last >= 0 && s.pieces[last].src == nil &&
		s.pieces[last].off+s.pieces[last].n == off {
		s.pieces[last].n += n
		return
	}
	s.pieces = append(s.pieces, piece{nil, off, n})
}

func (s *Splice) addBytes(b []byte) { s.add(bytes.NewReader(b)) }

func (s *Splice) add(src Source) {
	s.pieces = append(s.pieces, piece{src, 0, src.Size()})
	s.size += src.Size()
}

func (s *Splice) addSplice(t *Splice) {
	for _, p := range t.pieces {
		if p.src == nil {
			s.keepRange(p.off, p.n)
			continue
		}
		s.pieces, s.size = append(s.pieces, p), s.size+p.n
	}
}

func (s *Splice) addField(num protowire.Number, payload *Splice) {
	head := protowire.AppendTag(nil, num, protowire.BytesType)
	s.addBytes(protowire.AppendVarint(head, uint64(payload.size)))
	s.addSplice(payload)
}
