// Package jsonout encodes messages of the protocol and results of epcachectl as JSON for scripts.
package jsonout

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf16"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/epcached/epcached/internal/printable"
)

// Object is a JSON object as --json prints it.
type Object = map[string]any

// durations are the fields in milliseconds that are durations and not times.
var durations = []string{"elapsed_ms", "estimate_ms", "deadline_ms"}

// Of returns the fields of a message, or only those that are named. Their names are those in
// epcached.proto, and a contract for scripts. Each field is there, also where it is empty, because
// scripts do sums with them:
//
//   - numbers of every size are JSON numbers, enums have their names, lists and maps may be empty
//   - a time, x_ms, is x in RFC 3339, null for none; a duration is elapsed_seconds, for example
//   - a record is the JSON that it holds, null for none
//   - a message or optional field that is not there is null
func Of(m proto.Message, names ...string) Object {
	r, out := m.ProtoReflect(), Object{}
	for i := range r.Descriptor().Fields().Len() {
		f := r.Descriptor().Fields().Get(i)
		name, v := string(f.Name()), r.Get(f)
		base, milliseconds := strings.CutSuffix(name, "_ms")
		switch {
		case len(names) > 0 && !slices.Contains(names, name):
		case f.HasPresence() && !r.Has(f):
			out[name] = nil
		case f.IsList():
			list := make([]any, v.List().Len())
			for i := range list {
				list[i] = jsonValue(f, v.List().Get(i))
			}
			out[name] = list
		case f.IsMap():
			entries := Object{}
			v.Map().Range(func(key protoreflect.MapKey, v protoreflect.Value) bool {
				entries[key.String()] = jsonValue(f.MapValue(), v)
				return true
			})
			out[name] = entries
		case slices.Contains(durations, name):
			out[base+"_seconds"] = float64(v.Int()) / 1000
		case milliseconds && v.Int() == 0:
			out[base] = nil
		case milliseconds:
			out[base] = time.UnixMilli(v.Int()).UTC()
		default:
			out[name] = jsonValue(f, v)
		}
	}
	return out
}

func jsonValue(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch {
	case f.Message() != nil && f.Message().Name() == "StringMap": // a map as the value of a map
		return Of(v.Message().Interface())["entries"]
	case f.Message() != nil:
		return Of(v.Message().Interface())
	case f.Enum() != nil:
		if value := f.Enum().Values().ByNumber(v.Enum()); value != nil {
			return value.Name()
		}
		return v.Enum() // a value of a newer daemon
	case f.Name() == "record":
		return Record(v.String())
	}
	return v.Interface()
}

// List returns Of for each message of a list.
func List[M proto.Message](list []M) []any {
	out := make([]any, len(list))
	for i, m := range list {
		out[i] = Of(m)
	}
	return out
}

// Record returns a record unchanged if it is JSON, otherwise as text.
func Record(record string) any {
	switch {
	case record == "":
		return nil
	case json.Valid([]byte(record)):
		return json.RawMessage(record)
	}
	return record
}

// Indented returns a value as JSON with a final newline. All lines but the first have the prefix.
func Indented(prefix string, v any) ([]byte, error) { return encode(v, prefix, "  ") }

// Line returns a value as JSON in one line.
func Line(v any) ([]byte, error) { return encode(v, "", "") }

// encode writes characters that are not printable as escapes, because people see JSON on terminals
// too. Outside of strings JSON has none but newlines.
func encode(v any, prefix, indent string) ([]byte, error) {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetIndent(prefix, indent)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	var out []byte
	for _, r := range text.String() {
		if one := string(r); printable.Text(one) == one {
			out = append(out, one...)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			out = fmt.Appendf(out, `\u%04x`, unit)
		}
	}
	return out, nil
}
