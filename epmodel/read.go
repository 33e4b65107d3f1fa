package epmodel

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
)

// Read walks the ONNX model in src and reports what is in it. name stands for the file in errors. Weights and long attribute
// values are never read, only their ranges recorded; memory is bounded by the names and tables of the model (a few megabytes for
// a large one, 128 MiB at most, beyond which Read refuses). External data locations have been checked when Read returns: relative,
// inside the model's folder.
//
// Bad bytes give a *FormatError; a cancelled ctx and I/O errors are returned as they are, wrapped.
func Read(ctx context.Context, name string, src Source) (*Model, error) {
	r := &reader{ctx: ctx, src: src, name: name, size: src.Size()}
	m := &Model{Name: name, Size: r.size, Metadata: map[string]string{}, OpTypes: map[string]int{}}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	w := &walker{reader: r, m: m, files: map[string]string{}}
	if w.model(); w.err != nil {
		return nil, w.err
	}
	if m.WrapsIR() {
		m.Whole = m.filesOfIR()
	}
	return m, nil
}

// walker fills a Model. Messages whose fields may come in any order, and whose nested parts need a name that may come last, are
// walked twice: first for the names, passing over the nested parts, then into those. So every field is looked at twice at most,
// however deep it lies.
type walker struct {
	*reader
	m       *Model
	trained int               // training_info entries seen
	files   map[string]string // external locations, so that all tensors of a file share one string
}

func (w *walker) model() {
	var graph, ir bool
	w.message(span{0, w.size}, "", func(f field) {
		switch f.num {
		case 1:
			ir = true
			w.m.IRVersion = w.integer(f, "ir_version")
		case 2:
			w.m.Producer = w.text(f, "producer_name")
		case 3:
			w.m.ProducerVersion = w.text(f, "producer_version")
		case 7:
			if graph {
				w.fail(f.at, "graph", "stands twice")
			}
			graph = true
			w.graph(f, "graph", "")
		case 8:
			w.opset(f)
		case 14:
			w.metadata(f)
		case 20:
			w.training(f)
		case 25:
			w.function(f)
		}
	})
	switch {
	case w.err != nil && !graph:
		w.unlike(ir)
	case w.err != nil:
	case !graph:
		w.fail(-1, "graph", "missing: not an ONNX model")
		w.unlike(true)
	case !ir:
		w.fail(-1, "ir_version", "missing: not an ONNX model")
	case w.m.IRVersion < 1:
		w.fail(-1, "ir_version", "%d is no IR version", w.m.IRVersion)
	}
}

// domainName gives the default operator domain the name that it has besides the empty one.
func domainName(s string) string { return cmp.Or(s, "ai.onnx") }

func (w *walker) opset(f field) {
	var o Opset
	w.submessage(f, "opset_import", func(g field) {
		switch g.num {
		case 1:
			o.Domain = w.text(g, "domain")
		case 2:
			o.Version = w.integer(g, "version")
		}
	})
	o.Domain = domainName(o.Domain)
	w.m.Opsets = append(w.m.Opsets, o)
	w.keep(f.at, 32)
}

// metadata reads an entry of metadata_props. Of a key that stands twice the last value counts, as in ORT.
func (w *walker) metadata(f field) {
	k, v := w.pair(f, "metadata_props")
	key := w.text(k, "metadata_props.key")
	delete(w.m.Metadata, key)
	if v.n <= maxText {
		w.m.Metadata[key] = string(w.bytes(v, "metadata_props.value", maxText))
	}
}

func (w *walker) training(f field) {
	label := "training_info[" + strconv.Itoa(w.trained) + "]"
	w.trained++
	w.submessage(f, "training_info", func(g field) {
		switch g.num {
		case 1:
			w.graph(g, "initialization", label+".initialization")
		case 2:
			w.graph(g, "algorithm", label+".algorithm")
		}
	})
}

// function reads a model-local function: its body, and the default values of its attributes.
func (w *walker) function(f field) {
	var name, domain, overload string
	w.submessage(f, "functions", func(g field) {
		switch g.num {
		case 1:
			name = w.text(g, "name")
		case 10:
			domain = w.text(g, "domain")
		case 13:
			overload = w.text(g, "overload")
		}
	})
	path := "function " + domainName(domain) + "::" + name
	if overload != "" {
		path += ":" + overload
	}
	w.keep(f.at, len(path))
	nodes := 0
	w.submessage(f, "functions", func(g field) {
		switch g.num {
		case 7:
			nodes++
			w.node(g, path, nodes-1)
		case 11:
			w.attribute(g, "attribute_proto", nodeLabel{graph: path})
		}
	})
}
