// Package rules holds judgements as data: which builds suit which runtimes if no better source
// decides it, and what ONNX Runtime's error codes mean for each execution provider (EP).
//
// [Shipped] has epcached's own rules for the vendors' EPs; [Load] reads an administrator's TOML
// files, and [Set.Overriding] puts them in front. [Set.Judge] compares the facts of a build with
// those of a runtime's probe; [Set.Classify] whether a reported error means a stale build.
// doc/rules.md has the format, shipped/ the sources of facts.
//
//   - A Set is immutable and safe for concurrent use. The nil Set judges every pair as unknown.
//   - Parse and Load return a whole Set or an error that names file, line, column, field and reason
//     of all mistakes. They never panic, and bound sizes: files, rules, regular expressions.
//   - An unknown fact or invalid version never makes a condition hold, and the reason says so.
//
// Start reading at [Set.Judge]; condition.go has the conditions of rules.
package rules

import (
	"crypto/sha256"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/tomlfile"
)

// anyEP is the name of the rules for all EPs. They apply after the rules for the EP itself.
const anyEP = "*"

// Set is a collection of rules for EPs.
type Set struct {
	eps map[string]provider
	sum [sha256.Size]byte // of its files, in order
}

// Equal reports whether the sets were combined from files of the same names and texts in the same
// way.
func (s *Set) Equal(o *Set) bool {
	if s == nil || o == nil {
		return s == o
	}
	return s.sum == o.sum
}

func joined(a, b [sha256.Size]byte, how string) [sha256.Size]byte {
	return sha256.Sum256(slices.Concat([]byte(how), a[:], b[:]))
}

type provider struct {
	replace bool      // rules of other sets for this EP are dropped
	parts   []section // earlier ones take precedence
}

// section has the rules of one file for one EP. Its extracts apply to its own rules only, so that
// files do not depend on each other.
type section struct {
	file     string
	extracts []extract
	rules    []rule
	reports  []report
}

type rule struct {
	name       string
	conditions []condition
	verdict    compilers.Verdict
	reason     template
}

// Judgement is the verdict of a rule on a build and a runtime.
type Judgement struct {
	Verdict compilers.Verdict
	Rule    string // its name; empty if no rule fits, with the verdict compilers.Unknown
	File    string // that contains the rule
	Reason  string // never empty
}

// Overriding returns a set in which s takes precedence over base: its rules come first, and if it
// has replace set for an EP, it drops base's rules for that EP.
func (s *Set) Overriding(base *Set) *Set {
	merged, sum := map[string]provider{}, [sha256.Size]byte{}
	if base != nil {
		maps.Copy(merged, base.eps)
		sum = base.sum
	}
	if s != nil {
		sum = joined(s.sum, sum, "over")
		for ep, p := range s.eps {
			if !p.replace {
				below := merged[ep]
				p = provider{replace: below.replace, parts: slices.Concat(p.parts, below.parts)}
			}
			merged[ep] = p
		}
	}
	return &Set{eps: merged, sum: sum}
}

// EPs lists the EPs with rules in the set, sorted; "*" stands for all.
func (s *Set) EPs() []string {
	if s == nil {
		return nil
	}
	return slices.Sorted(maps.Keys(s.eps))
}

func (s *Set) sections(ep string) []section {
	if s == nil {
		return nil
	}
	if ep == anyEP {
		return s.eps[anyEP].parts
	}
	return slices.Concat(s.eps[ep].parts, s.eps[anyEP].parts)
}

// Judge reports how a build suits a runtime. The first rule with all conditions true decides; if
// there is none, the verdict is unknown, and the reason names the conditions that failed.
func (s *Set) Judge(build, runtime Facts) Judgement {
	if build.EP != runtime.EP {
		return Judgement{Reason: fmt.Sprintf("the build was compiled by %s, and the runtime's "+
			"facts are those of %s", abbreviated(build.EP), abbreviated(runtime.EP))}
	}
	var missed []string
	for _, part := range s.sections(build.EP) {
		b, r := part.facts(build), part.facts(runtime)
		for _, rule := range part.rules {
			if whyNot := rule.misses(b, r); whyNot != "" {
				missed = append(missed, rule.name+": "+whyNot)
				continue
			}
			return Judgement{Verdict: rule.verdict, Rule: rule.name, File: part.file,
				Reason: rule.explain(build.EP, b, r)}
		}
	}
	return Judgement{Reason: noRule(build.EP, missed)}
}

// facts returns f with the facts that the extracts find, nil if the section has no rules.
func (p section) facts(f Facts) map[string]string {
	if len(p.rules) == 0 {
		return nil
	}
	facts := f.given()
	for _, e := range p.extracts {
		e.add(facts)
	}
	return facts
}

func (r rule) misses(build, runtime map[string]string) string {
	for _, c := range r.conditions {
		if whyNot := c.check(build[c.fact], runtime[c.fact]); whyNot != "" {
			return c.fact + " " + whyNot
		}
	}
	return ""
}

func (r rule) explain(ep string, build, runtime map[string]string) string {
	return r.reason.fill(func(name string) string {
		switch side, fact, _ := strings.Cut(name, "."); {
		case side == buildSide:
			return build[fact]
		case side == runtimeSide:
			return runtime[fact]
		case name == "rule":
			return r.name
		}
		return ep
	})
}

const maxMissed = 12

func noRule(ep string, missed []string) string {
	if len(missed) == 0 {
		return "there is no rule for " + abbreviated(ep)
	}
	more := ""
	if len(missed) > maxMissed {
		more = fmt.Sprintf("; and %d more", len(missed)-maxMissed)
		missed = missed[:maxMissed]
	}
	return "no rule for " + abbreviated(ep) + " fits: " + strings.Join(missed, "; ") + more
}

//go:embed shipped/*.toml
var shippedFiles embed.FS

// Shipped returns the rules that are part of the program.
var Shipped = sync.OnceValue(func() *Set {
	set, err := readShipped()
	if err != nil {
		panic(err) // our own mistake, which tests find
	}
	return set
})

func readShipped() (*Set, error) {
	names, err := fs.Glob(shippedFiles, "shipped/*")
	if err != nil {
		return nil, err
	}
	return readFiles(names, func(name string) (*Set, error) {
		text, err := shippedFiles.ReadFile(name)
		if err != nil {
			return nil, err
		}
		return Parse(name, text)
	})
}

// The classes of reports.
const (
	// the build does not suit the runtime, or is damaged: check and recompile
	Stale    = "stale"
	NotStale = "not stale" // the cause is elsewhere: the application's options, files or session
	Unclear  = "unclear"   // only a check can decide
)

type report struct {
	name   string
	codes  []int          // nil: every code
	text   *regexp.Regexp // nil: every text
	class  string
	reason template
	hint   template
}

// Class is the classification of an error of ONNX Runtime.
type Class struct {
	Name     string // Stale, NotStale or Unclear
	Rule     string // the rule that decided; empty if none did, with the class Unclear
	File     string // that contains it
	Reason   string // shown to users; never empty
	Hint     string // shown to users; may be empty
	CodeName string // as CodeName gives it
}

// maxText bounds the part of a message that is searched. Vendors' messages are shorter, but a
// client may send any text.
const maxText = 64 << 10

// Classify returns what an error code and its text mean when a session with a build of the EP could
// not be made. A negative code means a crash.
func (s *Set) Classify(ep string, code int, text string) Class {
	name := compilers.CodeName(code)
	if len(text) > maxText {
		text = text[:maxText]
	}
	for _, part := range s.sections(ep) {
		for _, r := range part.reports {
			if r.codes != nil && !slices.Contains(r.codes, code) || r.text != nil &&
				!r.text.MatchString(text) {
				continue
			}
			fill := func(placeholder string) string {
				if placeholder == "code" {
					return name
				}
				return ep
			}
			return Class{Name: r.class, Rule: r.name, File: part.file, Reason: r.reason.fill(fill),
				Hint: r.hint.fill(fill), CodeName: name}
		}
	}
	return Class{Name: Unclear, CodeName: name, Reason: fmt.Sprintf("unknown: %s of "+
		"%s", name, abbreviated(ep))}
}

func codeByName(text string) (int, bool) {
	for code, name := range compilers.CodeNames {
		if text == name || text == compilers.CodeName(code) {
			return code, true
		}
	}
	return 0, false
}

// Facts are the known facts about a build, or about a runtime on this machine. Empty fields are
// unknown.
type Facts struct {
	// EP is the canonical name, for example "QNNExecutionProvider"; the same on both sides.
	EP                   string
	EPVersion            string // from the EP's metadata; not always informative
	LibraryDigest        string
	SDKVersion           string // attribute ep_sdk_version
	HardwareArchitecture string
	CompatibilityString  string // metadata ep_compatibility_info.<EP>
	DriverVersion        string
	ORTVersion           string
	IRVersion            int64 // of the build's graph; runtimes have none
}

// maxFact bounds facts: longer ones are unknown. Compatibility strings have a few hundred bytes.
const maxFact = 64 << 10

const compatibilityString = "compatibility_string" // the fact that most others are extracted from

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
	From string `toml:"from" is:"text"`
	JSON string `toml:"json" is:"text"` // keys from the outside in; "": the fact is no JSON
	// its named groups are the facts; nil: the whole text is one
	Regexp pattern `toml:"regexp"`
	As     string  `toml:"as" is:"text"` // name of the fact if there is no regexp
}

func (e extract) names() []string {
	if e.Regexp.Regexp == nil {
		return []string{e.As}
	}
	return slices.DeleteFunc(slices.Clone(e.Regexp.SubexpNames()), func(name string) bool {
		return name == ""
	})
}

// add adds the extracted facts that are not in facts yet, so that the first of several extracts for
// one fact takes precedence.
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
			return "" // no error: other versions of an EP write other strings
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

func abbreviated(value string) string {
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
	pieces []string // text and placeholder alternately, text first and last
}

var placeholder = regexp.MustCompile(`\{[a-z][a-z0-9_.]*\}`)

// parseTemplate parses a text with placeholders. It refuses unknown placeholders and single braces,
// because a misspelled one would be shown to users.
func parseTemplate(text string, allowed []string) (template, error) {
	var t template
	last := 0
	for _, at := range placeholder.FindAllStringIndex(text, -1) {
		name := text[at[0]+1 : at[1]-1]
		if !slices.Contains(allowed, name) {
			return template{}, fmt.Errorf("unknown placeholder {%s}: the placeholders are "+
				"%s", name, strings.Join(allowed, ", "))
		}
		t.pieces = append(t.pieces, text[last:at[0]], name)
		last = at[1]
	}
	t.pieces = append(t.pieces, text[last:])
	for i := 0; i < len(t.pieces); i += 2 {
		if strings.ContainsAny(t.pieces[i], "{}") {
			return template{}, fmt.Errorf("a brace without a placeholder, in %q", t.pieces[i])
		}
	}
	return t, nil
}

func (t template) fill(value func(name string) string) string {
	var b strings.Builder
	for i, piece := range t.pieces {
		if i%2 == 1 {
			piece = abbreviated(value(piece))
		}
		b.WriteString(piece)
	}
	return b.String()
}

// Bounds of a regular expression. RE2 takes time and memory in proportion to the compiled program,
// and a short expression such as "(a{1000}){1000}" may compile to a large one.
const (
	maxPattern     = 500
	maxPatternSize = 10000
)

// pattern is a regular expression; it is nil if absent or invalid.
type pattern struct{ *regexp.Regexp }

func (p *pattern) Decode(v tomlfile.Value) {
	if v.Raw == nil {
		return
	}
	var err error
	if p.Regexp, err = compilePattern(v.Text("text")); err != nil {
		v.Errorf("%v", err)
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

// patternSize estimates how large the compiled expression is, in instructions, up to a little above
// the bound.
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
