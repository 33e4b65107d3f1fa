package rules

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/epcached/epcached/internal/tomlfile"
)

// Facts is what is known of one side: of a build, or of a runtime on this machine. Empty fields are unknown.
type Facts struct {
	EP                   string // canonical name, e.g. "QNNExecutionProvider"; the same on both sides
	EPVersion            string // the EP's own metadata; not always telling
	LibraryDigest        string
	SDKVersion           string // attribute ep_sdk_version
	HardwareArchitecture string
	CompatibilityString  string // metadata ep_compatibility_info.<EP>
	DriverVersion        string
	ORTVersion           string
	IRVersion            int64 // of the build's graph; runtimes have none
}

// maxFact bounds a fact: what is longer does not count as known. Real compatibility strings have a few hundred bytes.
const maxFact = 64 << 10

const compatibilityString = "compatibility_string" // the fact that most others are taken out of

func (f Facts) given() map[string]string {
	m := map[string]string{
		"ep_version": f.EPVersion, "library_digest": f.LibraryDigest, "sdk_version": f.SDKVersion,
		"hardware_architecture": f.HardwareArchitecture, compatibilityString: f.CompatibilityString,
		"driver_version": f.DriverVersion, "ort_version": f.ORTVersion, "ir_version": "",
	}
	if f.IRVersion > 0 {
		m["ir_version"] = strconv.FormatInt(f.IRVersion, 10)
	}
	for name, value := range m {
		if len(value) > maxFact {
			m[name] = ""
		}
	}
	return m
}

var givenNames = slices.Sorted(maps.Keys(Facts{}.given()))

type extract struct {
	From   string  `toml:"from" is:"text"`
	JSON   string  `toml:"json" is:"text"` // keys from the outside in; "": the fact is no JSON
	Regexp pattern `toml:"regexp"`         // its named groups are the facts; nil: the whole is one
	As     string  `toml:"as" is:"text"`   // its name, without regexp
}

func (e extract) names() []string {
	if e.Regexp.Regexp == nil {
		return []string{e.As}
	}
	return slices.DeleteFunc(slices.Clone(e.Regexp.SubexpNames()), func(name string) bool { return name == "" })
}

// add puts into facts what is there and not known yet: of several extracts for one fact, the first that finds it counts.
func (e extract) add(facts map[string]string) {
	text := facts[e.From]
	if text == "" {
		return
	}
	if e.JSON != "" {
		if text = jsonValue(text, strings.Split(e.JSON, ".")); text == "" {
			return
		}
	}
	if e.Regexp.Regexp == nil {
		addFact(facts, e.As, text)
		return
	}
	match := e.Regexp.FindStringSubmatch(text)
	if match == nil {
		return
	}
	for i, name := range e.Regexp.SubexpNames() {
		addFact(facts, name, match[i])
	}
}

func addFact(facts map[string]string, name, value string) {
	if name != "" && facts[name] == "" {
		facts[name] = value
	}
}

func jsonValue(text string, keys []string) string {
	raw := json.RawMessage(text)
	for _, key := range keys {
		var object map[string]json.RawMessage
		if json.Unmarshal(raw, &object) != nil {
			return "" // other versions of an EP write other strings
		}
		raw = object[key]
	}
	var value any
	if json.Unmarshal(raw, &value) != nil {
		return ""
	}
	switch v := value.(type) {
	case string:
		return v
	case float64, bool:
		return string(raw)
	}
	return ""
}

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
