package rules

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/epcached/epcached/tomlfile"
)

// readDocument gives the file's outermost table.
func readDocument(file string, text []byte) (*table, error) {
	d, err := tomlfile.Parse(file, text)
	if err != nil {
		return nil, err
	}
	return &table{Document: d, values: d.Values}, nil
}

// table is a TOML table. Its methods note what is wrong and go on.
type table struct {
	*tomlfile.Document
	path   []string
	values map[string]any
	asked  []string
}

// at gives the path of a key.
func (t *table) at(key string) []string { return inside(t.path, key) }

// inside gives the path of a part of what is at a path.
func inside(path []string, part string) []string { return append(slices.Clone(path), part) }

func element(path []string, index int) []string { return inside(path, strconv.Itoa(index)) }

// wrong notes what is wrong with the value at a path.
func (t *table) wrong(path []string, format string, args ...any) {
	t.Wrong(path, fmt.Sprintf(format, args...))
}

func (t *table) get(key string) (any, bool) {
	t.asked = append(t.asked, key)
	v, ok := t.values[key]
	return v, ok
}

// done refuses the keys that nobody asked for.
func (t *table) done() {
	for _, key := range slices.Sorted(maps.Keys(t.values)) {
		if !slices.Contains(t.asked, key) {
			t.wrong(t.at(key), "unknown field: there are %s", strings.Join(t.asked, ", "))
		}
	}
}

// text reads a string; absent, it is empty.
func (t *table) text(key string) string {
	v, ok := t.get(key)
	if !ok {
		return ""
	}
	return t.asText(t.at(key), v)
}

// maxString bounds every text in a file.
const maxString = 2000

func (t *table) asText(path []string, v any) string {
	s, ok := v.(string)
	switch {
	case !ok:
		t.wrong(path, "%s, where a text is wanted", tomlfile.Kind(v))
	case s == "":
		t.wrong(path, "empty")
	case len(s) > maxString:
		t.wrong(path, "longer than %d bytes", maxString)
	default:
		return s
	}
	return ""
}

// required is text that must be there.
func (t *table) required(key string) string {
	if _, ok := t.values[key]; !ok {
		t.wrong(t.path, "%s is missing", key)
	}
	return t.text(key)
}

func (t *table) flag(key string) bool {
	v, ok := t.get(key)
	if !ok {
		return false
	}
	b, ok := v.(bool)
	if !ok {
		t.wrong(t.at(key), "%s, where true or false is wanted", tomlfile.Kind(v))
	}
	return b
}

// list reads an array; a value that is none is an array of one.
func (t *table) list(key string) (paths [][]string, values []any) {
	v, ok := t.get(key)
	if !ok {
		return nil, nil
	}
	array, ok := v.([]any)
	if !ok {
		return [][]string{t.at(key)}, []any{v}
	}
	if len(array) == 0 {
		t.wrong(t.at(key), "empty")
	}
	for i := range array {
		paths = append(paths, element(t.at(key), i))
	}
	return paths, array
}

// texts reads an array of texts.
func (t *table) texts(key string) []string {
	var all []string
	paths, values := t.list(key)
	for i, v := range values {
		all = append(all, t.asText(paths[i], v))
	}
	return all
}

// tables reads an array of tables.
func (t *table) tables(key string) []*table {
	var all []*table
	v, ok := t.get(key)
	if !ok {
		return nil
	}
	array, ok := v.([]any)
	if !ok {
		t.wrong(t.at(key), "%s, where [[%s]] is wanted", tomlfile.Kind(v), key)
	}
	for i, v := range array {
		if inner := t.asTable(element(t.at(key), i), v); inner.values != nil {
			all = append(all, inner)
		}
	}
	return all
}

// table reads a table; absent, it is empty.
func (t *table) table(key string) *table {
	v, ok := t.get(key)
	if !ok {
		return t.asTable(t.at(key), map[string]any{})
	}
	return t.asTable(t.at(key), v)
}

func (t *table) asTable(path []string, v any) *table {
	values, ok := v.(map[string]any)
	if !ok {
		t.wrong(path, "%s, where a table is wanted", tomlfile.Kind(v))
	}
	return &table{Document: t.Document, path: path, values: values}
}

// keys lists the table's keys, sorted, as asked for.
func (t *table) keys() []string {
	t.asked = slices.Sorted(maps.Keys(t.values))
	return t.asked
}
