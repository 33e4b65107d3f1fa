package rules

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/epcached/epcached/internal/tomlfile"
)

type condition struct {
	fact  string
	check check
}

// check compares a fact's two values, where "" is unknown. It returns why it fails, or "".
type check func(build, runtime string) (whyNot string)

// The sides of a comparison.
const (
	buildSide   = "build"
	runtimeSide = "runtime"
	bothSides   = "both"
)

func ofBoth(compare check) check {
	return func(build, runtime string) string {
		switch {
		case build == "" && runtime == "":
			return "is not known"
		case build == "":
			return unknownText(buildSide)
		case runtime == "":
			return unknownText(runtimeSide)
		}
		return compare(build, runtime)
	}
}

func unknownText(side string) string { return "of the " + side + " is not known" }

func ofSide(side string, whyNot func(value string) string) check {
	return func(build, runtime string) string {
		value := sideValue(side, build, runtime)
		if value == "" {
			return unknownText(side)
		}
		return whyNot(value)
	}
}

func sideValue(side, build, runtime string) string {
	if side == runtimeSide {
		return runtime
	}
	return build
}

// sameText: "same" and "different".
func sameText(different bool) check {
	return ofBoth(func(build, runtime string) string {
		switch {
		case build != runtime && !different:
			return fmt.Sprintf("differs: %s, %s", abbreviated(build), abbreviated(runtime))
		case build == runtime && different:
			return fmt.Sprintf("is %s on both sides", abbreviated(build))
		}
		return ""
	})
}

// sameParts: "same major.minor" and the like.
func sameParts(parts int, different bool) check {
	return versions(func(build, runtime version) string {
		if same := build.compare(runtime, parts) == 0; same == different {
			return "is %s and %s"
		}
		return ""
	})
}

// ordered: "build <= runtime".
func ordered(operator string) check {
	return versions(func(build, runtime version) string {
		if !slices.Contains(accepted[operator], build.compare(runtime, maxParts)) {
			return "%s is not " + operator + " %s"
		}
		return ""
	})
}

func versions(compare func(build, runtime version) (format string)) check {
	return ofBoth(func(build, runtime string) string {
		b, ok1 := parseVersion(build)
		r, ok2 := parseVersion(runtime)
		switch {
		case !ok1:
			return notComparable(build)
		case !ok2:
			return notComparable(runtime)
		}
		if format := compare(b, r); format != "" {
			return fmt.Sprintf(format, abbreviated(build), abbreviated(runtime))
		}
		return ""
	})
}

func notComparable(value string) string {
	return fmt.Sprintf("%s is not a version and cannot be compared", abbreviated(value))
}

type bound struct {
	operator, text string
	version        version
}

// bounded: "runtime >= 535.104, < 600".
func bounded(side string, bounds []bound) check {
	return ofSide(side, func(value string) string {
		v, ok := parseVersion(value)
		if !ok {
			return notComparable(value)
		}
		for _, b := range bounds {
			if !slices.Contains(accepted[b.operator], v.compare(b.version, maxParts)) {
				return fmt.Sprintf("of the %s, %s, is not %s %s", side, abbreviated(value),
					b.operator, b.text)
			}
		}
		return ""
	})
}

// known: "build known", "both unknown".
func known(side string, unknown bool) check {
	sides := []string{side}
	if side == bothSides {
		sides = []string{buildSide, runtimeSide}
	}
	return func(build, runtime string) string {
		for _, side := range sides {
			switch value := sideValue(side, build, runtime); {
			case unknown && value != "":
				return fmt.Sprintf("of the %s is known: %s", side, abbreviated(value))
			case !unknown && value == "":
				return unknownText(side)
			}
		}
		return ""
	}
}

// oneOf: { build = ["80", "86"] }.
func oneOf(side string, values []string) check {
	return ofSide(side, func(value string) string {
		if slices.Contains(values, value) {
			return ""
		}
		return fmt.Sprintf("of the %s, %s, is not one of %s", side, abbreviated(value),
			abbreviated(strings.Join(values, ", ")))
	})
}

// equivalent: { equivalent = [["a", "b"], ["c", "d"]] }.
func equivalent(groups [][]string) check {
	return ofBoth(func(build, runtime string) string {
		if build == runtime || slices.ContainsFunc(groups, func(group []string) bool {
			return slices.Contains(group, build) && slices.Contains(group, runtime)
		}) {
			return ""
		}
		return fmt.Sprintf("%s and %s are not equivalent", abbreviated(build), abbreviated(runtime))
	})
}

// covers: { covers = { "80+" = ["80", "86"] } }: the build's value covers the runtime's.
func covers(sets map[string]texts) check {
	return ofBoth(func(build, runtime string) string {
		if slices.Contains(sets[build], runtime) {
			return ""
		}
		return fmt.Sprintf("%s does not cover %s", abbreviated(build), abbreviated(runtime))
	})
}

// matches: { build_matches = '^v2:' }.
func matches(side string, re *regexp.Regexp) check {
	return ofSide(side, func(value string) string {
		if re.MatchString(value) {
			return ""
		}
		return fmt.Sprintf("of the %s, %s, does not match", side, abbreviated(value))
	})
}

const maxParts = 32 // bounds the numbers of a version; vendors use up to four

// version has the numbers of a version, the most significant first, as text without leading zeros,
// because dates and times may be longer than any integer. A leading "v" and everything after a "+"
// are ignored, and a missing number is zero: "v1.8" and "1.8.0+95d534b" are equal. Texts with other
// characters ("1.8.1-rc1", "latest", "") are no versions, because the order of vendors' suffixes is
// unknown.
type version []string

func parseVersion(text string) (version, bool) {
	text, _, _ = strings.Cut(text, "+")
	if len(text) > 0 && (text[0] == 'v' || text[0] == 'V') {
		text = text[1:]
	}
	if text == "" || strings.Count(text, ".") >= maxParts {
		return nil, false
	}
	parts := strings.Split(text, ".")
	for i, part := range parts {
		if part == "" || strings.ContainsFunc(part, func(r rune) bool {
			return r < '0' || r > '9'
		}) {
			return nil, false
		}
		parts[i] = strings.TrimLeft(part, "0")
	}
	return parts, true
}

func (v version) compare(w version, n int) int {
	for i := range min(n, max(len(v), len(w))) {
		a, b := v.part(i), w.part(i)
		if c := cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b)); c != 0 {
			return c
		}
	}
	return 0
}

func (v version) part(i int) string {
	if i < len(v) {
		return v[i]
	}
	return "" // the number 0, because leading zeros are removed
}

// operators of comparisons; those of two characters come first, because the first match is taken.
var operators = []string{"<=", ">=", "==", "!=", "<", ">"}

// accepted lists for each operator the results of version.compare for which it holds.
var accepted = map[string][]int{
	"<=": {-1, 0}, ">=": {0, 1}, "==": {0}, "!=": {-1, 1}, "<": {-1}, ">": {1},
}

// How many numbers of a version "same" compares.
var partNames = map[string]int{"major": 1, "major.minor": 2, "major.minor.patch": 3}

// conditions are a rule's conditions on one fact: an expression, a table of sets, or several of
// them.
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
				one.Errorf("%v", err)
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
	case len(words) == 2 && (words[1] == "known" || words[1] == "unknown") &&
		slices.Contains([]string{buildSide, runtimeSide, bothSides}, words[0]):
		return known(words[0], words[1] == "unknown"), nil
	case len(words) == 3 && words[0] == buildSide && words[2] == runtimeSide &&
		slices.Contains(operators, words[1]):
		return ordered(words[1]), nil
	case first[0] == buildSide || first[0] == runtimeSide:
		return parseBounds(first[0],
			strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(text), first[0])))
	}
	return nil, notUnderstood(text)
}

func notUnderstood(text string) error {
	return fmt.Errorf(
		"%q is not understood: it is \"same\", \"different\", \"build <= runtime\", \"runtime >= "+
			"1.2, < 2\" or \"build known\"", abbreviated(text))
}

func parseSame(text string, words []string) (check, error) {
	different := words[0] == "different"
	if len(words) == 1 {
		return sameText(different), nil
	}
	parts, ok := partNames[words[1]]
	if len(words) > 2 || !ok {
		return nil, fmt.Errorf("%q is not understood: after %q write major, major.minor or "+
			"major.minor.patch", abbreviated(text), words[0])
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
		b := bound{operator: operators[at],
			text: strings.TrimSpace(strings.TrimPrefix(one, operators[at]))}
		var ok bool
		if b.version, ok = parseVersion(b.text); !ok {
			return nil, fmt.Errorf("%q is not a version", abbreviated(b.text))
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

// Check refuses an empty table.
func (s *sets) Check(v tomlfile.Value) {
	if len(v.Keys()) == 0 {
		v.Errorf("empty")
	}
	if groups := v.In("equivalent"); groups.Raw != nil && len(s.Equivalent) == 0 {
		groups.Errorf("empty")
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
