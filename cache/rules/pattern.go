package rules

import (
	"fmt"
	"regexp"
	"regexp/syntax"

	"github.com/epcached/epcached/internal/tomlfile"
)

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
