package epmodel

import (
	"context"
	"maps"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
)

// ExposeOuter plans a copy of a model in which the values of the main graph that bodies of its
// nodes (If, Loop, Scan) read are outputs too, without a type, and returns their names. ONNX
// Runtime leaves out of compiled graphs constants that only bodies read, unless they are outputs.
// The plan is nil if bodies read no such value. m is the model in src.
func ExposeOuter(ctx context.Context, m *Model, src Source) (*Splice, map[string]bool, error) {
	s := newForm(ctx, m, src)
	made, exposed := make(map[string]bool), make(map[string]bool)
	plan, outputs := &Splice{base: src}, new(Splice)
	s.message(span{0, s.size}, "", func(f field) {
		if f.num != 7 {
			plan.keepRange(f.at, f.end()-f.at)
			return
		}
		s.scope(f, false, made, exposed)
		for name := range exposed {
			if !made[name] || name == "" || slices.ContainsFunc(m.Outputs, func(v Value) bool {
				return v.Name == name
			}) {
				delete(exposed, name)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(exposed)) {
			value := new(Splice)
			value.addBytes(protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType),
				name))
			outputs.addField(12, value)
		}
		graph := new(Splice)
		graph.keepRange(f.off, f.n)
		graph.addSplice(outputs)
		plan.addField(7, graph)
	})
	if outputs.size == 0 || s.err != nil {
		return nil, nil, s.err
	}
	return plan, exposed, nil
}

// scope adds to made the values that the main graph's initializers and nodes make, and to read
// those that nodes of its bodies read, which may be the bodies' own.
func (s *contextForm) scope(graph field, body bool, made, read map[string]bool) {
	add := func(to map[string]bool, f field) {
		before := s.memoryUsed
		name := s.text(f, "name")
		if to[name] {
			s.memoryUsed = before // counted already
		}
		to[name] = true
	}
	s.submessage(graph, "graph", func(f field) {
		switch {
		case f.num == 5 && !body:
			s.submessage(f, "initializer", func(g field) {
				if g.num == 8 {
					add(made, g)
				}
			})
		case f.num == 1:
			s.submessage(f, "node", func(g field) {
				switch {
				case g.num == 1 && body:
					add(read, g)
				case g.num == 2 && !body:
					add(made, g)
				case g.num == 5:
					s.submessage(g, "attribute", func(h field) {
						if h.num == 6 || h.num == 11 { // g, graphs
							s.scope(h, true, made, read)
						}
					})
				}
			})
		}
	})
}
