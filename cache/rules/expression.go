package rules

import (
	"fmt"
	"slices"
	"strings"

	"github.com/epcached/epcached/internal/tomlfile"
)

// How deep "same" looks.
var partNames = map[string]int{"major": 1, "major.minor": 2, "major.minor.patch": 3}

// conditions are what a rule asks of one fact: an expression, a table of sets, or several of them.
type conditions []check

func (c *conditions) Decode(v tomlfile.Value) {
	for _, one := range several(v) {
		if _, isTable := one.Raw.(map[string]any); isTable {
			var s sets
			one.Into(&s)
			*c = append(*c, s.checks()...)
			continue
		}
		if text := one.Text("text"); text != "" {
			parsed, err := parseExpression(text)
			if err != nil {
				one.Wrong("%v", err)
			}
			*c = append(*c, parsed)
		}
	}
}

// parseExpression reads
//
//	same | different [major | major.minor | major.minor.patch]
//	build OPERATOR runtime
//	build | runtime OPERATOR VERSION [, OPERATOR VERSION]...
//	build | runtime | both known | unknown
func parseExpression(text string) (check, error) {
	words := strings.Fields(text)
	switch first := words[0:min(1, len(words))]; {
	case len(words) == 0:
		return nil, fmt.Errorf("empty")
	case first[0] == "same" || first[0] == "different":
		return parseSame(text, words)
	case len(words) == 2 && (words[1] == "known" || words[1] == "unknown") && slices.Contains([]string{buildSide, runtimeSide, bothSides}, words[0]):
		return known(words[0], words[1] == "unknown"), nil
	case len(words) == 3 && words[0] == buildSide && words[2] == runtimeSide && slices.Contains(operators, words[1]):
		return ordered(words[1]), nil
	case first[0] == buildSide || first[0] == runtimeSide:
		return parseBounds(first[0], strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(text), first[0])))
	}
	return nil, notUnderstood(text)
}

func notUnderstood(text string) error {
	return fmt.Errorf("%q is not understood: it is \"same\", \"different\", \"build <= runtime\", \"runtime >= 1.2, < 2\" or \"build known\"", shown(text))
}

func parseSame(text string, words []string) (check, error) {
	different := words[0] == "different"
	if len(words) == 1 {
		return sameText(different), nil
	}
	parts, ok := partNames[words[1]]
	if len(words) > 2 || !ok {
		return nil, fmt.Errorf("%q is not understood: behind %q there is major, major.minor or major.minor.patch", shown(text), words[0])
	}
	return sameParts(parts, different), nil
}

func parseBounds(side, text string) (check, error) {
	var bounds []bound
	for _, one := range strings.Split(text, ",") {
		one = strings.TrimSpace(one)
		at := slices.IndexFunc(operators, func(o string) bool { return strings.HasPrefix(one, o) })
		if at < 0 {
			return nil, notUnderstood(side + " " + text)
		}
		b := bound{operator: operators[at], text: strings.TrimSpace(strings.TrimPrefix(one, operators[at]))}
		var ok bool
		if b.version, ok = parseVersion(b.text); !ok {
			return nil, fmt.Errorf("%q is no version", shown(b.text))
		}
		bounds = append(bounds, b)
	}
	return bounded(side, bounds), nil
}

type sets struct {
	Build          texts            `toml:"build"`
	BuildMatches   pattern          `toml:"build_matches"`
	Runtime        texts            `toml:"runtime"`
	RuntimeMatches pattern          `toml:"runtime_matches"`
	Equivalent     [][]string       `toml:"equivalent" is:"text"`
	Covers         map[string]texts `toml:"covers"`
}

// Check refuses a table that asks for nothing.
func (s *sets) Check(v tomlfile.Value) {
	if len(v.Keys()) == 0 {
		v.Wrong("empty")
	}
	if groups := v.In("equivalent"); groups.Raw != nil && len(s.Equivalent) == 0 {
		groups.Wrong("empty")
	}
}

func (s *sets) checks() (all []check) {
	side := func(side string, values texts, p pattern) {
		if values != nil {
			all = append(all, oneOf(side, values))
		}
		if p.Regexp != nil {
			all = append(all, matches(side, p.Regexp))
		}
	}
	side(buildSide, s.Build, s.BuildMatches)
	side(runtimeSide, s.Runtime, s.RuntimeMatches)
	if s.Equivalent != nil {
		all = append(all, equivalent(s.Equivalent))
	}
	if s.Covers != nil {
		all = append(all, covers(s.Covers))
	}
	return all
}

type texts []string

func (t *texts) Decode(v tomlfile.Value) {
	for _, one := range several(v) {
		*t = append(*t, one.Text("text"))
	}
}
