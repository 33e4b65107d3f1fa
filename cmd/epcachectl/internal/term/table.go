package term

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/epcached/epcached/internal/printable"
)

// Columns prints rows of equal length as a table, some rows at a time. Later rows can make a column
// wider, but never narrower. On a terminal no line is wider than the terminal: in a table of two
// columns the second is wrapped; a table of more columns first loses its optional columns, and then
// its widest cells are shortened in their middle.
type Columns struct {
	p        *Printer
	optional []string // heads of columns that may be left out, the least important first
	dropped  []int
	widths   []int
}

// NewColumns returns a table without rows. Its first row has the heads of its columns.
func NewColumns(p *Printer, optional ...string) *Columns {
	return &Columns{p: p, optional: optional}
}

const (
	betweenColumns = 2
	readable       = 24 // least number of cells in which people can distinguish a name from others
)

// Print prints some rows.
func (c *Columns) Print(rows [][]string) error {
	first := c.widths == nil
	for _, row := range rows {
		c.widths = append(c.widths, make([]int, max(0, len(row)-len(c.widths)))...)
		for i, cell := range row {
			cell = strings.ReplaceAll(c.p.clean(cell), "\n", `\n`)
			row[i] = cell
			c.widths[i] = max(c.widths[i], ansi.StringWidth(cell))
		}
	}
	if first && len(rows) > 0 {
		c.drop(rows[0])
	}
	c.shrink()
	var text bytes.Buffer
	for _, row := range rows {
		text.WriteString(c.line(row))
		text.WriteByte('\n')
	}
	return c.p.Result(text.Bytes())
}

func (c *Columns) line(row []string) string {
	var line strings.Builder
	for i, cell := range row {
		last := i == len(row)-1
		switch {
		case slices.Contains(c.dropped, i):
			continue
		case last && i == 1 && c.p.Width > 0:
			indent := ansi.StringWidth(line.String())
			cell = hanging(cell, c.p.Width-indent, indent)
		case c.p.Width > 0:
			cell = Middle(cell, c.widths[i])
		}
		line.WriteString(cell)
		if !last {
			line.WriteString(strings.Repeat(" ", c.widths[i]+betweenColumns-ansi.StringWidth(cell)))
		}
	}
	if c.p.Width > 0 {
		return strings.TrimRight(line.String(), " ")
	}
	return line.String()
}

// drop leaves out optional columns until the others fit the terminal.
func (c *Columns) drop(heads []string) {
	for _, head := range c.optional {
		needed := 0
		for _, width := range c.widths {
			needed += min(width, readable)
		}
		if c.p.Width == 0 || needed+c.between() <= c.p.Width {
			return
		}
		if at := slices.Index(heads, head); at >= 0 {
			c.dropped = append(c.dropped, at)
			c.widths[at] = 0
		}
	}
}

// Dropped returns the heads of the columns that were left out.
func (c *Columns) Dropped(heads []string) (names []string) {
	for i, head := range heads {
		if slices.Contains(c.dropped, i) {
			names = append(names, head)
		}
	}
	return names
}

func (c *Columns) between() int { return betweenColumns * (len(c.widths) - 1 - len(c.dropped)) }

// shrink takes cells from the widest columns until a line fits.
func (c *Columns) shrink() {
	over := -c.p.Width + c.between()
	for _, width := range c.widths {
		over += width
	}
	for ; over > 0 && c.p.Width > 0 && len(c.widths) > 2; over-- {
		widest := slices.Index(c.widths, slices.Max(c.widths))
		if c.widths[widest] <= 1 {
			return
		}
		c.widths[widest]--
	}
}

// Middle shortens text in its middle, because names differ at both ends. It shortens each part of a
// name with slashes by itself, so that models of one hub, and files of one model, remain
// distinguishable.
func Middle(text string, width int) string {
	all := ansi.StringWidth(text)
	if all <= width {
		return text
	}
	const shortest = 5 // cells in which a part is still distinguishable
	parts := strings.Split(strings.TrimSuffix(text, ".onnx"), "/")
	if left := width - len(parts) + 1; len(parts) > 1 && left/len(parts) >= shortest {
		byWidth := make([]int, len(parts))
		for i := range parts {
			byWidth[i] = i
		}
		slices.SortFunc(byWidth, func(x, y int) int {
			return cmp.Compare(ansi.StringWidth(parts[x]), ansi.StringWidth(parts[y]))
		})
		for i, at := range byWidth { // short parts leave cells to the long ones
			parts[at] = Middle(parts[at], left/(len(parts)-i))
			left -= ansi.StringWidth(parts[at])
		}
		return strings.Join(parts, "/")
	}
	end := (width - 1) / 2
	return ansi.Truncate(text, width-1-end, "") + "…" + ansi.TruncateLeft(text, all-end, "")
}

// wrap breaks lines that are wider than a terminal between words. It breaks none if width is 0.
func wrap(text string, width int) string {
	if width == 0 {
		return text
	}
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		indent := len(line) - len(strings.TrimLeft(line, " "))
		if indent = min(indent+2, width/2); ansi.StringWidth(line) > width {
			lines[i] = hanging(line, width-indent, indent)
		}
	}
	return strings.Join(lines, "\n")
}

// hanging breaks text after width cells at most, and indents all of its lines but the first. It
// does not break at hyphens, as ansi does, because those of flags, versions and paths belong to a
// word.
func hanging(text string, width, indent int) string {
	const hyphen = "\uE000" // a private-use character, which stands for hyphens
	text = ansi.Wrap(strings.ReplaceAll(text, "-", hyphen), max(width, 1), "")
	return strings.NewReplacer(hyphen, "-", "\n", "\n"+strings.Repeat(" ", indent)).Replace(text)
}

// The colours of terminals, by the codes that select them.
const (
	red    = "31"
	green  = "32"
	yellow = "33"
	cyan   = "36"
	bold   = "1"
	plain  = "0"
)

// marks stand for the sequences that select colours until text is cleaned. They are private-use
// characters, so that escape sequences in text of foreign origin are told from ours.
var marks = map[string]rune{plain: '\uE001', red: '\uE002', green: '\uE003', yellow: '\uE004',
	cyan: '\uE005', bold: '\uE006'}

// clean returns the text as it is printed: without control characters that are not our own.
func (p *Printer) clean(text string) string {
	if !p.coloured {
		return printable.Text(text)
	}
	text = printable.Text(text, slices.Collect(maps.Values(marks))...)
	for code, mark := range marks {
		text = strings.ReplaceAll(text, string(mark), "\x1b["+code+"m")
	}
	return text
}

func (p *Printer) paint(code, text string) string {
	if !p.coloured || code == "" {
		return text
	}
	return string(marks[code]) + printable.Text(text) + string(marks[plain])
}

// Bold returns a heading of a result, in bold type if results go to a terminal.
func (p *Printer) Bold(text string) string {
	if p.Width == 0 {
		return text
	}
	return p.paint(bold, text)
}

// State returns a word for a state or a severity, in its colour if results go to a terminal.
func (p *Printer) State(word string) string {
	if p.Width == 0 {
		return word
	}
	first, _, _ := strings.Cut(strings.TrimSpace(word), ",")
	return p.paint(colours[first], word)
}

var colours = map[string]string{
	"damaged": red, "failed": red, "problem": red, "damage": red, "unsupported": red,
	"withheld": yellow, "warning": yellow, "stale": yellow, "prefer recompilation": yellow,
	"unkept": yellow, "cancelled": yellow, "missed": yellow, "ok": green, "running": green,
	"compiled": green, "optimal": green,
}

// When spells a time in milliseconds. On a terminal it says how long ago the time was.
func (p *Printer) When(ms int64) string {
	if p.Width == 0 || ms == 0 {
		return Time(ms)
	}
	return ago(time.Since(time.UnixMilli(ms)))
}

func ago(d time.Duration) string {
	const day = 24 * time.Hour
	for _, u := range []struct {
		below, unit time.Duration
		name        string
	}{{time.Minute, time.Second, "s"}, {time.Hour, time.Minute, "min"}, {day, time.Hour, "h"},
		{2 * day, day, "day"}, {1 << 62, day, "days"}} {
		if d < u.below {
			return fmt.Sprintf("%d %s ago", max(0, d/u.unit), u.name)
		}
	}
	return "-"
}
