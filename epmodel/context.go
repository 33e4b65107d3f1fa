package epmodel

import (
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

// maxAttribute is the longest text that is kept of an attribute outside the schema; longer ones are recorded as a range.
const maxAttribute = 4 << 10

// attributeValue is what an attribute of an EPContext node holds.
type attributeValue struct {
	field // the AttributeProto
	name  string
	typ   int64 // 0: not stated, as in very old files
	i, f  field
	s     field
}

// context reads an EPContext node. c has what is not in attributes, and the defaults.
func (w *walker) context(f field, c Context, label nodeLabel) error {
	c.Attributes, c.Long = map[string]string{}, map[string]Range{}
	if err := w.keep(f.at, 512+len(c.Node)+len(c.Domain)); err != nil {
		return err
	}
	var cache attributeValue
	seen := map[string]bool{}
	err := w.submessage(f, "node", func(g field) error {
		if g.num != 5 {
			return nil
		}
		v, err := w.contextValue(g)
		if err != nil {
			return err
		}
		if seen[v.name] {
			return w.fail(g.at, "attribute."+v.name, "stands twice in EPContext node %q", c.Node)
		}
		seen[v.name] = true
		if v.name == "ep_cache_context" {
			cache = v // what it means depends on embed_mode, which may come later
			return nil
		}
		if err := w.contextAttribute(&c, v); err != nil {
			return err
		}
		return w.attribute(g, "attribute", label) // a tensor there could have external data
	})
	if err != nil {
		return err
	}
	if cache.present() {
		if err := w.cacheContext(&c, cache); err != nil {
			return err
		}
	}
	w.m.Contexts = append(w.m.Contexts, c)
	return nil
}

// contextValue reads an AttributeProto of an EPContext node.
func (w *walker) contextValue(f field) (attributeValue, error) {
	v := attributeValue{field: f}
	err := w.submessage(f, "attribute", func(g field) (err error) {
		switch g.num {
		case 1:
			v.name, err = w.text(g, "name")
		case 2:
			v.f, err = g, w.want(g, "f", protowire.Fixed32Type)
		case 3:
			v.i, err = g, w.want(g, "i", protowire.VarintType)
		case 4:
			v.s, err = g, w.want(g, "s", protowire.BytesType)
		case 20:
			v.typ, err = w.integer(g, "type")
		case 21:
			// filled in by the caller of a function: a way to hide a file name
			err = w.fail(g.at, "ref_attr_name", "an EPContext node may not take attributes from a function's caller")
		}
		return err
	})
	return v, err
}

// contextAttribute files every attribute but ep_cache_context.
func (w *walker) contextAttribute(c *Context, v attributeValue) error {
	texts := map[string]*string{
		"source": &c.Source, "partition_name": &c.PartitionName, "ep_sdk_version": &c.SDKVersion,
		"hardware_architecture": &c.HardwareArchitecture, "onnx_model_filename": &c.ONNXModelFilename, "notes": &c.Notes,
	}
	numbers := map[string]*int64{"embed_mode": &c.EmbedMode, "main_context": &c.MainContext, "max_size": &c.MaxSize}
	if to, ok := texts[v.name]; ok {
		s, err := w.attributeText(v, maxName)
		*to = s
		return err
	}
	if to, ok := numbers[v.name]; ok {
		if v.typ != typeInt && (v.typ != 0 || !v.i.present()) {
			return w.fail(v.at, "attribute."+v.name, "type %d, not INT", v.typ)
		}
		*to = int64(v.i.value)
		return nil
	}
	switch v.name {
	case "ep_dlc_context":
		s, err := w.attributeText(v, maxPath)
		c.DLCContext = s
		return err
	case "weights_metadata_map":
		if err := w.attributeIsString(v); err != nil {
			return err
		}
		if err := w.weightLocations(c, v); err != nil {
			return err
		}
	}
	return w.otherAttribute(c, v)
}

// otherAttribute keeps numbers and short texts, and the range of everything else.
func (w *walker) otherAttribute(c *Context, v attributeValue) error {
	switch {
	case v.typ == typeInt || v.typ == 0 && v.i.present():
		c.Attributes[v.name] = strconv.FormatInt(int64(v.i.value), 10)
	case v.typ == typeFloat || v.typ == 0 && v.f.present():
		c.Attributes[v.name] = strconv.FormatFloat(float64(math.Float32frombits(uint32(v.f.value))), 'g', -1, 32)
	case v.typ == typeString || v.typ == 0 && v.s.present():
		if v.s.present() && !v.s.isText(maxAttribute) {
			c.Long[v.name] = Range{v.s.off, v.s.n}
			break
		}
		if !v.s.present() {
			c.Attributes[v.name] = ""
			break
		}
		b, err := w.bytes(v.s, "attribute.s", maxAttribute)
		if err != nil {
			return err
		}
		if !utf8.Valid(b) {
			c.Long[v.name] = Range{v.s.off, v.s.n}
			break
		}
		c.Attributes[v.name] = string(b)
	default:
		c.Long[v.name] = Range{v.off, v.n}
	}
	return w.keep(v.at, 64)
}

func (w *walker) attributeIsString(v attributeValue) error {
	if v.typ != typeString && (v.typ != 0 || !v.s.present()) {
		return w.fail(v.at, "attribute."+v.name, "type %d, not STRING", v.typ)
	}
	return nil
}

// attributeText reads a STRING attribute to the letter.
func (w *walker) attributeText(v attributeValue, limit int) (string, error) {
	if err := w.attributeIsString(v); err != nil || !v.s.present() {
		return "", err
	}
	return w.exact(v.s, "attribute."+v.name, limit)
}

// cacheContext reads ep_cache_context: the context itself, or the name of the file that holds it.
func (w *walker) cacheContext(c *Context, v attributeValue) (err error) {
	if c.EmbedMode == 0 {
		c.CacheContext, err = w.attributeText(v, maxPath)
		return err
	}
	if v.s.n > 0 {
		c.Inline = Range{v.s.off, v.s.n}
	}
	return w.attributeIsString(v)
}

// Open gives the embedded context of a model whose file is graph. It is empty for a context in a sidecar. Nothing is read yet.
func (c Context) Open(graph io.ReaderAt) *io.SectionReader {
	return io.NewSectionReader(graph, c.Inline.Offset, c.Inline.Length)
}
