package main

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/epcached/epcached/unixsock/wire"
)

// why prints an explanation for people: the decision, the builds, the nearest entries, the history.
func (p *printer) why(arg string, e *wire.Explanation, all bool) error {
	p.line("%s", decided(arg, e))
	rows := [][]string{}
	if e.GetRequestKey() != "" {
		rows = append(rows, []string{"  request key", printable(e.GetRequestKey())})
	}
	if e.GetRuntime() != "" {
		rows = append(rows, []string{"  runtime", printable(e.GetRuntime())})
	}
	if err := p.table(rows); err != nil {
		return err
	}
	if all {
		if err := p.record(e.GetRecord()); err != nil {
			return err
		}
	}
	for _, c := range e.GetCandidates() {
		if err := p.candidate(c, all); err != nil {
			return err
		}
	}
	for i, n := range e.GetNeighbours() {
		if i == 0 {
			p.line("\nnearest entries:")
		}
		if err := p.neighbour(n); err != nil {
			return err
		}
	}
	for i, event := range e.GetHistory() {
		if i == 0 {
			p.line("\nhistory:")
		}
		p.line("  %s", eventLine(event))
	}
	return nil
}

func (p *printer) candidate(c *wire.Candidate, all bool) error {
	b := c.GetBuild()
	verb := "not served"
	if c.GetServed() {
		verb = "served"
	}
	p.line("\nbuild %s is %s: %s", printable(short(b.GetBuild())), verb, orDash(c.GetReason()))
	if all {
		if err := p.build(b, ""); err != nil {
			return err
		}
		return p.differences("  ", "now", "made with", c.GetDifferences())
	}
	rows := [][]string{
		{"  compatibility", judgement(b)},
		{"  made by", madeBy(b)},
		{"  compiled", timeOf(b.GetCreatedMs()) + " in " + seconds(b.GetCompileSeconds())},
		{"  state", stateOf(b)},
		{"  kept", keptText(b)},
		{"  gain", gain(b)},
	}
	if err := p.table(rows); err != nil {
		return err
	}
	return p.differences("  ", "now", "made with", c.GetDifferences())
}

// madeBy is what made a build, as far as it is known.
func madeBy(b *wire.Build) string {
	text := orDash(b.GetEp()) + " " + orDash(b.GetEpVersion())
	for _, part := range []struct{ name, value string }{
		{"SDK", b.GetSdkVersion()}, {"hardware", b.GetHardwareArchitecture()}, {"driver", b.GetDriverVersion()}, {"ONNX Runtime", b.GetOrtVersion()},
	} {
		if part.value != "" {
			text += ", " + part.name + " " + printable(part.value)
		}
	}
	return text
}

func (p *printer) neighbour(n *wire.Neighbour) error {
	builds, fields := counted(int(n.GetBuilds()), "build"), counted(len(n.GetDifferences()), "field")
	p.line("  %s, request key %s, %s, differs in %s", orDash(n.GetModelName()), printable(short(n.GetRequestKey())), builds, fields)
	return p.differences("    ", "asked for", "there", n.GetDifferences())
}

func (p *printer) differences(indent, asked, found string, list []*wire.Difference) error {
	if len(list) == 0 {
		return nil
	}
	rows := [][]string{{indent + "FIELD", upper(asked), upper(found)}}
	for _, d := range list {
		rows = append(rows, []string{indent + printable(d.GetField()), fieldValue(d.GetAsked()), fieldValue(d.GetFound())})
	}
	return p.table(rows)
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
	return printable(brief(v))
}

// record prints every field of a request's record.
func (p *printer) record(record string) error {
	var tree any
	if record == "" {
		return nil
	}
	if err := json.Unmarshal([]byte(record), &tree); err != nil {
		return fmt.Errorf("request record: %w", err)
	}
	rows := [][]string{{"  FIELD", "ASKED FOR"}}
	flatten("", tree, func(field, value string) { rows = append(rows, []string{"  " + printable(field), fieldValue(value)}) })
	p.line("")
	return p.table(rows)
}

// flatten names the leaves of a record as differences do: "execution_providers[0].options.precision".
func flatten(path string, v any, leaf func(field, value string)) {
	switch v := v.(type) {
	case map[string]any:
		for _, key := range sorted(v) {
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
