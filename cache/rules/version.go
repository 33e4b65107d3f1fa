package rules

import (
	"cmp"
	"slices"
	"strings"
)

// maxParts bounds the numbers of a version; vendors use up to four.
const maxParts = 32

// version is the numbers of a version, from the most significant on, without leading zeros: numbers
// may be dates and times, and longer than any integer. A "v" in front and what follows a "+" do not
// count, and a missing number is a zero: "v1.8" and "1.8.0+95d534b" are equal. Everything else that
// is not a number ("1.8.1-rc1", "latest", "") is no version: which of the vendors' suffixes are later
// is not to be guessed.
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
		if part == "" || strings.ContainsFunc(part, func(r rune) bool { return r < '0' || r > '9' }) {
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
	return "" // zero, without its leading zero
}

// operators of comparisons; those of two characters come first, for they are looked for from left to right.
var operators = []string{"<=", ">=", "==", "!=", "<", ">"}

func fits(operator string, order int) bool {
	switch operator {
	case "<=":
		return order <= 0
	case ">=":
		return order >= 0
	case "==":
		return order == 0
	case "!=":
		return order != 0
	case "<":
		return order < 0
	}
	return order > 0
}

func isOperator(text string) bool { return slices.Contains(operators, text) }
