package rules

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// condition is one thing that a rule asks of a fact.
type condition struct {
	fact  string
	check check
}

// check compares a fact's two values; empty ones are unknown.
type check interface {
	// holds gives an empty text if the check holds, and else why not.
	holds(build, runtime string) (whyNot string)
}

// sides of a comparison.
const (
	buildSide   = "build"
	runtimeSide = "runtime"
	bothSides   = "both"
)

// unknownSide says which value is missing; empty: none.
func unknownSide(build, runtime string) string {
	switch {
	case build == "" && runtime == "":
		return "is not known"
	case build == "":
		return "of the build is not known"
	case runtime == "":
		return "of the runtime is not known"
	}
	return ""
}

// sameText: "same" and "different".
type sameText struct{ different bool }

func (c sameText) holds(build, runtime string) string {
	if why := unknownSide(build, runtime); why != "" {
		return why
	}
	switch {
	case build != runtime && !c.different:
		return fmt.Sprintf("differs: %s, %s", shown(build), shown(runtime))
	case build == runtime && c.different:
		return fmt.Sprintf("is %s on both sides", shown(build))
	}
	return ""
}

// sameParts: "same major.minor" and the like.
type sameParts struct {
	parts     int
	different bool
}

func (c sameParts) holds(build, runtime string) string {
	b, r, why := versions(build, runtime)
	if why != "" {
		return why
	}
	if same := b.compare(r, c.parts) == 0; same == c.different {
		return fmt.Sprintf("is %s and %s", shown(build), shown(runtime))
	}
	return ""
}

// versions reads both values.
func versions(build, runtime string) (b, r version, why string) {
	if why := unknownSide(build, runtime); why != "" {
		return nil, nil, why
	}
	b, ok1 := parseVersion(build)
	r, ok2 := parseVersion(runtime)
	switch {
	case !ok1:
		return nil, nil, notComparable(build)
	case !ok2:
		return nil, nil, notComparable(runtime)
	}
	return b, r, ""
}

func notComparable(value string) string {
	return fmt.Sprintf("%s is no version and cannot be compared", shown(value))
}

// ordered: "build <= runtime".
type ordered struct{ operator string }

func (c ordered) holds(build, runtime string) string {
	b, r, why := versions(build, runtime)
	if why != "" {
		return why
	}
	if !fits(c.operator, b.compare(r, maxParts)) {
		return fmt.Sprintf("%s is not %s %s", shown(build), c.operator, shown(runtime))
	}
	return ""
}

// bounded: "runtime >= 535.104, < 600".
type bounded struct {
	side   string
	bounds []bound
}

type bound struct {
	operator, text string
	version        version
}

func (c bounded) holds(build, runtime string) string {
	value, why := oneSide(c.side, build, runtime)
	if why != "" {
		return why
	}
	v, ok := parseVersion(value)
	if !ok {
		return notComparable(value)
	}
	for _, b := range c.bounds {
		if !fits(b.operator, v.compare(b.version, maxParts)) {
			return fmt.Sprintf("of the %s, %s, is not %s %s", c.side, shown(value), b.operator, b.text)
		}
	}
	return ""
}

// oneSide picks a value and complains if it is missing.
func oneSide(side, build, runtime string) (value, why string) {
	value = build
	if side == runtimeSide {
		value = runtime
	}
	if value == "" {
		why = "of the " + side + " is not known"
	}
	return value, why
}

// known: "build known", "both unknown".
type known struct {
	side    string
	unknown bool
}

func (c known) holds(build, runtime string) string {
	sides := []string{c.side}
	if c.side == bothSides {
		sides = []string{buildSide, runtimeSide}
	}
	for _, side := range sides {
		value, why := oneSide(side, build, runtime)
		switch {
		case c.unknown && why == "":
			return fmt.Sprintf("of the %s is known: %s", side, shown(value))
		case !c.unknown && why != "":
			return why
		}
	}
	return ""
}

// oneOf: { build = ["80", "86"] }.
type oneOf struct {
	side   string
	values []string
}

func (c oneOf) holds(build, runtime string) string {
	value, why := oneSide(c.side, build, runtime)
	if why == "" && !slices.Contains(c.values, value) {
		why = fmt.Sprintf("of the %s, %s, is none of %s", c.side, shown(value), shown(strings.Join(c.values, ", ")))
	}
	return why
}

// equivalent: { equivalent = [["a", "b"], ["c", "d"]] }.
type equivalent struct{ groups [][]string }

func (c equivalent) holds(build, runtime string) string {
	if why := unknownSide(build, runtime); why != "" {
		return why
	}
	if build == runtime {
		return ""
	}
	for _, group := range c.groups {
		if slices.Contains(group, build) && slices.Contains(group, runtime) {
			return ""
		}
	}
	return fmt.Sprintf("%s and %s are not equivalent", shown(build), shown(runtime))
}

// covers: { covers = { "80+" = ["80", "86"] } }: what the build is for covers what the runtime has.
type covers struct{ sets map[string]texts }

func (c covers) holds(build, runtime string) string {
	if why := unknownSide(build, runtime); why != "" {
		return why
	}
	if !slices.Contains(c.sets[build], runtime) {
		return fmt.Sprintf("%s does not cover %s", shown(build), shown(runtime))
	}
	return ""
}

// matches: { build_matches = '^v2:' }.
type matches struct {
	side   string
	regexp *regexp.Regexp
}

func (c matches) holds(build, runtime string) string {
	value, why := oneSide(c.side, build, runtime)
	if why == "" && !c.regexp.MatchString(value) {
		why = fmt.Sprintf("of the %s, %s, does not match", c.side, shown(value))
	}
	return why
}
