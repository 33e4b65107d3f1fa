package tomlfile

import (
	"fmt"
	"slices"
	"strings"
)

// Position is a place in a file: line and column, from 1. The zero Position is the file as a whole.
type Position struct{ Line, Column int }

// Error is one mistake in a file.
type Error struct {
	File string
	Position
	Field string // "limits.wall_seconds", "runtime[1].directory"; empty: no field
	Text  string
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

// Errors are the mistakes in a file, in the order in which they stand there.
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
		if a.Line != b.Line {
			return a.Line - b.Line
		}
		return a.Column - b.Column
	})
}
