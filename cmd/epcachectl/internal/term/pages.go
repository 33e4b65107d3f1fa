package term

import (
	"bytes"
	"strings"
	"unicode/utf8"

	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
)

// A result of a hundred thousand lines is printed page by page as it comes: what reads it can begin, or has seen enough, and nobody
// keeps all of it.

// Columns prints rows of equal length below each other, some at a time. Columns become wider and never narrower: those of a result of one page are as wide as
// they have to be.
type Columns struct {
	p      *Printer
	widths []int // of all but the last, in characters
}

// NewColumns returns a table without rows.
func NewColumns(p *Printer) *Columns { return &Columns{p: p} }

const betweenColumns = 2

// Print prints some rows.
func (c *Columns) Print(rows [][]string) error {
	for _, row := range rows {
		c.widths = append(c.widths, make([]int, max(0, len(row)-1-len(c.widths)))...)
		for i, cell := range row[:max(0, len(row)-1)] {
			c.widths[i] = max(c.widths[i], utf8.RuneCountInString(cell))
		}
	}
	var text bytes.Buffer
	for _, row := range rows {
		for i, cell := range row {
			text.WriteString(cell)
			if i < len(row)-1 {
				text.WriteString(strings.Repeat(" ", c.widths[i]+betweenColumns-utf8.RuneCountInString(cell)))
			}
		}
		text.WriteByte('\n')
	}
	return c.p.Result(text.Bytes())
}

// Array prints a list for scripts, some elements at a time. Where the rest of it cannot be had it is left without an end, so that nobody takes a part for
// the whole.
type Array struct {
	p      *Printer
	indent string // of the line that it begins on
	begun  bool
}

// NewArray returns a list that begins on a line with an indent.
func NewArray(p *Printer, indent string) *Array { return &Array{p: p, indent: indent} }

// Add prints some elements.
func (j *Array) Add(elements ...any) error {
	var text bytes.Buffer
	for _, v := range elements {
		if !j.begun {
			text.WriteString("[\n")
		} else {
			text.WriteString(",\n")
		}
		j.begun = true
		one, err := jsonout.Indented(j.indent+"  ", v)
		if err != nil {
			return err
		}
		text.WriteString(j.indent + "  ")
		text.Write(bytes.TrimSuffix(one, []byte("\n")))
	}
	return j.p.Result(text.Bytes())
}

// End closes the list, and begins it where nothing was added.
func (j *Array) End() error {
	if !j.begun {
		return j.p.Result([]byte("[]"))
	}
	return j.p.Result([]byte("\n" + j.indent + "]"))
}
