package epmodel

import "strconv"

type nodeLabel struct {
	graph string
	node  string // its name, or "Op[index]" when it has none; "" for a function's own attributes
}

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
func (w *walker) node(f field, graph string, index int) {
	c := Context{Graph: graph, Offset: f.at, EmbedMode: 1, MainContext: 1}
	var op string
	attributes := false
	w.submessage(f, "node", func(g field) {
		switch g.num {
		case 1:
			c.Inputs++
		case 2:
			c.Outputs++
		case 3:
			c.Node = w.passing(g, "name")
		case 4:
			op = w.passing(g, "op_type")
		case 5:
			attributes = true
		case 7:
			c.Domain = w.passing(g, "domain")
		}
	})
	label := nodeLabel{graph: graph, node: c.Node}
	if label.node == "" {
		label.node = op + "[" + strconv.Itoa(index) + "]"
	}
	w.count(f, domainName(c.Domain)+"::"+op)
	if op == "EPContext" {
		w.context(f, c, label)
	} else if attributes {
		w.submessage(f, "node", func(g field) {
			if g.num == 5 {
				w.attribute(g, "attribute", label)
			}
		})
	}
}

// passing reads a name that is usually dropped again, so it is not accounted for; keep follows where it stays.
func (w *walker) passing(f field, name string) string {
	before := w.kept
	s := w.text(f, name)
	w.kept = before
	return s
}

func (w *walker) count(f field, op string) {
	w.m.OpTypes[op]++
	w.m.Nodes++
	if w.m.OpTypes[op] == 1 {
		w.keep(f.at, len(op)+64)
	}
}

func (w *walker) attribute(f field, name string, label nodeLabel) {
	var attr string
	var nested, tensors, graphs int
	w.submessage(f, name, func(g field) {
		switch g.num {
		case 1:
			attr = w.passing(g, "name")
		case 5, 6, 10, 11, 22, 23:
			nested++
		}
	})
	if nested == 0 {
		return
	}
	at := Initializer{Graph: label.graph, Node: label.node, Attribute: attr}
	w.keep(f.at, len(attr)+len(label.node))
	w.submessage(f, name, func(g field) {
		switch g.num {
		case 5, 22: // the schema has these once, and merging two, as protobuf does, is nothing that a writer means
			if tensors++; tensors > 1 {
				w.fail(g.at, attr, "two tensors in one attribute")
			}
		case 6:
			if graphs++; graphs > 1 {
				w.fail(g.at, attr, "two graphs in one attribute")
			}
		}
		switch g.num {
		case 5:
			w.tensor(g, "t", at)
		case 10:
			w.tensor(g, "tensors", at)
		case 22:
			w.sparse(g, "sparse_tensor", at)
		case 23:
			w.sparse(g, "sparse_tensors", at)
		case 6:
			w.nestedGraph(g, "g", label.subgraph(attr))
		case 11:
			graphs++
			w.nestedGraph(g, "graphs", label.subgraph(attr+"["+strconv.Itoa(graphs-1)+"]"))
		}
	})
}

// nestedGraph accounts for the path, which every tensor in the graph shares.
func (w *walker) nestedGraph(f field, name, path string) {
	w.keep(f.at, len(path))
	w.graph(f, name, path)
}

// present says whether an optional field was seen.
func (f field) present() bool { return f.num != 0 }
