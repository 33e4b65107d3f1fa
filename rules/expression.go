package rules

import (
	"fmt"
	"slices"
	"strings"

	"github.com/epcached/epcached/tomlfile"
)

// How deep "same" looks.
var partNames = map[string]int{"major": 1, "major.minor": 2, "major.minor.patch": 3}

// readConditions reads what a rule asks of one fact: an expression, a table of sets, or several of them.
func readConditions(when *table, fact string) []condition {
	var all []condition
	paths, values := when.list(fact)
	for i, v := range values {
		for _, c := range readChecks(when, paths[i], v) {
			all = append(all, condition{fact: fact, check: c})
		}
	}
	return all
}

func readChecks(when *table, path []string, v any) []check {
	if _, isTable := v.(map[string]any); isTable {
		return readSets(when.asTable(path, v))
	}
	text := when.asText(path, v)
	if text == "" {
		return nil // told already
	}
	c, err := parseExpression(text)
	if err != nil {
		when.wrong(path, "%v", err)
		return nil
	}
	return []check{c}
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
		return known{side: words[0], unknown: words[1] == "unknown"}, nil
	case len(words) == 3 && words[0] == buildSide && words[2] == runtimeSide && isOperator(words[1]):
		return ordered{operator: words[1]}, nil
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
		return sameText{different: different}, nil
	}
	parts, ok := partNames[words[1]]
	if len(words) > 2 || !ok {
		return nil, fmt.Errorf("%q is not understood: behind %q there is major, major.minor or major.minor.patch", shown(text), words[0])
	}
	return sameParts{parts: parts, different: different}, nil
}

func parseBounds(side, text string) (check, error) {
	c := bounded{side: side}
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
		c.bounds = append(c.bounds, b)
	}
	return c, nil
}

// readSets reads the conditions that need more than a line.
func readSets(t *table) []check {
	var checks []check
	for _, side := range []string{buildSide, runtimeSide} {
		if values := t.texts(side); values != nil {
			checks = append(checks, oneOf{side: side, values: values})
		}
		if re := t.pattern(side + "_matches"); re != nil {
			checks = append(checks, matches{side: side, regexp: re})
		}
	}
	if groups := t.groups("equivalent"); groups != nil {
		checks = append(checks, equivalent{groups: groups})
	}
	if _, there := t.values["covers"]; there {
		sets := t.table("covers")
		c := covers{sets: map[string][]string{}}
		for _, key := range sets.keys() {
			c.sets[key] = sets.texts(key)
		}
		checks = append(checks, c)
	}
	t.done()
	if len(t.values) == 0 {
		t.wrong(t.path, "empty")
	}
	return checks
}

// groups reads an array of arrays of texts.
func (t *table) groups(key string) [][]string {
	var all [][]string
	paths, values := t.list(key)
	for i, v := range values {
		group, ok := v.([]any)
		if !ok {
			t.wrong(paths[i], "%s, where an array of texts is wanted", tomlfile.Kind(v))
			continue
		}
		var texts []string
		for j, member := range group {
			texts = append(texts, t.asText(element(paths[i], j), member))
		}
		all = append(all, texts)
	}
	return all
}
