package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/epcached/epcached/unixsock/wire"
)

// A result of a hundred thousand lines is printed page by page as it comes: what reads it can begin, or has seen enough, and nobody
// keeps all of it.

// columns prints rows of equal length below each other, some at a time. Columns become wider and never narrower: those of a result of one page are as wide as
// they have to be.
type columns struct {
	p      *printer
	widths []int // of all but the last, in characters
}

const betweenColumns = 2

func (c *columns) print(rows [][]string) error {
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
	return c.p.result(text.Bytes())
}

// jsonArray prints a list for scripts, some elements at a time. Where the rest of it cannot be had it is left without an end, so that nobody takes a part for
// the whole.
type jsonArray struct {
	p      *printer
	indent string // of the line that it begins on
	begun  bool
}

func (j *jsonArray) add(elements ...any) error {
	var text bytes.Buffer
	for _, v := range elements {
		if !j.begun {
			text.WriteString("[\n")
		} else {
			text.WriteString(",\n")
		}
		j.begun = true
		one, err := indented(j.indent+"  ", v)
		if err != nil {
			return err
		}
		text.WriteString(j.indent + "  ")
		text.Write(bytes.TrimSuffix(one, []byte("\n")))
	}
	return j.p.result(text.Bytes())
}

// end closes the list, and begins it where nothing was added.
func (j *jsonArray) end() error {
	if !j.begun {
		return j.p.result([]byte("[]"))
	}
	return j.p.result([]byte("\n" + j.indent + "]"))
}

// indented is a value as JSON with a newline behind it, all lines but the first behind a prefix.
func indented(prefix string, v any) ([]byte, error) {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetIndent(prefix, "  ")
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return text.Bytes(), err
}

// showing shows how far a question to the daemon is that goes through the whole store; it may be asked in several requests.
func (a *app) showing(ask func(progress func(*wire.Progress)) error) error {
	show := newPhases(a.print, false, 1)
	defer show.end()
	return ask(func(p *wire.Progress) {
		p.ElapsedMs = time.Since(show.start).Milliseconds()
		show.phase("", p)
	})
}
