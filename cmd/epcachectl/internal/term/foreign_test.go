package term

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
	"github.com/epcached/epcached/internal/printable"
	"github.com/epcached/epcached/unixsock/wire"
)

// Text of foreign origin controls no terminal, whatever prints it.
func TestAllOutputIsPrintable(t *testing.T) {
	const hostile = "a\x1b[2J\x1b]0;t\x07\r\x7f\u009b31m\u202eb\u2066\xff\x9b"
	for name, print := range map[string]func(*Printer){
		"line": func(p *Printer) { p.Line("x %s", hostile) },
		"table": func(p *Printer) {
			p.Table([][]string{{"NAME", "X", "Y"}, {hostile, "1\n2", hostile}})
		},
		"pairs":   func(p *Printer) { p.Table([][]string{{"name", hostile}}) },
		"state":   func(p *Printer) { p.Line("%s", p.State("ok, "+hostile)) },
		"failure": func(p *Printer) { p.Failure(exit.Hint(errors.New(hostile), hostile)) },
		"warning": func(p *Printer) { p.Warning(hostile) },
		"note":    func(p *Printer) { p.Note(hostile) },
		"ask":     func(p *Printer) { p.Ask(hostile) },
		"json":    func(p *Printer) { require.NoError(t, p.JSON([]string{hostile})) },
		"lines":   func(p *Printer) { require.NoError(t, p.JSONLine([]string{hostile})) },
		"array":   func(p *Printer) { require.NoError(t, NewArray(p, "").Add(hostile)) },
		"errors":  func(p *Printer) { p.JSONFailure(errors.New(hostile)) },
		"progress": func(p *Printer) {
			s := NewPhases(p, true, 1)
			s.Phase(hostile, &wire.Progress{Phase: hostile, Detail: hostile})
			p.progress([]string{hostile})
		},
	} {
		for _, terminal := range []bool{false, true} {
			var out bytes.Buffer
			p := &Printer{Out: &out, Err: &out, Terminal: terminal, coloured: terminal,
				width: func() int { return 200 }}
			if terminal {
				p.Width = 200
			}
			print(p)
			text := out.String()
			require.NotEmpty(t, text, name)
			if terminal { // our own colours and movements
				for _, own := range []string{"\x1b[0m", "\x1b[31m", "\x1b[32m", "\x1b[33m",
					"\x1b[36m", "\r\x1b[K"} {
					text = strings.ReplaceAll(text, own, "")
				}
			}
			require.Equal(t, printable.Text(text), text, name)
		}
	}
	var out bytes.Buffer
	p := &Printer{Out: &out}
	require.NoError(t, p.JSON(strings.ToValidUTF8(hostile, "?")+"\U0001F600\U000E0001"))
	var back string
	require.NoError(t, json.Unmarshal(out.Bytes(), &back))
	require.Equal(t, strings.ToValidUTF8(hostile, "?")+"\U0001F600\U000E0001", back)
}
