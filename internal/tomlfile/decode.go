package tomlfile

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/internal/suggest"
)

// Value is a value of a document with its position, for messages about it. Its path lists the keys
// that lead to it from the top; elements of arrays are decimal numbers from 0.
type Value struct {
	*Document
	Path []string
	Raw  any // as go-toml decodes it; nil if missing
}

// Decoder is a type that decodes its value itself, also a missing one.
type Decoder interface{ Decode(Value) }

// Checker is a struct that validates its fields together, after they are decoded.
type Checker interface{ Check(Value) }

// Root returns the top-level table.
func (d *Document) Root() Value { return Value{d, nil, d.values} }

// In returns the value at the path of names in a table or an array.
func (v Value) In(names ...string) Value {
	for _, name := range names {
		var inner any
		switch raw := v.Raw.(type) {
		case map[string]any:
			inner = raw[name]
		case []any:
			if i, err := strconv.Atoi(name); err == nil && i >= 0 && i < len(raw) {
				inner = raw[i]
			}
		}
		v = Value{v.Document, append(slices.Clone(v.Path), name), inner}
	}
	return v
}

// Elements returns the elements of an array.
func (v Value) Elements() []Value {
	list, _ := v.Raw.([]any)
	all := make([]Value, len(list))
	for i := range list {
		all[i] = v.In(strconv.Itoa(i))
	}
	return all
}

// Has reports whether a table has the key.
func (v Value) Has(key string) bool { return v.In(key).Raw != nil }

// Keys returns the keys of a table, sorted.
func (v Value) Keys() []string {
	table, _ := v.Raw.(map[string]any)
	return slices.Sorted(maps.Keys(table))
}

// Replace gives another key of the same table this value, as if the file said so, and records a
// warning. The file's own value of that key has precedence.
func (v Value) Replace(key string, value any) {
	table := v.In()
	table.Path = v.Path[:len(v.Path)-1]
	inner := table.In(key)
	v.Warnings = append(v.Warnings, v.AddError(fmt.Sprintf("it has another name now: write %s = %q",
		key, value)))
	raw := v.Root().In(table.Path...).Raw.(map[string]any)
	delete(raw, v.key())
	if _, has := raw[key]; !has {
		raw[key] = value
		v.positions[pathKey(inner.Path)] = v.Position()
	}
}

// Position returns the position of the value, zero if it is missing.
func (v Value) Position() Position { return v.positions[pathKey(v.Path)] }

// AddError returns an Error with the position of the value.
func (v Value) AddError(text string) *Error {
	return &Error{v.File, v.Position(), Spell(v.Path), text}
}

// Errorf records a mistake in the value.
func (v Value) Errorf(format string, args ...any) {
	v.Add(v.AddError(fmt.Sprintf(format, args...)))
}

// Into decodes the value into the variable that to points to. Missing and invalid values leave it
// unchanged, and mistakes are recorded. Into decodes texts, booleans, numbers, arrays, and tables
// into maps and structs; of a struct the fields that are tagged `toml:"key"`, and those of embedded
// structs; a Value takes anything. The field with the key "*" is a map[string]Value for the tables
// that no other field takes. All other keys are mistakes. More tags of a field, which count for
// elements too:
//
//	is:"name"         the text passes Document.Checks[name]; "path" and "file" make it absolute
//	in:"a,b"          the text is one of these
//	range:"1 10"      the number is at least the first, and at most the second
//	required:"text"   the key is there; the text is the mistake if it is not
//	loose:"true"      a whole number or a truth is taken for its text
func (v Value) Into(to any) { v.into(reflect.ValueOf(to).Elem(), "") }

// Text returns the value as a text that passes the named check, otherwise "".
func (v Value) Text(check string) (text string) {
	v.text(reflect.ValueOf(&text).Elem(), reflect.StructTag(fmt.Sprintf("is:%q", check)))
	return text
}

func (v Value) into(to reflect.Value, tag reflect.StructTag) {
	switch own := to.Addr().Interface().(type) {
	case Decoder:
		own.Decode(v)
		return
	case *Value:
		*own = v
		return
	}
	switch to.Kind() {
	case reflect.Struct:
		v.table(to)
	case reflect.String:
		v.text(to, tag)
	case reflect.Bool:
		if truth, ok := v.Raw.(bool); ok {
			to.SetBool(truth)
		} else {
			v.Errorf("it is %s and must be true or false", Kind(v.Raw))
		}
	case reflect.Uint64, reflect.Uint32, reflect.Int64, reflect.Float64:
		v.number(to, tag)
	case reflect.Slice:
		if _, ok := v.Raw.([]any); !ok {
			v.Errorf("it is %s and must be an array in brackets", Kind(v.Raw))
		}
		elements := v.Elements()
		to.SetZero() // an empty array equals a missing one
		to.Grow(len(elements))
		to.SetLen(len(elements))
		for i, element := range elements {
			element.into(to.Index(i), tag)
		}
	case reflect.Map:
		v.entries(to, tag)
	}
}

// entries adds a table to a copy of the map.
func (v Value) entries(to reflect.Value, tag reflect.StructTag) {
	if _, ok := v.Raw.(map[string]any); !ok {
		v.Errorf("it is %s and must be a table", Kind(v.Raw))
	}
	all := reflect.MakeMap(to.Type())
	for _, key := range to.MapKeys() {
		all.SetMapIndex(key, to.MapIndex(key))
	}
	for _, key := range v.Keys() {
		element := reflect.New(to.Type().Elem()).Elem()
		v.In(key).field(element, tag)
		all.SetMapIndex(reflect.ValueOf(key), element)
	}
	to.Set(all)
}

func (v Value) table(to reflect.Value) {
	if _, ok := v.Raw.(map[string]any); v.Raw != nil && !ok {
		v.Errorf("it is %s and must be a table", Kind(v.Raw))
		return
	}
	known := make(map[string]bool)
	rest := v.fields(to, known)
	for _, key := range v.Keys() {
		inner := v.In(key)
		_, isTable := inner.Raw.(map[string]any)
		switch {
		case known[key]:
		case isTable && rest.IsValid():
			rest.SetMapIndex(reflect.ValueOf(key), reflect.ValueOf(inner))
		default:
			inner.unknown(known)
		}
	}
	if checked, ok := to.Addr().Interface().(Checker); ok {
		checked.Check(v)
	}
}

// fields decodes the fields of a struct, and returns the field for other tables.
func (v Value) fields(to reflect.Value, known map[string]bool) (rest reflect.Value) {
	for _, f := range reflect.VisibleFields(to.Type()) {
		key, tagged := f.Tag.Lookup("toml")
		switch inner := v.In(key); {
		case !tagged:
		case key == "*":
			rest = to.FieldByIndex(f.Index)
			rest.Set(reflect.MakeMap(rest.Type()))
		default:
			known[key] = true
			if need := f.Tag.Get("required"); need != "" && inner.Raw == nil {
				v.Errorf("%s", need)
			}
			inner.field(to.FieldByIndex(f.Index), f.Tag)
		}
	}
	return rest
}

// field decodes a field that may be missing.
func (v Value) field(to reflect.Value, tag reflect.StructTag) {
	if v.Note != nil && leaf(to.Type()) {
		v.Note(v, to.Interface)
	}
	_, own := to.Addr().Interface().(Decoder)
	if v.Raw != nil || to.Kind() == reflect.Struct || own {
		v.into(to, tag)
	}
}

// leaf reports whether a type is of single values, or of arrays of such.
func leaf(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Slice:
		return leaf(t.Elem())
	case reflect.Struct, reflect.Map, reflect.Interface:
		return false
	}
	return true
}

// maxListed bounds the fields that the message about an unknown one lists.
const maxListed = 8

func (v Value) unknown(known map[string]bool) {
	why := v.Removed[Spell(v.Path)]
	if len(v.Path) > 1 {
		why = cmp.Or(why, v.Removed["*."+v.key()])
	}
	if why != "" {
		v.Warnings = append(v.Warnings, v.AddError("it no longer has an effect: "+why))
		return
	}
	text := fmt.Sprintf("unknown field %q", Spell(v.Path))
	if like := suggest.Closest(v.key(), maps.Keys(known)); like != "" {
		text += fmt.Sprintf("; did you mean %q?", like)
	} else if len(known) <= maxListed {
		text += "; the fields are " + strings.Join(slices.Sorted(maps.Keys(known)), ", ")
	}
	v.Add(&Error{File: v.File, Position: v.Position(), Text: text})
}

func (v Value) key() string { return v.Path[len(v.Path)-1] }

func (v Value) text(to reflect.Value, tag reflect.StructTag) {
	is := tag.Get("is")
	check := v.Checks[is]
	if words := tag.Get("in"); words != "" {
		check = func(text string) error {
			if list := strings.Split(words, ","); !slices.Contains(list, text) {
				return fmt.Errorf("%q: it must be one of %s", text, strings.Join(list, ", "))
			}
			return nil
		}
	}
	text, ok := v.Raw.(string)
	if !ok {
		said := fmt.Sprintf("it is %s and must be a text in quotes", Kind(v.Raw))
		if tag.Get("loose") != "" {
			said += ", a whole number, true or false"
		}
		switch v.Raw.(type) {
		case int64, float64, bool:
			meant := fmt.Sprint(v.Raw)
			if _, isFloat := v.Raw.(float64); tag.Get("loose") != "" && !isFloat {
				to.SetString(meant)
				return
			}
			if _, err := strconv.Atoi(v.key()); err != nil && check != nil && check(meant) == nil {
				said += fmt.Sprintf(": write %s = %q", v.key(), meant)
			}
		}
		v.Errorf("%s", said)
		return
	}
	if is == "path" || is == "file" {
		text = v.Absolute(text)
	}
	if check != nil {
		if err := check(text); err != nil {
			v.Errorf("%v", err)
			return
		}
	}
	to.SetString(text)
}

func (v Value) number(to reflect.Value, tag reflect.StructTag) {
	whole, isWhole := v.Raw.(int64)
	n, ok := v.Raw.(float64)
	kind := "a number"
	if isWhole {
		n, ok = float64(whole), true
	}
	if to.Kind() != reflect.Float64 {
		ok, kind = isWhole, "a whole number"
	}
	least, most, _ := strings.Cut(tag.Get("range"), " ")
	switch {
	case !ok:
		v.Errorf("it is %s and must be %s", Kind(v.Raw), kind)
	case math.IsNaN(n), n < bound(least, 0), n > bound(most, math.Inf(1)):
		said := least + " or more"
		if most != "" {
			said = least + " to " + most
		}
		v.Errorf("%v is not %s", v.Raw, said)
	case to.Kind() == reflect.Float64:
		to.SetFloat(n)
	case to.Kind() == reflect.Int64:
		to.SetInt(whole)
	default:
		to.SetUint(uint64(whole))
	}
}

func bound(text string, otherwise float64) float64 {
	if n, err := strconv.ParseFloat(text, 64); err == nil {
		return n
	}
	return otherwise
}
