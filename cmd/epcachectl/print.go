package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

	"golang.org/x/term"

	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/unixsock"
)

// Everything that people read comes through here. A message is "epcachectl: operation "object": cause", lower case
// and without a final period; a hint is a line of its own and guesses what the user wants to do. Results go to
// standard output, everything else to standard error, which stays empty when all goes well and there is something to print.
type printer struct {
	out, err io.Writer

	mu       sync.Mutex // guards the progress lines
	terminal bool
	width    func() int // of the terminal, in characters
	shown    int        // progress lines that stand on the terminal
}

func newPrinter(out, err io.Writer) *printer {
	f, ok := err.(*os.File)
	p := &printer{out: out, err: err, terminal: ok && term.IsTerminal(int(f.Fd()))}
	p.width = func() int {
		if ok {
			if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
				return width
			}
		}
		return 80
	}
	return p
}

// failure prints an error with the hints that it carries.
func (p *printer) failure(err error) {
	p.clear()
	fmt.Fprintf(p.err, "epcachectl: %v\n", err)
	for _, hint := range hints(err) {
		p.hint(hint)
	}
}

func (p *printer) hint(text string) { fmt.Fprintf(p.err, "epcachectl: hint: %s\n", text) }

func (p *printer) warning(text string) {
	p.clear()
	fmt.Fprintf(p.err, "epcachectl: warning: %s\n", text)
}

// note tells what a person may want to know, of a call that goes on.
func (p *printer) note(text string) {
	p.clear()
	fmt.Fprintf(p.err, "epcachectl: %s\n", text)
}

func hints(err error) []string {
	var e *unixsock.Error
	var hinted *hintedError
	var list []string
	if errors.As(err, &hinted) {
		list = append(list, hinted.hint)
	}
	if errors.As(err, &e) && e.Hint != "" {
		list = append(list, e.Hint)
	}
	var none *noDaemonError
	if errors.As(err, &none) {
		list = append(list, none.hint)
	}
	return list
}

// hintedError adds a hint of this program's own.
type hintedError struct {
	error
	hint string
}

func (e *hintedError) Unwrap() error { return e.error }

// line prints a line of a result.
func (p *printer) line(format string, args ...any) {
	_ = p.result(fmt.Appendf(nil, format+"\n", args...)) // a reader who went away wants no more
}

// result writes a part of a result. What tells of progress goes before, and does not come in between.
func (p *printer) result(text []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shown > 0 {
		fmt.Fprint(p.err, p.erased())
	}
	_, err := p.out.Write(text)
	return err
}

// json prints a result for scripts.
func (p *printer) json(v any) error {
	text, err := indented("", v)
	if err != nil {
		return err
	}
	return p.result(text)
}

// table prints rows in columns.
func (p *printer) table(rows [][]string) error { return (&columns{p: p}).print(rows) }

// progress replaces the lines that tell a person what is going on. Scripts see nothing.
func (p *printer) progress(lines []string) {
	if !p.terminal {
		return
	}
	width := p.width()
	p.mu.Lock()
	defer p.mu.Unlock()
	text := p.erased()
	for i, line := range lines {
		if i > 0 {
			text += "\n"
		}
		text += cutTo(line, width-1) // one that wraps would be two to erase
	}
	p.shown = len(lines)
	fmt.Fprint(p.err, text)
}

func cutTo(line string, width int) string {
	if runes := []rune(line); len(runes) > width {
		return string(runes[:max(0, width)])
	}
	return line
}

// erased is what takes the progress lines from the terminal. The cursor stands in the last of them.
func (p *printer) erased() string {
	if p.shown == 0 {
		return ""
	}
	text := "\r\x1b[K"
	for range p.shown - 1 {
		text += "\x1b[1A\x1b[K"
	}
	p.shown = 0
	return text
}

func (p *printer) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shown > 0 {
		fmt.Fprint(p.err, p.erased())
	}
}

// printable quotes a name that would do something to the terminal.
func printable(name string) string {
	for _, r := range name {
		if !unicode.IsPrint(r) {
			return strconv.Quote(name)
		}
	}
	return name
}

// brief cuts what somebody else made long.
func brief(text string) string {
	const most = 80
	runes := []rune(text)
	if len(runes) <= most {
		return text
	}
	return fmt.Sprintf("%s... (%d bytes)", string(runes[:most]), len(text))
}

// ending keeps the end of a long message: ONNX Runtime begins with where in its source it was, and the cause comes last.
func ending(text string) string {
	const most = 200
	runes := []rune(text)
	if len(runes) <= most {
		return text
	}
	return "..." + string(runes[len(runes)-most:])
}

// counted spells a number of things.
func counted[N int | uint32 | uint64](n N, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	switch {
	case strings.HasSuffix(thing, "s"):
		thing += "e"
	case strings.HasSuffix(thing, "ry"):
		thing = strings.TrimSuffix(thing, "y") + "ie"
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

func short(key string) string {
	if len(key) > 12 {
		return key[:12]
	}
	return key
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return printable(text)
}

func byteSize(n int64) string { return bytesize.Text(n) }

func seconds(s float64) string {
	d := time.Duration(s * float64(time.Second))
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(100 * time.Microsecond).String()
	case d < time.Minute:
		return d.Round(10 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

func timeOf(ms int64) string {
	if ms == 0 {
		return "-"
	}
	return time.UnixMilli(ms).Format("2006-01-02 15:04:05")
}

// ask puts a question whose answer the caller reads.
func (p *printer) ask(question string) {
	p.clear()
	fmt.Fprintf(p.err, "epcachectl: %s [y/N] ", question)
}
