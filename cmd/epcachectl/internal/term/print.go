// Package term prints for people: results, messages and progress on a terminal, tables, and how
// bytes, times and names are spelled.
package term

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/sys/unix"
	xterm "golang.org/x/term"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/cmd/epcachectl/internal/jsonout"
	"github.com/epcached/epcached/internal/bytesize"
	"github.com/epcached/epcached/internal/printable"
)

// Printer prints all output of epcachectl. A message is "epcachectl: operation "object": cause",
// lower case and without a final period; a hint is a line of its own and guesses what the user
// wants to do. Results go to standard output, everything else to standard error, which stays empty
// when all goes well and there is something to print.
type Printer struct {
	Out, Err io.Writer

	mu            sync.Mutex // guards the progress lines
	Terminal      bool       // Err is a terminal, which shows progress too
	width         func() int // of the terminal that Err is, in cells
	Width         int        // of the terminal that Out is, in cells; 0: it is no terminal
	coloured      bool       // print colours on terminals
	progressLines int        // number of progress lines now on the terminal
	printed       bool       // a part of a result was printed
	failed        error      // the first error of a table
}

// NewPrinter returns a printer of results to out and of messages to err.
func NewPrinter(out, err io.Writer) *Printer {
	p := &Printer{Out: out, Err: err, Terminal: IsTerminal(err), Width: widthOf(out),
		coloured: (IsTerminal(out) || IsTerminal(err)) && os.Getenv("NO_COLOR") == "" &&
			os.Getenv("TERM") != "dumb"}
	p.width = func() int { return cmp.Or(widthOf(err), 80) }
	return p
}

// widthOf returns the number of cells in a line of a terminal, 0 if the stream is no terminal.
func widthOf(stream io.Writer) int {
	if !IsTerminal(stream) {
		return 0
	}
	width, _, err := xterm.GetSize(int(stream.(*os.File).Fd()))
	if err != nil || width <= 0 {
		return 80
	}
	return width
}

// IsTerminal reports whether a reader or writer is a terminal.
func IsTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && xterm.IsTerminal(int(f.Fd()))
}

// OnReaderGone calls gone when results go to a pipe, socket or terminal of which the other end is
// closed. It watches until the process ends.
func (p *Printer) OnReaderGone(gone func()) {
	if f, is := p.Out.(*os.File); is {
		fds := []unix.PollFd{{Fd: int32(f.Fd())}} // errors are reported without being requested
		go func() {
			for err := error(unix.EINTR); err == unix.EINTR; {
				_, err = unix.Poll(fds, -1)
			}
			if fds[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0 {
				gone()
			}
		}()
	}
}

// Failure prints an error, whose lines are messages of their own, with the hints that it carries.
func (p *Printer) Failure(err error) {
	p.Clear()
	for line := range strings.SplitSeq(err.Error(), "\n") {
		p.message(red, "", line)
	}
	for _, hint := range exit.Hints(err) {
		p.Hint(hint)
	}
}

// JSONFailure prints an error for scripts, unless a part of a result was printed: that part stays
// incomplete JSON, so that no script mistakes it for the whole result.
func (p *Printer) JSONFailure(err error) {
	if !p.printed {
		_ = p.JSON(jsonout.Object{"error": err.Error(), "hint": strings.Join(exit.Hints(err), "; "),
			"exit_status": exit.Code(err)}) // the reader has closed the pipe
	}
}

// Hint prints a guess at what the user wants to do.
func (p *Printer) Hint(text string) { p.message(cyan, "hint: ", text) }

// Warning prints a problem that does not end the call.
func (p *Printer) Warning(text string) {
	p.Clear()
	p.message(yellow, "warning: ", text)
}

// Note prints information that does not end the call.
func (p *Printer) Note(text string) {
	p.Clear()
	p.message("", "", text)
}

// message prints a message other than a result, with its beginning in a colour.
func (p *Printer) message(colour, kind, text string) {
	begin := "epcachectl: " + kind
	if !p.Terminal {
		fmt.Fprintf(p.Err, "%s%s\n", begin, p.clean(text))
		return
	}
	fmt.Fprintln(p.Err, wrap(p.clean(p.paint(colour, begin)+text), p.width()))
}

// Line prints a line of a result.
func (p *Printer) Line(format string, args ...any) {
	// the reader has closed the pipe
	_ = p.Result([]byte(wrap(p.clean(fmt.Sprintf(format, args...)), p.Width) + "\n"))
}

// Home clears the terminal that results go to, for the next line to be its first.
func (p *Printer) Home() { _ = p.Result([]byte("\x1b[H\x1b[2J")) } // as in Line

// Result writes a part of a result, after removing the progress display. Its text is written as it
// is: text of foreign origin is printed by Line, Table or JSON.
func (p *Printer) Result(text []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.progressLines > 0 {
		fmt.Fprint(p.Err, p.eraseSequence())
	}
	p.printed = p.printed || len(text) > 0
	_, err := p.Out.Write(text)
	return err
}

// JSONLine prints one result of many for scripts.
func (p *Printer) JSONLine(v any) error {
	text, err := jsonout.Line(v)
	if err != nil {
		return err
	}
	return p.Result(text)
}

// JSON prints a result for scripts.
func (p *Printer) JSON(v any) error {
	text, err := jsonout.Indented("", v)
	if err != nil {
		return err
	}
	return p.Result(text)
}

// Table prints rows in columns; optional is as in NewColumns. Failed returns the error if it fails.
func (p *Printer) Table(rows [][]string, optional ...string) {
	p.failed = cmp.Or(p.failed, NewColumns(p, optional...).Print(rows))
}

// Failed returns the first error of a table.
func (p *Printer) Failed() error { return p.failed }

// More prints that n more results exist than were printed, unless n is 0.
func (p *Printer) More(n uint64) {
	if n > 0 {
		p.Line("and %d more", n)
	}
}

// progress replaces the progress lines. It prints nothing if Err is no terminal.
func (p *Printer) progress(lines []string) {
	if !p.Terminal {
		return
	}
	width := p.width()
	p.mu.Lock()
	defer p.mu.Unlock()
	text := p.eraseSequence()
	for i, line := range lines {
		if i > 0 {
			text += "\n"
		}
		// a line that wraps would need two to be erased
		text += ansi.Truncate(p.clean(line), max(0, width-1), "")
	}
	p.progressLines = len(lines)
	fmt.Fprint(p.Err, text)
}

// eraseSequence returns the escape sequence that erases the progress lines. The cursor must be in
// the last of them.
func (p *Printer) eraseSequence() string {
	if p.progressLines == 0 {
		return ""
	}
	text := "\r\x1b[K"
	for range p.progressLines - 1 {
		text += "\x1b[1A\x1b[K"
	}
	p.progressLines = 0
	return text
}

// Clear removes the progress lines from the terminal.
func (p *Printer) Clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.progressLines > 0 {
		fmt.Fprint(p.Err, p.eraseSequence())
	}
}

// Printable quotes a name with characters that are not printable, newlines too, so that its end can
// be seen. All output is cleaned in any case.
func Printable(name string) string {
	if printable.Text(name) != name || strings.ContainsAny(name, "\n\t") {
		return strconv.Quote(name)
	}
	return name
}

// Brief shortens other programs' text in its middle, because paths differ at their ends.
func Brief(text string) string {
	const begin, end = 40, 40
	if runes := []rune(text); len(runes) > begin+end {
		return fmt.Sprintf("%s...%s (%d bytes)", string(runes[:begin]),
			string(runes[len(runes)-end:]), len(text))
	}
	return text
}

// KeepEnd keeps the end of a long message, because messages of ONNX Runtime begin with a place in
// its source and end with the cause.
func KeepEnd(text string) string {
	const most = 200
	if runes := []rune(text); len(runes) > most {
		return "..." + string(runes[len(runes)-most:])
	}
	return text
}

// Count returns a number with a noun, which is in the plural unless the number is 1.
func Count[N int | uint32 | uint64](n N, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	switch {
	case strings.HasSuffix(thing, "s"):
		thing += "e"
	case strings.HasSuffix(thing, "ry"), strings.HasSuffix(thing, "py"):
		thing = strings.TrimSuffix(thing, "y") + "ie"
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// Short keeps the beginning of a key or digest.
func Short(key string) string { return key[:min(len(key), 12)] }

// TextOrDash returns Printable of a text, "-" if it is empty.
func TextOrDash(text string) string { return cmp.Or(Printable(text), "-") }

// WithPrefix returns a prefix with Printable of a text, "" if the text is empty.
func WithPrefix(before, text string) string {
	if text == "" {
		return ""
	}
	return before + Printable(text)
}

// Bytes spells a number of bytes.
func Bytes(n int64) string { return bytesize.Text(n) }

// Seconds spells a number of seconds as a duration, with fewer decimals the longer it is.
func Seconds(s float64) string { return bytesize.Seconds(s) }

// Time spells a time in milliseconds as RFC 3339, in the local zone; "-" for none.
func Time(ms int64) string {
	if ms == 0 {
		return "-"
	}
	return time.UnixMilli(ms).Format(time.RFC3339)
}

// Ask prints a question; the caller reads the answer.
func (p *Printer) Ask(question string) {
	p.Clear()
	fmt.Fprintf(p.Err, "epcachectl: %s [y/N] ", p.clean(question))
}

// Printables quotes names as Printable does.
func Printables(names []string) []string {
	out := make([]string, len(names))
	for i, name := range names {
		out[i] = Printable(name)
	}
	return out
}

// A result of a hundred thousand lines is printed page by page as it arrives, so that its reader
// can begin or stop early, and no process keeps all of it.

// Array prints a list for scripts, some elements at a time. If the rest cannot be read, the list
// stays incomplete JSON, so that no script mistakes a part for the whole.
type Array struct {
	p       *Printer
	indent  string // of the line on which the list begins
	started bool
}

// NewArray returns a list that begins on a line with an indent.
func NewArray(p *Printer, indent string) *Array { return &Array{p: p, indent: indent} }

// Add prints some elements.
func (j *Array) Add(elements ...any) error {
	var text bytes.Buffer
	for _, v := range elements {
		if !j.started {
			text.WriteString("[\n")
		} else {
			text.WriteString(",\n")
		}
		j.started = true
		one, err := jsonout.Indented(j.indent+"  ", v)
		if err != nil {
			return err
		}
		text.WriteString(j.indent + "  ")
		text.Write(bytes.TrimSuffix(one, []byte("\n")))
	}
	return j.p.Result(text.Bytes())
}

// End prints the end of the list, after its beginning if no element was added.
func (j *Array) End() error {
	if !j.started {
		return j.p.Result([]byte("[]"))
	}
	return j.p.Result([]byte("\n" + j.indent + "]"))
}
