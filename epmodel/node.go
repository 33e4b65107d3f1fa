package epmodel

import (
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"
)

// nodeLabel is the place of an attribute: the graph and the node that it stands in.
type nodeLabel struct {
	graph string
	node  string // its name, or "Op[index]" when it has none; "" for a function's own attributes
}

// subgraph is the way to a graph in the node's attribute.
func (l nodeLabel) subgraph(attribute string) string {
	s := attribute
	if l.node != "" {
		s = l.node + "." + attribute
	}
	if l.graph != "" {
		s = l.graph + "/" + s
	}
	return s
}

// node walks a NodeProto, the index-th of its graph.
func (w *walker) node(f field, graph string, index int) error {
	c := Context{Graph: graph, Offset: f.at, EmbedMode: 1, MainContext: 1}
	var op string
	attributes := false
	err := w.submessage(f, "node", func(g field) (err error) {
		switch g.num {
		case 1:
			c.Inputs++
		case 2:
			c.Outputs++
		case 3:
			c.Node, err = w.passing(g, "name")
		case 4:
			op, err = w.passing(g, "op_type")
		case 5:
			attributes = true
		case 7:
			c.Domain, err = w.passing(g, "domain")
		}
		return err
	})
	if err != nil {
		return err
	}
	label := nodeLabel{graph: graph, node: c.Node}
	if label.node == "" {
		label.node = op + "[" + strconv.Itoa(index) + "]"
	}
	if err := w.count(f, domainName(c.Domain)+"::"+op); err != nil {
		return err
	}
	if op == "EPContext" {
		return w.context(f, c, label)
	}
	if !attributes {
		return nil
	}
	return w.submessage(f, "node", func(g field) error {
		if g.num != 5 {
			return nil
		}
		return w.attribute(g, "attribute", label)
	})
}

// passing reads a name that is usually dropped again, so it is not accounted for; keep follows where it stays.
func (w *walker) passing(f field, name string) (string, error) {
	before := w.kept
	s, err := w.text(f, name)
	w.kept = before
	return s, err
}

// count notes a node's operator.
func (w *walker) count(f field, op string) error {
	w.m.OpTypes[op]++
	w.m.Nodes++
	if w.m.OpTypes[op] > 1 {
		return nil
	}
	return w.keep(f.at, len(op)+64)
}

// attribute walks into the tensors and graphs of an AttributeProto.
func (w *walker) attribute(f field, name string, label nodeLabel) error {
	var attr string
	var nested, tensors, graphs int
	err := w.submessage(f, name, func(g field) (err error) {
		switch g.num {
		case 1:
			attr, err = w.passing(g, "name")
		case 5, 6, 10, 11, 22, 23:
			nested++
		}
		return err
	})
	if err != nil || nested == 0 {
		return err
	}
	at := Initializer{Graph: label.graph, Node: label.node, Attribute: attr}
	if err := w.keep(f.at, len(attr)+len(label.node)); err != nil {
		return err
	}
	return w.submessage(f, name, func(g field) error {
		switch g.num {
		case 5, 22: // the schema has these once, and merging two, as protobuf does, is nothing that a writer means
			if tensors++; tensors > 1 {
				return w.fail(g.at, attr, "two tensors in one attribute")
			}
		case 6:
			if graphs++; graphs > 1 {
				return w.fail(g.at, attr, "two graphs in one attribute")
			}
		}
		switch g.num {
		case 5:
			return w.tensor(g, "t", at)
		case 10:
			return w.tensor(g, "tensors", at)
		case 22:
			return w.sparse(g, "sparse_tensor", at)
		case 23:
			return w.sparse(g, "sparse_tensors", at)
		case 6:
			return w.nestedGraph(g, "g", label.subgraph(attr))
		case 11:
			graphs++
			return w.nestedGraph(g, "graphs", label.subgraph(attr+"["+strconv.Itoa(graphs-1)+"]"))
		}
		return nil
	})
}

// nestedGraph accounts for the path, which every tensor in the graph shares.
func (w *walker) nestedGraph(f field, name, path string) error {
	if err := w.keep(f.at, len(path)); err != nil {
		return err
	}
	return w.graph(f, name, path)
}

// present says whether an optional field was seen.
func (f field) present() bool { return f.num != 0 }

// isText says whether a field is length-delimited and at most n bytes long.
func (f field) isText(n int64) bool { return f.typ == protowire.BytesType && f.n <= n }
