package epmodel

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
)

// Interface is what a session shows of a model: its inputs and outputs, the initializers that a
// program may override, and what describes the model. ONNX Runtime writes compiled models without
// some of it; [Interface.Restore] adds that again.
type Interface struct {
	inputs, outputs []Value
	Size            int64           // bytes of memory that it takes, estimated
	constant        map[string]bool // inputs with an initializer
	// entries of graph.input: those that have an initializer, which a program may override
	overridable []named
	about       map[fact][]byte // with their tags
	// Exposed names outputs that only the compiled copy of the source has (see ExposeOuter).
	// Restore removes them.
	Exposed map[string]bool
}

type named struct {
	name  string
	bytes []byte // the encoded field, with its tag
}

// fact is a field of ModelProto that describes the model: one of describing, or an entry of
// metadata_props with its key.
type fact struct {
	num protowire.Number
	key string
}

// valueBytes is the memory of a value beside its encoded field, with a short name.
const valueBytes = 64

// describing are the fields of ModelProto that ONNX Runtime leaves out of compiled models:
// producer_name, producer_version, domain, model_version and doc_string.
var describing = []protowire.Number{2, 3, 4, 5, 6}

const fieldMetadata = 14

// ErrDiffers says that a session of a compiled model would differ from one of its source.
var ErrDiffers = errors.New("the compiled model differs from its source")

// ReadInterface reads the interface of the model in src. Descriptions and metadata longer than 1
// MiB are left out.
func ReadInterface(ctx context.Context, name string, src Source) (*Interface, error) {
	m, err := Read(ctx, name, src)
	if err != nil {
		return nil, err
	}
	s := newForm(ctx, m, src)
	out := &Interface{inputs: m.Inputs, outputs: m.Outputs, about: make(map[fact][]byte)}
	if out.constant, err = initialized(ctx, m, src, m.Inputs); err != nil {
		return nil, err
	}
	for about, at := range m.about {
		out.about[about] = s.raw(at)
	}
	for i, v := range m.Inputs {
		if out.constant[v.Name] && m.IRVersion >= 4 { // before they were constants
			out.overridable = append(out.overridable, named{v.Name, s.raw(m.inputsAt[i])})
		}
		s.chargeMemory(m.inputsAt[i].Offset, int(m.inputsAt[i].Length))
	}
	out.Size = s.memoryUsed + valueBytes*int64(len(m.Inputs)+len(m.Outputs))
	return out, s.err
}

// initialized returns which of the values the main graph has an initializer for.
func initialized(ctx context.Context, m *Model, src Source, of []Value) (map[string]bool, error) {
	found := make(map[string]bool, len(of))
	for _, v := range of {
		found[v.Name] = false
	}
	_, err := Tensors(ctx, m.Name, src, func(t *Initializer) {
		if _, wanted := found[t.Name]; wanted && t.Graph == "" && t.Node == "" {
			found[t.Name] = true
		}
	})
	return found, err
}

// raw reads a field with its tag.
func (r *reader) raw(at Range) []byte {
	if r.chargeMemory(at.Offset, int(at.Length)); r.err != nil {
		return nil
	}
	out := make([]byte, at.Length)
	r.readAt(out, at.Offset)
	return out
}

// Restore plans a graph that has what compiling lost of its source's interface i: the source's
// description at the end of the file, and its overridable initializers as inputs of the graph. m is
// the model in graph. The plan is nil if nothing is to be written. loads reports whether it may
// change how the graph loads. ErrDiffers is returned for a compiled model that cannot stand for its
// source.
func (i *Interface) Restore(ctx context.Context, m *Model, graph Source) (plan *Splice, loads bool,
	err error) {
	s := newForm(ctx, m, graph)
	has, err := initialized(ctx, m, graph, slices.Concat(m.Inputs, i.inputs))
	if err == nil {
		err = cmp.Or(sameValues("output", i.outputs, without(m.Outputs, i.Exposed)),
			sameValues("input", without(i.inputs, i.constant), without(m.Inputs, has)))
	}
	added, tail, replaced := new(Splice), new(Splice), make(map[protowire.Number]bool)
	for _, o := range i.overridable {
		if slices.ContainsFunc(m.Inputs, func(v Value) bool { return v.Name == o.name }) {
			continue
		}
		if !has[o.name] && err == nil {
			err = fmt.Errorf("%w: the initializer %q, which a program may override in the source "+
				"model, is compiled into it", ErrDiffers, o.name)
		}
		added.addBytes(o.bytes)
	}
	for _, about := range slices.SortedFunc(maps.Keys(i.about), func(a, b fact) int {
		return cmp.Or(cmp.Compare(a.num, b.num), cmp.Compare(a.key, b.key))
	}) {
		own, has := m.about[about]
		if !has || about.num != fieldMetadata && !bytes.Equal(i.about[about], s.raw(own)) {
			replaced[about.num] = about.num != fieldMetadata
			tail.addBytes(i.about[about])
		}
	}
	var hidden []Range
	for n, v := range m.Outputs {
		if i.Exposed[v.Name] {
			hidden = append(hidden, m.outputsAt[n])
		}
	}
	if err != nil || len(hidden) == 0 && added.size+tail.size == 0 {
		return nil, false, err
	}
	plan, loads = &Splice{base: graph}, len(hidden) > 0 || added.size > 0
	s.message(span{0, s.size}, "", func(f field) {
		switch {
		case replaced[f.num]:
		case f.num == 7 && loads:
			inner := new(Splice)
			from := f.off
			for _, at := range hidden {
				inner.keepRange(from, at.Offset-from)
				from = at.Offset + at.Length
			}
			inner.keepRange(from, f.end()-from)
			inner.addSplice(added)
			plan.addField(7, inner)
		default:
			plan.keepRange(f.at, f.end()-f.at)
		}
	})
	plan.addSplice(tail)
	return plan, loads, s.err
}

// sameValues compares inputs or outputs, in order. Shapes of outputs are not compared, because ONNX
// Runtime runs models that state them wrongly, and compiling states what it computed.
func sameValues(what string, source, compiled []Value) error {
	for n, c := range compiled {
		why := ""
		switch {
		case n >= len(source) || c.Name != source[n].Name:
			why = "it has an %s %q, which the model does not have there"
		case c.Kind != source[n].Kind || c.Type != source[n].Type:
			why = "its %s %q has another type than the model's"
		case what == "input" && !sameShape(c.Shape, source[n].Shape):
			why = "its %s %q has another shape than the model's"
		default:
			continue
		}
		return fmt.Errorf("%w: "+why, ErrDiffers, what, c.Name)
	}
	if n := len(compiled); n < len(source) {
		return fmt.Errorf("%w: it lacks the %s %q of the model", ErrDiffers, what, source[n].Name)
	}
	return nil
}

func without(values []Value, names map[string]bool) []Value {
	return slices.DeleteFunc(slices.Clone(values), func(v Value) bool { return names[v.Name] })
}

// sameShape reports whether two shapes allow a common one. Free dimensions agree with all sizes,
// because a request may fix them.
func sameShape(a, b []Dim) bool {
	// a shape without dimensions is a scalar's, or unknown
	return len(a) == 0 || len(b) == 0 || slices.EqualFunc(a, b, func(a, b Dim) bool {
		return a.Value == b.Value || a.Value < 0 || b.Value < 0
	})
}
