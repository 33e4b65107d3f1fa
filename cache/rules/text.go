package rules

import (
	"fmt"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"unicode"

	"github.com/epcached/epcached/internal/tomlfile"
)

const maxShown = 120

func shown(value string) string {
	if value == "" {
		return "unknown"
	}
	var b strings.Builder
	count := 0
	for _, r := range value {
		if count++; count > maxShown {
			b.WriteString("...")
			break
		}
		if !unicode.IsPrint(r) {
			r = unicode.ReplacementChar
		}
		b.WriteRune(r)
	}
	return b.String()
}

type template struct {
	pieces []string // text and placeholder in turns, text first and last
}

var placeholder = regexp.MustCompile(`\{[a-z][a-z0-9_.]*\}`)

// parseTemplate refuses placeholders that are not allowed, and braces that are none: a misspelled one would be shown to people.
func parseTemplate(text string, allowed []string) (template, error) {
	var t template
	last := 0
	for _, at := range placeholder.FindAllStringIndex(text, -1) {
		name := text[at[0]+1 : at[1]-1]
		if !slices.Contains(allowed, name) {
			return template{}, fmt.Errorf("unknown placeholder {%s}: there are %s", name, strings.Join(allowed, ", "))
		}
		t.pieces = append(t.pieces, text[last:at[0]], name)
		last = at[1]
	}
	t.pieces = append(t.pieces, text[last:])
	for i := 0; i < len(t.pieces); i += 2 {
		if strings.ContainsAny(t.pieces[i], "{}") {
			return template{}, fmt.Errorf("a brace that is no placeholder, in %q", t.pieces[i])
		}
	}
	return t, nil
}

func (t template) fill(value func(name string) string) string {
	var b strings.Builder
	for i, piece := range t.pieces {
		if i%2 == 1 {
			piece = shown(value(piece))
		}
		b.WriteString(piece)
	}
	return b.String()
}

// Bounds of a regular expression. RE2 takes time and memory in proportion to the program; a short expression can make a large one ("(a{1000}){1000}").
const (
	maxPattern     = 500
	maxPatternSize = 10000
)

// pattern is a regular expression; absent, or wrong, it is nil.
type pattern struct{ *regexp.Regexp }

func (p *pattern) Decode(v tomlfile.Value) {
	if v.Raw == nil {
		return
	}
	var err error
	if p.Regexp, err = compilePattern(v.Text("text")); err != nil {
		v.Wrong("%v", err)
	}
}

func compilePattern(text string) (*regexp.Regexp, error) {
	if len(text) > maxPattern {
		return nil, fmt.Errorf("a regular expression of more than %d bytes", maxPattern)
	}
	parsed, err := syntax.Parse(text, syntax.Perl)
	if err != nil {
		return nil, fmt.Errorf("regular expression: %w", err)
	}
	if patternSize(parsed) > maxPatternSize {
		return nil, fmt.Errorf("a regular expression that repeats too much")
	}
	return regexp.Compile(text)
}

// patternSize estimates how large the compiled expression is, in instructions, up to a little above the bound.
func patternSize(re *syntax.Regexp) int {
	size := 1 + len(re.Rune)
	for _, sub := range re.Sub {
		if size += patternSize(sub); size > maxPatternSize {
			return maxPatternSize + 1
		}
	}
	if re.Op == syntax.OpRepeat {
		size *= max(re.Min, re.Max, 1)
	}
	return min(size, maxPatternSize+1)
}
