package config

import (
	"fmt"
	"slices"
	"strings"
)

// Error is one thing that is wrong in a file.
type Error struct {
	File string
	Position
	Field string // "limits.wall_seconds"; empty: no field
	Text  string
}

func (e *Error) Error() string {
	text := e.Text
	if e.Field != "" {
		text = fmt.Sprintf("field %q: %s", e.Field, e.Text)
	}
	return fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, text)
}

// Errors are all that is wrong in a file, in the order in which it stands there.
type Errors []*Error

func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, one := range e {
		lines[i] = one.Error()
	}
	return strings.Join(lines, "\n")
}

func (e Errors) sort() {
	slices.SortStableFunc(e, func(a, b *Error) int {
		if a.Line != b.Line {
			return a.Line - b.Line
		}
		return a.Column - b.Column
	})
}
