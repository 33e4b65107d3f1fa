// Package tomlfile reads TOML files that people write: a configuration, a file of rules, a list of
// models. It decodes the values with go-toml, and knows the line and the column of each key and
// value, so that a message about a value can name its place long after the file was read.
package tomlfile

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/pelletier/go-toml/v2"
)

// Bounds of a file. A larger one, or one with more mistakes, is another kind of file.
const (
	MaxSize   = 1 << 20
	maxValues = 20000
	maxDepth  = 16
	maxErrors = 50
)

// Document is the content of a file. The exported fields below the first are for decoding.
type Document struct {
	File     string                        // as it was named
	Checks   map[string]func(string) error // of texts, by their names in tags
	Removed  map[string]string             // fields that had an effect once, and why they have none
	Warnings Errors                        // of those
	// hears of each single field, and how to get its value; may be nil
	Note func(Value, func() any)

	dir           string // of the file, absolute
	values        map[string]any
	positions     map[string]Position
	errs          Errors
	omittedErrors int // mistakes beyond maxErrors
}

// Read reads a file; "" is an empty one. The error is an Errors where the content is what is wrong.
func Read(file string) (*Document, error) {
	if file == "" {
		return Parse("", nil)
	}
	// A named pipe that nothing writes to is an empty file, because to wait for it would be for
	// ever.
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	var text []byte
	if err == nil {
		defer f.Close() // only read from
		text, err = io.ReadAll(io.LimitReader(f, MaxSize+1))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, WithoutPath(err))
	}
	return Parse(file, text)
}

// WithoutPath leaves the path out, because the message names it already.
func WithoutPath(err error) error {
	if path, is := errors.AsType[*os.PathError](err); is {
		return path.Err
	}
	return err
}

// Parse reads the text of a file of that name. The error is an Errors where the content is wrong.
func Parse(file string, text []byte) (*Document, error) {
	d := &Document{File: file, values: map[string]any{}, positions: map[string]Position{}}
	if len(text) > MaxSize {
		return nil, fmt.Errorf("%s: larger than %d bytes", file, MaxSize)
	}
	if err := locate(d, text); err != nil { // before everything is decoded, because it counts
		return nil, Errors{err}
	}
	err := toml.Unmarshal(text, &d.values)
	if err != nil {
		e := &Error{File: file, Text: strings.TrimPrefix(err.Error(), "toml: ")}
		if wrong, is := errors.AsType[*toml.DecodeError](err); is {
			e.Line, e.Column = wrong.Position()
			e.Field = strings.Join(wrong.Key(), ".")
		}
		return nil, Errors{e}
	}
	abs, err := filepath.Abs(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	d.dir = filepath.Dir(abs)
	return d, nil
}

// Absolute takes a path of the file relative to this file.
func (d *Document) Absolute(path string) string {
	if path == "" || filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(d.dir, path)
}

// Add records a mistake.
func (d *Document) Add(e *Error) {
	if len(d.errs) == maxErrors {
		d.omittedErrors++
		return
	}
	d.errs = append(d.errs, e)
}

// Err returns the mistakes that were noted, as an Errors, or nil.
func (d *Document) Err() error {
	if len(d.errs) == 0 {
		return nil
	}
	all := slices.Clone(d.errs)
	all.Sort()
	if d.omittedErrors > 0 {
		all = append(all, &Error{File: d.File,
			Text: fmt.Sprintf("and %d more mistakes", d.omittedErrors)})
	}
	return all
}

func pathKey(path []string) string { return strings.Join(path, "\x00") }

// Spell writes a path as people do: elements of arrays are counted from 1.
func Spell(path []string) string {
	text := ""
	for _, part := range path {
		if i, err := strconv.Atoi(part); err == nil && text != "" {
			text += fmt.Sprintf("[%d]", i+1)
			continue
		}
		if text != "" {
			text += "."
		}
		if quoted := strconv.Quote(part); part == "" || quoted != `"`+part+`"` {
			part = quoted // it would not be seen, or not be read
		}
		text += part
	}
	return text
}

// Kind names what a value is.
func Kind(v any) string {
	switch v.(type) {
	case string:
		return "a text"
	case int64:
		return "a whole number"
	case float64:
		return "a number"
	case bool:
		return "true or false"
	case []any:
		return "an array"
	case map[string]any:
		return "a table"
	}
	return "a time"
}

// Position is a place in a file: line and column, from 1. The zero Position is the file as a whole.
type Position struct {
	Line   int `json:"line"`
	Column int `json:"column"`
}

// Error is one mistake in a file. In JSON it is a contract for scripts.
type Error struct {
	File string `json:"-"`
	Position
	Field string `json:"field"` // "limits.wall_seconds", "runtime[1].directory"; empty: no field
	Text  string `json:"text"`
}

func (e *Error) Error() string {
	where, text := e.File, e.Text
	if e.Line > 0 {
		where = fmt.Sprintf("%s:%d:%d", e.File, e.Line, e.Column)
	}
	if e.Field != "" {
		text = fmt.Sprintf("field %q: %s", e.Field, e.Text)
	}
	return where + ": " + text
}

// Errors are the mistakes in a file, in the order of the file.
type Errors []*Error

func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, one := range e {
		lines[i] = one.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap gives each mistake to errors.As.
func (e Errors) Unwrap() []error {
	all := make([]error, len(e))
	for i, one := range e {
		all[i] = one
	}
	return all
}

// Sort puts the mistakes in the order of the file.
func (e Errors) Sort() {
	slices.SortStableFunc(e, func(a, b *Error) int {
		return cmp.Or(a.Line-b.Line, a.Column-b.Column)
	})
}
