// Package epmodel reads ONNX models, and the EPContext nodes in them, without loading either.
//
// [Read] walks the protocol buffer through an io.ReaderAt. It skips weights and context binaries
// without reading them, so a model of 10 GB takes a few hundred kilobytes and a few reads. The
// result is a [Model]: the files of external data, the EPContext nodes with every attribute,
// metadata, opsets. Tensors are not kept: [Tensors] iterates over them. [Digest], the identity of a
// model's content, [Model.Sidecars], every file that an artefact refers to, and [Validate] build on
// it.
//
// Input is hostile: on any bytes functions return, with bounded memory and bounded recursion, and
// damage is a [*FormatError] that names file, offset and field. An I/O error is returned wrapped.
//
// The package is safe for concurrent use. A *Model is never changed after Read; callers treat it as
// read-only.
//
// Start reading at [Read], then model.go for the result, and protobuf.go for reading the bytes.
package epmodel

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"unicode"
	"unicode/utf8"
)

// Read walks the ONNX model in src and returns its contents. name names the file in errors. Weights
// and long attribute values are never read, only their ranges recorded; memory is bounded by the
// names and tables of the model (some kilobytes for most, 16 MiB at most, beyond which Read
// refuses), and passes the [Gate] of ctx. External data locations have been checked when Read
// returns: relative, inside the model's directory.
//
// Invalid bytes are a *FormatError; other errors are wrapped.
func Read(ctx context.Context, name string, src Source) (*Model, error) {
	return Tensors(ctx, name, src, func(*Initializer) {})
}

// Tensors is Read that also calls each with every tensor, in file order: initializers of every
// graph and function, and constants in node attributes. A large model is walked again from its
// start, so each may see a tensor twice. The tensor is valid during the call only, but may be
// copied.
func Tensors(ctx context.Context, name string, src Source, each func(*Initializer)) (m *Model,
	err error) {
	err = withGate(ctx, name, func(most int64, _ func()) error {
		m, err = walk(ctx, name, src, most, func(_ *walker, t *Initializer) { each(t) })
		return err
	})
	return m, err
}

// walk reads a model with at most most bytes of memory, and calls each with every tensor.
func walk(ctx context.Context, name string, src Source, most int64,
	each func(*walker, *Initializer)) (*Model, error) {
	r := &reader{ctx: ctx, src: src, name: name, size: src.Size(), memoryLimit: most}
	m := &Model{Name: name, Size: r.size, Metadata: map[string]string{}, OpTypes: map[string]int{},
		about: map[fact]Range{}}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	w := &walker{reader: r, m: m, files: map[string]int{}, each: each}
	if w.model(); w.err != nil {
		return nil, w.err
	}
	if m.WrapsIR() {
		m.Whole = m.filesOfIR()
	}
	return m, nil
}

// walker fills a Model. Messages with fields in any order, and whose nested parts need a name that
// may come last, are walked twice: first for the names, skipping the nested parts, then for these.
// So every field is read at most twice at any depth.
type walker struct {
	*reader
	m       *Model
	trained int            // training_info entries seen
	files   map[string]int // the index of each external location in Model.External
	each    func(*walker, *Initializer)
	current Initializer // the tensor that is being read; valid until the next one
}

func (w *walker) model() {
	var graph, ir bool
	w.message(span{0, w.size}, "", func(f field) {
		if slices.Contains(describing, f.num) && f.n <= maxText {
			w.m.about[fact{num: f.num}] = Range{f.at, f.end() - f.at}
		}
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
				w.fail(f.at, "graph", "occurs twice")
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
		w.notAModel(ir)
	case w.err != nil:
	case !graph:
		w.fail(-1, "graph", "missing: not an ONNX model")
		w.notAModel(true)
	case !ir:
		w.fail(-1, "ir_version", "missing: not an ONNX model")
	case w.m.IRVersion < 1:
		w.fail(-1, "ir_version", "%d is not an IR version", w.m.IRVersion)
	}
}

// domainName replaces the empty name of the default operator domain by its other name.
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
	w.chargeMemory(f.at, 32)
}

// metadata reads an entry of metadata_props. Of a repeated key the last value counts, as in ORT.
func (w *walker) metadata(f field) {
	k, v := w.pair(f, "metadata_props")
	key := w.text(k, "metadata_props.key")
	delete(w.m.Metadata, key)
	if v.n <= maxText {
		w.m.about[fact{fieldMetadata, key}] = Range{f.at, f.end() - f.at}
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
	w.chargeMemory(f.at, len(path))
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

// knownFormats are formats that users mistake for ONNX. at is the offset of the bytes; -1: a text
// in lower case.
var knownFormats = []struct {
	at           int
	begins, what string
}{
	{0, "version https://git-lfs", "a Git LFS pointer: fetch the model itself with git lfs pull"},
	{4, "ORTM", "a model in ORT format"},
	{0, "PK\x03\x04", "a zip archive"},
	{0, "\x1f\x8b", "a gzip file"},
	{0, "OVEP_BIN", "an OpenVINO context binary, without the ONNX model that refers to it"},
	{4, "TFL3", "a TFLite model"},
	{0, "GGUF", "a GGUF file"},
	{0, "\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes"},
	{0, "\x80\x02", "a Python pickle"},
	{0, "\x80\x04", "a Python pickle"},
	{0, "\x80\x05", "a Python pickle"},
	{0, "\x7fELF", "a program or a library"},
	{-1, "<?xml", "XML, perhaps an OpenVINO model"},
	{-1, "<net", "XML, perhaps an OpenVINO model"},
	{-1, "<!doctype html", "a web page, perhaps an error page instead of a download"},
	{-1, "<html", "a web page, perhaps an error page instead of a download"},
}

const likenessBytes = 64

// notAModel replaces the error for a file without a graph by one that says which format it
// resembles. It is called only after the walk, because a model may begin with any of these bytes.
func (r *reader) notAModel(began bool) {
	var format *FormatError
	head := r.peek(0, int(min(r.size, likenessBytes)))
	if len(head) == 0 && r.size > 0 || !errors.As(r.err, &format) {
		return
	}
	own := *format
	switch what := looksLike(head, r.size); {
	case what != "":
		own.Field, own.Reason = "", "not an ONNX model, but "+what
	case !began:
		own.Reason = "not an ONNX model: " + own.Reason
	}
	r.err = &own
}

func looksLike(head []byte, size int64) string {
	text := bytes.TrimLeft(bytes.TrimPrefix(head, []byte("\xef\xbb\xbf")), " \t\r\n")
	for _, one := range knownFormats {
		b := bytes.ToLower(text)
		if one.at >= 0 {
			b = head[min(one.at, len(head)):]
		}
		if bytes.HasPrefix(b, []byte(one.begins)) {
			return one.what
		}
	}
	switch {
	case size == 0:
		return "an empty file"
	case len(head) >= 9 && head[8] == '{' && binary.LittleEndian.Uint64(head) < uint64(size):
		return "weights in safetensors format"
	case bytes.HasPrefix(text, []byte("{")) && isText(head):
		return "JSON"
	case isText(head):
		return "text"
	case len(bytes.Trim(head, "\x00")) == 0:
		return "a file that begins with zeros only, like an incomplete download"
	}
	return ""
}

func isText(head []byte) bool {
	for len(head) > 0 {
		c, n := utf8.DecodeRune(head)
		switch {
		case c == utf8.RuneError && n == 1:
			return !utf8.FullRune(head)
		case !unicode.IsPrint(c) && !unicode.IsSpace(c):
			return false
		}
		head = head[n:]
	}
	return true
}
