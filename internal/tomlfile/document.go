// Package tomlfile reads TOML files that users write: configurations, rules, lists of models. It
// decodes the values with go-toml, and keeps the line and column of each key and value for
// messages.
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

// Bounds of a file. A larger file, or one with more mistakes, is probably not a file of this kind.
const (
	MaxSize   = 1 << 20
	maxValues = 20000
	maxDepth  = 16
	maxErrors = 50
)

// Document is the content of a file. The exported fields below the first are for decoding.
type Document struct {
	File     string                        // as it was named
	Checks   map[string]func(string) error // checks of texts, by their names in tags
	Removed  map[string]string             // former fields, with the reason why they have no effect
	Warnings Errors                        // about former fields
	// Note is called for each single field, with a function that returns its value; may be nil.
	Note func(Value, func() any)

	dir           string // of the file, absolute
	values        map[string]any
	positions     map[string]Position
	errs          Errors
	omittedErrors int // mistakes beyond maxErrors
}

// Read reads a file; "" is an empty one. The error is an Errors if the content is invalid.
func Read(file string) (*Document, error) {
	if file == "" {
		return Parse("", nil)
	}
	// A named pipe without a writer reads as an empty file, because waiting for one could block for
	// ever.
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	var text []byte
	if err == nil {
		defer f.Close() // opened for reading
		text, err = io.ReadAll(io.LimitReader(f, MaxSize+1))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, WithoutPath(err))
	}
	return Parse(file, text)
}

// WithoutPath removes the path from an error, because the message names it already.
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
	// before decoding, because it bounds the number of values
	if err := locate(d, text); err != nil {
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

// Absolute resolves a path relative to the file's directory.
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

// Err returns the recorded mistakes as an Errors, or nil.
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

// Spell writes a path of keys for users, with elements of arrays counted from 1.
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
			part = quoted // a key with unusual characters
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
