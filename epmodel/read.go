package epmodel

import (
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
	if err := w.model(); err != nil {
		return nil, err
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

func (w *walker) model() error {
	var graph, ir bool
	err := w.message(span{0, w.size}, "", func(f field) (err error) {
		switch f.num {
		case 1:
			ir = true
			w.m.IRVersion, err = w.integer(f, "ir_version")
		case 2:
			w.m.Producer, err = w.text(f, "producer_name")
		case 3:
			w.m.ProducerVersion, err = w.text(f, "producer_version")
		case 7:
			if graph {
				return w.fail(f.at, "graph", "stands twice")
			}
			graph = true
			err = w.graph(f, "graph", "")
		case 8:
			err = w.opset(f)
		case 14:
			err = w.metadata(f)
		case 20:
			err = w.training(f)
		case 25:
			err = w.function(f)
		}
		return err
	})
	switch {
	case err != nil && !graph:
		return w.unlike(err, ir)
	case err != nil:
		return err
	case !graph:
		return w.unlike(w.fail(-1, "graph", "missing: not an ONNX model"), true)
	case !ir:
		return w.fail(-1, "ir_version", "missing: not an ONNX model")
	case w.m.IRVersion < 1:
		return w.fail(-1, "ir_version", "%d is no IR version", w.m.IRVersion)
	}
	return nil
}

// domainName gives the default operator domain the name that it has besides the empty one.
func domainName(s string) string {
	if s == "" {
		return "ai.onnx"
	}
	return s
}

func (w *walker) opset(f field) error {
	var o Opset
	err := w.submessage(f, "opset_import", func(g field) (err error) {
		switch g.num {
		case 1:
			o.Domain, err = w.text(g, "domain")
		case 2:
			o.Version, err = w.integer(g, "version")
		}
		return err
	})
	o.Domain = domainName(o.Domain)
	w.m.Opsets = append(w.m.Opsets, o)
	if err != nil {
		return err
	}
	return w.keep(f.at, 32)
}

// metadata reads an entry of metadata_props. Of a key that stands twice the last value counts, as in ORT.
func (w *walker) metadata(f field) error {
	k, v, err := w.pair(f, "metadata_props")
	if err != nil {
		return err
	}
	key, err := w.text(k, "metadata_props.key")
	if err != nil {
		return err
	}
	delete(w.m.Metadata, key)
	if v.n > maxText {
		return nil
	}
	value, err := w.bytes(v, "metadata_props.value", maxText)
	w.m.Metadata[key] = string(value)
	return err
}

func (w *walker) training(f field) error {
	label := "training_info[" + strconv.Itoa(w.trained) + "]"
	w.trained++
	return w.submessage(f, "training_info", func(g field) error {
		switch g.num {
		case 1:
			return w.graph(g, "initialization", label+".initialization")
		case 2:
			return w.graph(g, "algorithm", label+".algorithm")
		}
		return nil
	})
}

// function reads a model-local function: its body, and the default values of its attributes.
func (w *walker) function(f field) error {
	var name, domain, overload string
	err := w.submessage(f, "functions", func(g field) (err error) {
		switch g.num {
		case 1:
			name, err = w.text(g, "name")
		case 10:
			domain, err = w.text(g, "domain")
		case 13:
			overload, err = w.text(g, "overload")
		}
		return err
	})
	if err != nil {
		return err
	}
	path := "function " + domainName(domain) + "::" + name
	if overload != "" {
		path += ":" + overload
	}
	if err := w.keep(f.at, len(path)); err != nil {
		return err
	}
	nodes := 0
	return w.submessage(f, "functions", func(g field) error {
		switch g.num {
		case 7:
			nodes++
			return w.node(g, path, nodes-1)
		case 11:
			return w.attribute(g, "attribute_proto", nodeLabel{graph: path})
		}
		return nil
	})
}
