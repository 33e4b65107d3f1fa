package rules

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// Bounds of a file, beyond which it is none of ours.
const (
	maxFile   = 1 << 20
	maxValues = 20000
	maxDepth  = 16
)

// document is a TOML file that has been read, with the place of every key and value: what is wrong with a value is found long after the parser
// has gone by, and people want to know the line.
type document struct {
	file   string
	lines  []int          // where each line begins
	places map[string]int // offset in the file, by path
	*mistakes
}

// readDocument gives the file's outermost table.
func readDocument(file string, text []byte) (*table, error) {
	d := &document{file: file, places: map[string]int{}, mistakes: &mistakes{}}
	if len(text) > maxFile {
		return nil, &FormatError{File: file, Reason: fmt.Sprintf("larger than %d bytes", maxFile)}
	}
	for i := range text {
		if i == 0 || text[i-1] == '\n' {
			d.lines = append(d.lines, i)
		}
	}
	if err := d.locate(text); err != nil { // before everything is decoded, for it counts
		return nil, err
	}
	values := map[string]any{}
	if err := toml.Unmarshal(text, &values); err != nil {
		var wrong *toml.DecodeError
		if errors.As(err, &wrong) {
			line, column := wrong.Position()
			return nil, &FormatError{File: file, Line: line, Column: column, Reason: strings.TrimPrefix(wrong.Error(), "toml: ")}
		}
		return nil, &FormatError{File: file, Reason: strings.TrimPrefix(err.Error(), "toml: ")}
	}
	return &table{document: d, values: values}, nil
}

// locate fills places. What is no TOML it leaves to the decoder, which says more.
func (d *document) locate(text []byte) error {
	parser := unstable.Parser{}
	parser.Reset(text)
	elements := map[string]int{} // of arrays of tables, by path
	prefix := ""
	for parser.NextExpression() {
		var err error
		switch e := parser.Expression(); e.Kind {
		case unstable.Table:
			prefix, err = d.header(e, elements, false)
		case unstable.ArrayTable:
			prefix, err = d.header(e, elements, true)
		case unstable.KeyValue:
			err = d.keyValue(prefix, e, 0)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// header gives the path of [a.b] or [[a.b]]. A name of an array of tables means its last element.
func (d *document) header(e *unstable.Node, elements map[string]int, array bool) (path string, err error) {
	key := e.Key()
	for depth := 0; key.Next(); depth++ {
		if depth > maxDepth {
			return "", d.tooDeep(int(key.Node().Raw.Offset))
		}
		path = join(path, string(key.Node().Data))
		if err := d.place(path, int(key.Node().Raw.Offset)); err != nil {
			return "", err
		}
		if array && key.IsLast() {
			elements[path]++
		}
		if n := elements[path]; n > 0 {
			path = element(path, n-1)
			if err := d.place(path, int(key.Node().Raw.Offset)); err != nil {
				return "", err
			}
		}
	}
	return path, nil
}

func (d *document) keyValue(prefix string, e *unstable.Node, depth int) error {
	path := prefix
	key := e.Key()
	for ; key.Next(); depth++ {
		if depth > maxDepth {
			return d.tooDeep(int(key.Node().Raw.Offset))
		}
		path = join(path, string(key.Node().Data))
		if err := d.place(path, int(key.Node().Raw.Offset)); err != nil {
			return err
		}
	}
	return d.value(path, e.Value(), depth)
}

func (d *document) value(path string, v *unstable.Node, depth int) error {
	if depth > maxDepth {
		return d.tooDeep(d.places[path])
	}
	index := 0
	for children := v.Children(); children.Next(); {
		child := children.Node()
		switch {
		case child.Kind == unstable.Comment:
			continue
		case v.Kind == unstable.InlineTable:
			if err := d.keyValue(path, child, depth+1); err != nil {
				return err
			}
			continue
		case v.Kind != unstable.Array:
			return nil
		}
		at := d.places[path]
		if child.Raw.Length > 0 {
			at = int(child.Raw.Offset)
		}
		inner := element(path, index)
		index++
		if err := d.place(inner, at); err != nil {
			return err
		}
		if err := d.value(inner, child, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (d *document) place(path string, offset int) error {
	if _, there := d.places[path]; there {
		return nil // a table that is opened again
	}
	if len(d.places) == maxValues {
		return d.mistake(offset, "", fmt.Sprintf("more than %d keys and values", maxValues))
	}
	d.places[path] = offset
	return nil
}

func (d *document) tooDeep(offset int) error {
	return d.mistake(offset, "", fmt.Sprintf("nested more than %d deep", maxDepth))
}

func (d *document) mistake(offset int, path, reason string) *FormatError {
	line, found := slices.BinarySearch(d.lines, offset)
	if !found {
		line--
	}
	e := &FormatError{File: d.file, Field: path, Reason: reason}
	if line >= 0 {
		e.Line, e.Column = line+1, offset-d.lines[line]+1
	}
	return e
}

// wrong notes what is wrong with the value at a path.
func (d *document) wrong(path, format string, args ...any) {
	at, known := d.places[path]
	reason := fmt.Sprintf(format, args...)
	if !known {
		d.add(&FormatError{File: d.file, Field: path, Reason: reason})
		return
	}
	d.add(d.mistake(at, path, reason))
}

// join puts a key behind a path, as it would be spelled in a file.
func join(path, key string) string {
	if key == "" || strings.ContainsFunc(key, func(r rune) bool {
		return r != '_' && r != '-' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	}) {
		key = strconv.Quote(key)
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

func element(path string, index int) string { return path + "[" + strconv.Itoa(index) + "]" }

// table is a TOML table. Its methods note what is wrong and go on.
type table struct {
	*document
	path   string
	values map[string]any
	asked  []string
}

// at gives the path of a key.
func (t *table) at(key string) string { return join(t.path, key) }

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

func (t *table) asText(path string, v any) string {
	s, ok := v.(string)
	switch {
	case !ok:
		t.wrong(path, "%s, where a text is wanted", kind(v))
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
		t.wrong(t.at(key), "%s, where true or false is wanted", kind(v))
	}
	return b
}

// list reads an array; a value that is none is an array of one.
func (t *table) list(key string) (paths []string, values []any) {
	v, ok := t.get(key)
	if !ok {
		return nil, nil
	}
	array, ok := v.([]any)
	if !ok {
		return []string{t.at(key)}, []any{v}
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
		t.wrong(t.at(key), "%s, where [[%s]] is wanted", kind(v), key)
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

func (t *table) asTable(path string, v any) *table {
	values, ok := v.(map[string]any)
	if !ok {
		t.wrong(path, "%s, where a table is wanted", kind(v))
	}
	return &table{document: t.document, path: path, values: values}
}

// keys lists the table's keys, sorted, as asked for.
func (t *table) keys() []string {
	t.asked = slices.Sorted(maps.Keys(t.values))
	return t.asked
}

// kind names a value for people.
func kind(v any) string {
	switch v.(type) {
	case string:
		return "a text"
	case bool:
		return "true or false"
	case int64, float64:
		return "a number"
	case []any:
		return "an array"
	case map[string]any:
		return "a table"
	}
	return "a date or time"
}
