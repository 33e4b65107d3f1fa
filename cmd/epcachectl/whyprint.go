package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/epcached/epcached/cmd/epcachectl/internal/term"
	"github.com/epcached/epcached/unixsock/wire"
)

// printExplanation prints an explanation for people: the decision, the builds, the nearest entries, the history.
func printExplanation(p *term.Printer, arg string, e *wire.Explanation, all bool) error {
	p.Line("%s", decided(arg, e))
	rows := [][]string{}
	if e.GetRequestKey() != "" {
		rows = append(rows, []string{"  request key", term.Printable(e.GetRequestKey())})
	}
	if e.GetRuntime() != "" {
		rows = append(rows, []string{"  runtime", term.Printable(e.GetRuntime())})
	}
	if err := p.Table(rows); err != nil {
		return err
	}
	if all {
		if err := printRecord(p, e.GetRecord()); err != nil {
			return err
		}
	}
	for _, c := range e.GetCandidates() {
		if err := printCandidate(p, c, all); err != nil {
			return err
		}
	}
	for i, n := range e.GetNeighbours() {
		if i == 0 {
			p.Line("\nnearest entries:")
		}
		if err := printNeighbour(p, n); err != nil {
			return err
		}
	}
	for i, event := range e.GetHistory() {
		if i == 0 {
			p.Line("\nhistory:")
		}
		p.Line("  %s", eventLine(event))
	}
	return nil
}

func printCandidate(p *term.Printer, c *wire.Candidate, all bool) error {
	b := c.GetBuild()
	verb := "not served"
	if c.GetServed() {
		verb = "served"
	}
	p.Line("\nbuild %s is %s: %s", term.Printable(term.Short(b.GetBuild())), verb, term.OrDash(c.GetReason()))
	if all {
		if err := printBuild(p, b, ""); err != nil {
			return err
		}
		return printDifferences(p, "  ", "now", "made with", c.GetDifferences())
	}
	rows := [][]string{
		{"  compatibility", judgement(b)},
		{"  made by", madeBy(b)},
		{"  compiled", term.Time(b.GetCreatedMs()) + " in " + term.Seconds(b.GetCompileSeconds())},
		{"  state", stateOf(b)},
		{"  kept", keptText(b)},
		{"  gain", gain(b)},
	}
	if err := p.Table(rows); err != nil {
		return err
	}
	return printDifferences(p, "  ", "now", "made with", c.GetDifferences())
}

// madeBy is what made a build, as far as it is known.
func madeBy(b *wire.Build) string {
	text := term.OrDash(b.GetEp()) + " " + term.OrDash(b.GetEpVersion())
	for _, part := range []struct{ name, value string }{
		{"SDK", b.GetSdkVersion()}, {"hardware", b.GetHardwareArchitecture()}, {"driver", b.GetDriverVersion()}, {"ONNX Runtime", b.GetOrtVersion()},
	} {
		if part.value != "" {
			text += ", " + part.name + " " + term.Printable(part.value)
		}
	}
	return text
}

func printNeighbour(p *term.Printer, n *wire.Neighbour) error {
	builds, fields := term.Counted(int(n.GetBuilds()), "build"), term.Counted(len(n.GetDifferences()), "field")
	p.Line("  %s, request key %s, %s, differs in %s", term.OrDash(n.GetModelName()), term.Printable(term.Short(n.GetRequestKey())), builds, fields)
	return printDifferences(p, "    ", "asked for", "there", n.GetDifferences())
}

func printDifferences(p *term.Printer, indent, asked, found string, list []*wire.Difference) error {
	if len(list) == 0 {
		return nil
	}
	rows := [][]string{{indent + "FIELD", upper(asked), upper(found)}}
	for _, d := range list {
		rows = append(rows, []string{indent + term.Printable(d.GetField()), fieldValue(d.GetAsked()), fieldValue(d.GetFound())})
	}
	return p.Table(rows)
}

func upper(text string) string {
	out := []byte(text)
	for i, b := range out {
		if 'a' <= b && b <= 'z' {
			out[i] = b - 'a' + 'A'
		}
	}
	return string(out)
}

func fieldValue(v string) string {
	if v == "" {
		return "(not there)"
	}
	return term.Printable(term.Brief(v))
}

// printRecord prints every field of a request's record.
func printRecord(p *term.Printer, record string) error {
	var tree any
	if record == "" {
		return nil
	}
	if err := json.Unmarshal([]byte(record), &tree); err != nil {
		return fmt.Errorf("request record: %w", err)
	}
	rows := [][]string{{"  FIELD", "ASKED FOR"}}
	flatten("", tree, func(field, value string) {
		rows = append(rows, []string{"  " + term.Printable(field), fieldValue(value)})
	})
	p.Line("")
	return p.Table(rows)
}

// flatten names the leaves of a record as differences do: "execution_providers[0].options.precision".
func flatten(path string, v any, leaf func(field, value string)) {
	switch v := v.(type) {
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			inner := key
			if path != "" {
				inner = path + "." + key
			}
			flatten(inner, v[key], leaf)
		}
	case []any:
		for i, one := range slices.All(v) {
			flatten(fmt.Sprintf("%s[%d]", path, i), one, leaf)
		}
	case string:
		leaf(path, v)
	default:
		text, err := json.Marshal(v)
		if err != nil {
			text = []byte("?") // numbers and truths always have a form
		}
		leaf(path, string(text))
	}
}
