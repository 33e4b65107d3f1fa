package epmodel

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// AttributeProto.AttributeType, as far as EPContext nodes use it.
const (
	typeFloat  = 1
	typeInt    = 2
	typeString = 3
)

// maxAttribute is the longest text that is kept of an attribute outside the schema; longer ones are
// recorded as a range.
const maxAttribute = 4 << 10

type attributeValue struct {
	field // the AttributeProto
	name  string
	typ   int64 // 0: not stated, as in very old files
	i, f  field
	s     field
}

func (w *walker) context(f field, c Context, label nodeLabel) {
	c.Attributes, c.Long = map[string]string{}, map[string]Range{}
	w.chargeMemory(f.at, 512+len(c.Node)+len(c.Domain))
	var cache attributeValue
	seen := map[string]bool{}
	w.submessage(f, "node", func(g field) {
		if g.num != 5 {
			return
		}
		v := w.contextValue(g)
		if seen[v.name] {
			w.fail(g.at, "attribute."+v.name, "occurs twice in EPContext node %q", c.Node)
		}
		seen[v.name] = true
		if v.name == "ep_cache_context" {
			cache = v // what it means depends on embed_mode, which may come later
			return
		}
		w.contextAttribute(&c, v)
		w.attribute(g, "attribute", label) // a tensor there could have external data
	})
	switch {
	case !cache.present():
	case c.EmbedMode == 0:
		c.CacheContext = w.attributeText(cache, maxPath)
	default: // the context itself
		w.attributeIsString(cache)
		if cache.s.n > 0 {
			c.Inline = Range{cache.s.off, cache.s.n}
		}
	}
	w.m.Contexts = append(w.m.Contexts, c)
}

func (r *reader) contextValue(f field) attributeValue {
	v := attributeValue{field: f}
	r.submessage(f, "attribute", func(g field) {
		switch g.num {
		case 1:
			v.name = r.text(g, "name")
		case 2:
			v.f = r.want(g, "f", protowire.Fixed32Type)
		case 3:
			v.i = r.want(g, "i", protowire.VarintType)
		case 4:
			v.s = r.want(g, "s", protowire.BytesType)
		case 20:
			v.typ = r.integer(g, "type")
		case 21:
			// filled in by the caller of a function: a way to hide a file name
			r.fail(g.at, "ref_attr_name", "an EPContext node must not take attributes from a "+
				"function's caller")
		}
	})
	return v
}

func (w *walker) contextAttribute(c *Context, v attributeValue) {
	texts := map[string]*string{
		"source": &c.Source, "partition_name": &c.PartitionName, "ep_sdk_version": &c.SDKVersion,
		"hardware_architecture": &c.HardwareArchitecture,
		"onnx_model_filename":   &c.ONNXModelFilename, "notes": &c.Notes,
	}
	numbers := map[string]*int64{"embed_mode": &c.EmbedMode, "main_context": &c.MainContext,
		"max_size": &c.MaxSize}
	if to, ok := texts[v.name]; ok {
		*to = w.attributeText(v, maxName)
		return
	}
	if to, ok := numbers[v.name]; ok {
		if v.typ != typeInt && (v.typ != 0 || !v.i.present()) {
			w.fail(v.at, "attribute."+v.name, "type %d, not INT", v.typ)
		}
		*to = int64(v.i.value)
		return
	}
	switch v.name {
	case "ep_dlc_context":
		c.DLCContext = w.attributeText(v, maxPath)
		return
	case "weights_metadata_map":
		w.attributeIsString(v)
		w.weightLocations(c, v)
	}
	w.otherAttribute(c, v)
}

func (w *walker) otherAttribute(c *Context, v attributeValue) {
	switch {
	case v.typ == typeInt || v.typ == 0 && v.i.present():
		c.Attributes[v.name] = strconv.FormatInt(int64(v.i.value), 10)
	case v.typ == typeFloat || v.typ == 0 && v.f.present():
		c.Attributes[v.name] = strconv.FormatFloat(float64(math.Float32frombits(uint32(v.f.value))),
			'g', -1, 32)
	case v.typ == typeString && !v.s.present():
		c.Attributes[v.name] = ""
	case v.typ == typeString || v.typ == 0 && v.s.present():
		if v.s.typ == protowire.BytesType && v.s.n <= maxAttribute {
			if b := w.bytes(v.s, "attribute.s", maxAttribute); utf8.Valid(b) {
				c.Attributes[v.name] = string(b)
				break
			}
		}
		c.Long[v.name] = Range{v.s.off, v.s.n}
	default:
		c.Long[v.name] = Range{v.off, v.n}
	}
	w.chargeMemory(v.at, 64)
}

func (w *walker) attributeIsString(v attributeValue) {
	if v.typ != typeString && (v.typ != 0 || !v.s.present()) {
		w.fail(v.at, "attribute."+v.name, "type %d, not STRING", v.typ)
	}
}

// attributeText reads a STRING attribute to the letter.
func (w *walker) attributeText(v attributeValue, limit int) string {
	w.attributeIsString(v)
	if !v.s.present() {
		return ""
	}
	return w.exact(v.s, "attribute."+v.name, limit)
}

// Open returns the embedded context of a model whose file is graph. It is empty for a context in a
// sidecar. Nothing is read yet.
func (c Context) Open(graph io.ReaderAt) *io.SectionReader {
	return io.NewSectionReader(graph, c.Inline.Offset, c.Inline.Length)
}

const (
	// length of a weights_metadata_map; 100 bytes for each weight is usual
	maxWeightsMap   = 32 << 20
	maxWeightsDepth = 16 // a map of maps has two levels
)

// weightLocations finds the files that OpenVINO's weights_metadata_map names: a JSON object
//
//	{"<tensor>": {"location": "<file>", "data_offset": <n>, "size": <n>}, ...}
//
// Every "location" counts, however deep, so that a further level in a later version hides nothing.
func (w *walker) weightLocations(c *Context, v attributeValue) {
	if v.s.n > maxWeightsMap {
		w.fail(v.at, "attribute.weights_metadata_map", "%d bytes long, more than %d", v.s.n,
			maxWeightsMap)
	}
	if v.s.n == 0 || w.err != nil {
		return
	}
	in := &watchedReader{r: io.NewSectionReader(w.src, v.s.off, v.s.n)}
	d := json.NewDecoder(in)
	d.UseNumber()
	known := map[string]bool{}
	err := jsonLocations(d, 0, false, func(s string) error {
		if known[s] {
			return nil
		}
		known[s] = true
		if len(s) > maxPath {
			return fmt.Errorf("a location of %d bytes", len(s))
		}
		c.WeightLocations = append(c.WeightLocations, s)
		w.chargeMemory(v.at, len(s))
		return w.err
	})
	if in.err != nil {
		w.err = fmt.Errorf("%s: read weights_metadata_map at offset %d: %w", w.name,
			v.s.off, in.err)
	}
	if err == nil && d.More() {
		err = errors.New("unexpected data after the object")
	}
	if err != nil {
		w.fail(v.s.off+d.InputOffset(), "attribute.weights_metadata_map", "unexpected JSON: "+
			"%v", err)
	}
}

// watchedReader remembers an error of the file, which a parser above would report as one of its
// own.
type watchedReader struct {
	r   io.Reader
	err error
}

func (w *watchedReader) Read(p []byte) (int, error) {
	n, err := w.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		w.err = err
	}
	return n, err
}

func jsonLocations(d *json.Decoder, depth int, isLocation bool, found func(string) error) error {
	t, err := d.Token()
	if err != nil {
		return err
	}
	delim, ok := t.(json.Delim)
	if !ok {
		s, isString := t.(string)
		switch {
		case isLocation && isString:
			return found(s)
		case isLocation:
			return errors.New("a location that is not a string")
		case depth == 0:
			return errors.New("not an object")
		}
		return nil
	}
	if depth >= maxWeightsDepth {
		return errors.New("nested too deep")
	}
	if isLocation || depth == 0 && delim != '{' {
		return errors.New("not the expected kind of value")
	}
	for d.More() {
		key := ""
		if delim == '{' {
			k, err := d.Token()
			if err != nil {
				return err
			}
			key, _ = k.(string) // the decoder lets no other key pass
		}
		if err := jsonLocations(d, depth+1, key == "location", found); err != nil {
			return err
		}
	}
	_, err = d.Token()
	return err
}
