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

// TooLargeError says that a graph, with what stands inside it, is larger than a graph may be.
type TooLargeError struct {
	File        string
	Size, Limit int64 // bytes
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("%s: with what stands inside it the graph has %d bytes, and protobuf, the format of ONNX files, takes %d at most", e.File, e.Size, e.Limit)
}

// FormError says why an artefact cannot be brought into its other form.
type FormError struct {
	File, Node string
	Reason     string
}

func (e *FormError) Error() string { return fmt.Sprintf("%s: node %q: %s", e.File, e.Node, e.Reason) }

// DetachedContext is a context that comes out of a graph: its file's name, and its bytes in the graph file.
type DetachedContext struct {
	Name  string
	Bytes *io.SectionReader
}

// Embed plans the embedded form of the artefact that m was read of: each context that stands in a file beside the graph goes into
// the node that names the file. sidecars has the files of [Model.ContextFiles]. Nodes with main_context 0, and whatever else is in the
// graph, stay as they are, to the byte. No file is read but the graph's tables.
//
// A *FormError: the artefact has no context in a file, or one that has to stay there. A *TooLargeError: the graph would have more
// than limit bytes, which is MaxGraph or less.
func Embed(ctx context.Context, m *Model, graph Source, sidecars map[string]Source, limit int64) (*Splice, error) {
	s := newForm(ctx, m, graph)
	for _, c := range m.Contexts {
		if !c.beside() {
			continue
		}
		if len(c.sidecars()) > 1 {
			return nil, &FormError{m.Name, c.Node, fmt.Sprintf("its context %q needs further files beside it", c.CacheContext)}
		}
		bin := sidecars[c.CacheContext]
		if bin == nil {
			return nil, &FormError{m.Name, c.Node, fmt.Sprintf("its context %q is not there", c.CacheContext)}
		}
		s.set(c, 1, bin)
	}
	out, err := s.rewrite("no context stands in a file")
	if err == nil && out.size > limit {
		return nil, &TooLargeError{m.Name, out.size, limit}
	}
	return out, err
}

// Detach plans the form with files beside the graph: each context that stands in a node becomes a file, and equal ones become
// one. output is the name that the graph is to have; the files are named after it, as their EPs would. The rest is as with Embed.
func Detach(ctx context.Context, m *Model, graph Source, output string, sum Sum) (*Splice, []DetachedContext, error) {
	s := newForm(ctx, m, graph)
	files := detached{output: output, graph: graph, sum: sum, taken: map[string]bool{output: true}, lengths: map[int64]int{}, known: map[[32]byte]string{}}
	for _, r := range m.Sidecars() {
		files.taken[r.Name] = true
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
		s.set(c, 0, bytes.NewReader([]byte(name)))
	}
	out, err := s.rewrite("no context stands in the graph")
	return out, files.list, err
}

// beside says whether the node holds a context, and in a file.
func (c Context) beside() bool { return c.MainContext == 1 && c.EmbedMode == 0 && c.CacheContext != "" }

// ContextFiles are the names of the files that hold contexts, sorted, each once.
func (m *Model) ContextFiles() []string {
	names := map[string]bool{}
	for _, c := range m.Contexts {
		if c.beside() {
			names[c.CacheContext] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// detached gives the files that come out of a graph their names.
type detached struct {
	output  string
	graph   Source
	sum     Sum
	taken   map[string]bool
	lengths map[int64]int       // how many contexts have a length: one of its own is not hashed
	known   map[[32]byte]string // by the digest of the bytes
	list    []DetachedContext
}

// name gives the file of a context: one of its own, or that of an equal one.
func (d *detached) name(ctx context.Context, c Context) (string, error) {
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

func (d *detached) add(c Context) string {
	stem := strings.TrimSuffix(d.output, path.Ext(d.output)) + fileSuffix(c.Source)
	name := stem + ".bin"
	for i := max(1, len(d.list)); d.taken[name]; i++ { // further on than all before, so that many cost no more than their number
		name = fmt.Sprintf("%s_%d.bin", stem, i)
	}
	d.taken[name] = true
	d.list = append(d.list, DetachedContext{name, c.Open(d.graph)})
	return name
}

// fileSuffix is what the EP that made a context puts between the graph's name and ".bin".
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

// form collects what is to change.
type form struct {
	splicer
	at []int64
}

func newForm(ctx context.Context, m *Model, graph Source) *form {
	r := &reader{ctx: ctx, src: graph, name: m.Name, size: graph.Size()}
	return &form{splicer: splicer{reader: r, change: map[int64]func(field) (*Splice, error){}}}
}

// set makes the node hold a context, or name its file.
func (s *form) set(c Context, embedMode int64, value Source) {
	s.at = append(s.at, c.Offset)
	s.change[c.Offset] = func(node field) (*Splice, error) { return s.node(node, embedMode, value) }
}

func (s *form) rewrite(none string) (*Splice, error) {
	if len(s.at) == 0 {
		return nil, &FormError{s.name, "", none}
	}
	slices.Sort(s.at)
	out, err := s.message(span{0, s.size}, s.at)
	if err != nil {
		return nil, err
	}
	out.base = s.src
	return out, nil
}

// node gives a NodeProto's new payload: two attributes have another value.
func (s *form) node(f field, embedMode int64, value Source) (*Splice, error) {
	out := new(Splice)
	var mode, context bool
	err := s.reader.message(f.span, "node", func(g field) error {
		name := ""
		if g.num == 5 {
			v, err := (&walker{reader: s.reader}).contextValue(g)
			if err != nil {
				return err
			}
			name = v.name
		}
		var changed *Splice
		var err error
		switch name {
		case "embed_mode":
			mode = true
			changed, err = s.attribute(g, 3, embedModeField(embedMode))
		case "ep_cache_context":
			context = true
			payload := new(Splice)
			payload.add(value)
			holder := new(Splice)
			holder.addField(4, payload)
			changed, err = s.attribute(g, 4, holder)
		default:
			out.keep(g.at, g.end()-g.at)
			return nil
		}
		if err == nil {
			out.addField(5, changed)
		}
		return err
	})
	if err == nil && !context {
		err = s.fail(f.at, "node", "no attribute ep_cache_context any more: the file changed while being read")
	}
	if !mode { // the default, 1, was meant
		attribute := new(Splice)
		attribute.add(bytes.NewReader(embedModeAttribute(embedMode)))
		out.addField(5, attribute)
	}
	return out, err
}

// attribute gives an AttributeProto's new payload: the field num has another value, at the place where it stood, else at the end.
func (s *form) attribute(f field, num protowire.Number, value *Splice) (*Splice, error) {
	out, seen := new(Splice), false
	err := s.reader.message(f.span, "attribute", func(g field) error {
		switch {
		case g.num != num:
			out.keep(g.at, g.end()-g.at)
		case seen:
			return s.fail(g.at, "", "stands twice in an attribute")
		default:
			seen = true
			out.addSplice(value)
		}
		return nil
	})
	if !seen {
		out.addSplice(value)
	}
	return out, err
}

func embedModeField(mode int64) *Splice {
	s := new(Splice)
	s.add(bytes.NewReader(protowire.AppendVarint(protowire.AppendTag(nil, 3, protowire.VarintType), uint64(mode))))
	return s
}

// embedModeAttribute is the payload of a whole AttributeProto, as protobuf writes it.
func embedModeAttribute(mode int64) []byte {
	b := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), "embed_mode")
	b = protowire.AppendVarint(protowire.AppendTag(b, 3, protowire.VarintType), uint64(mode))
	return protowire.AppendVarint(protowire.AppendTag(b, 20, protowire.VarintType), typeInt)
}
