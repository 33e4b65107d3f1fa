package rules

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/internal/tomlfile"
)

const maxRules = 1000

const maxFiles = 100

// Parse reads one file of rules. The name is for error messages. Invalid content is a
// tomlfile.Errors.
func Parse(name string, text []byte) (*Set, error) {
	d, err := tomlfile.Parse(name, text)
	if err != nil {
		return nil, err
	}
	d.Checks = map[string]func(string) error{"text": checkText}
	var file struct {
		EPs map[string]providerFile `toml:"ep" is:"text"`
	}
	root := d.Root()
	root.Into(&file)
	set := &Set{eps: map[string]provider{},
		sum: sha256.Sum256(append([]byte(name+"\x00"), text...))}
	for ep, p := range file.EPs {
		at := root.In("ep", ep)
		if !printable(ep) {
			at.Errorf("not the name of an EP")
		}
		set.eps[ep] = provider{replace: p.Replace, parts: []section{p.section(at)}}
	}
	if set.size() > maxRules {
		d.Add(&tomlfile.Error{File: name,
			Text: fmt.Sprintf("more than %d rules and reports", maxRules)})
	}
	if err := d.Err(); err != nil {
		return nil, err
	}
	return set, nil
}

// Load reads files, and the *.toml files of directories in the order of their names. Earlier rules
// take precedence. The error lists all invalid files.
func Load(paths ...string) (*Set, error) {
	files, err := listFiles(paths)
	if err != nil {
		return nil, err
	}
	return readFiles(files, readFile)
}

func readFiles(files []string, read func(string) (*Set, error)) (*Set, error) {
	set := &Set{eps: map[string]provider{}}
	var wrong []error
	for _, file := range files {
		next, err := read(file)
		if err != nil {
			wrong = append(wrong, err)
			continue
		}
		set.append(next)
	}
	if set.size() > maxRules {
		wrong = append(wrong, fmt.Errorf("rules: more than %d rules and reports in %d files",
			maxRules, len(files)))
	}
	if err := errors.Join(wrong...); err != nil {
		return nil, err
	}
	return set, nil
}

func listFiles(paths []string) ([]string, error) {
	var files []string
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("rules: %w", err)
		}
		if !info.IsDir() {
			files = append(files, path)
			continue
		}
		entries, err := os.ReadDir(path)
		if err != nil {
			return nil, fmt.Errorf("rules: %w", err)
		}
		// skip hidden files, which editors leave beside files they change
		for _, e := range entries {
			if name := e.Name(); filepath.Ext(name) == ".toml" && !strings.HasPrefix(name, ".") {
				files = append(files, filepath.Join(path, name))
			}
		}
	}
	if len(files) > maxFiles {
		return nil, fmt.Errorf("rules: %d files: at most %d are read", len(files), maxFiles)
	}
	return files, nil
}

func readFile(path string) (*Set, error) {
	// opening a pipe would block
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("rules: %q is not a regular file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("rules: %w", err)
	}
	defer f.Close() // opened for reading, so no data can be lost
	text, err := io.ReadAll(io.LimitReader(f, tomlfile.MaxSize+1))
	if err != nil {
		return nil, fmt.Errorf("rules: %w", err)
	}
	return Parse(path, text)
}

// append adds another file's sections after the existing ones. It changes s, so call it only before
// the set is shared.
func (s *Set) append(next *Set) {
	s.sum = joined(s.sum, next.sum, "append")
	for ep, p := range next.eps {
		above := s.eps[ep]
		s.eps[ep] = provider{replace: above.replace ||
			p.replace, parts: slices.Concat(above.parts, p.parts)}
	}
}

func (s *Set) size() int {
	n := 0
	for _, p := range s.eps {
		for _, part := range p.parts {
			n += len(part.rules) + len(part.reports)
		}
	}
	return n
}

type providerFile struct {
	Replace  bool      `toml:"replace"`
	Extracts []extract `toml:"extract"`
	Rules    []struct {
		Name    string                `toml:"name" is:"text" required:"name is missing"`
		When    map[string]conditions `toml:"when"`
		Verdict verdict               `toml:"verdict" required:"verdict is missing"`
		Reason  string                `toml:"reason" is:"text" required:"reason is missing"`
	} `toml:"rule"`
	Reports []struct {
		Name   string  `toml:"name" is:"text" required:"name is missing"`
		Codes  codes   `toml:"code"`
		Text   pattern `toml:"text"`
		Class  string  `toml:"class" in:"stale,not stale,unclear" required:"class is missing"`
		Reason string  `toml:"reason" is:"text" required:"reason is missing"`
		Hint   string  `toml:"hint" is:"text"`
	} `toml:"report"`
}

const maxString = 2000

func checkText(text string) error {
	switch {
	case text == "":
		return errors.New("empty")
	case len(text) > maxString:
		return fmt.Errorf("longer than %d bytes", maxString)
	}
	return nil
}

func (p *providerFile) section(v tomlfile.Value) section {
	part := section{file: v.File, extracts: p.Extracts}
	facts := slices.Clone(givenNames)
	for i := range p.Extracts {
		p.Extracts[i].check(element(v.In("extract"), i), &facts)
	}
	names := map[string]bool{}
	for i, r := range p.Rules {
		at := element(v.In("rule"), i)
		checkName(at, r.Name, names)
		one := rule{name: r.Name, verdict: compilers.Verdict(r.Verdict)}
		for _, fact := range slices.Sorted(maps.Keys(r.When)) {
			if !slices.Contains(facts, fact) {
				at.In("when", fact).Errorf("unknown fact: the facts are "+
					"%s", strings.Join(facts, ", "))
			}
			for _, c := range r.When[fact] {
				one.conditions = append(one.conditions, condition{fact: fact, check: c})
			}
		}
		allowed := []string{"ep", "rule"}
		for _, fact := range facts {
			allowed = append(allowed, buildSide+"."+fact, runtimeSide+"."+fact)
		}
		one.reason = readTemplate(at.In("reason"), r.Reason, allowed)
		part.rules = append(part.rules, one)
	}
	clear(names)
	for i, r := range p.Reports {
		at := element(v.In("report"), i)
		checkName(at, r.Name, names)
		allowed := []string{"code", "ep"}
		part.reports = append(part.reports, report{
			name: r.Name, codes: r.Codes, text: r.Text.Regexp, class: r.Class,
			reason: readTemplate(at.In("reason"), r.Reason, allowed),
			hint:   readTemplate(at.In("hint"), r.Hint, allowed),
		})
	}
	return part
}

func element(v tomlfile.Value, i int) tomlfile.Value { return v.In(strconv.Itoa(i)) }

func readTemplate(v tomlfile.Value, text string, allowed []string) template {
	parsed, err := parseTemplate(text, allowed)
	if err != nil {
		v.Errorf("%v", err)
	}
	return parsed
}

func (e *extract) check(v tomlfile.Value, facts *[]string) {
	e.From = cmp.Or(e.From, compatibilityString)
	if !slices.Contains(*facts, e.From) {
		v.In("from").Errorf("unknown fact %q: the facts are %s", e.From, strings.Join(*facts, ", "))
	}
	switch {
	case v.Has("regexp") == (e.As != ""):
		v.Errorf("give either regexp, with named groups, or as")
	case e.Regexp.Regexp == nil && e.As == "":
		return // a regexp that does not compile was reported
	case len(e.names()) == 0:
		v.In("regexp").Errorf("no named group")
	}
	for _, name := range e.names() {
		switch {
		case !factName(name):
			v.Errorf("%q is not a name for a fact: use lower-case letters, digits and _", name)
		case slices.Contains(givenNames, name):
			v.Errorf("the fact %q exists already", name)
		case !slices.Contains(*facts, name):
			*facts = append(*facts, name)
		}
	}
}

func factName(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool {
		return r != '_' && (r < 'a' || r > 'z') && (r < '0' || r > '9')
	})
}

// checkName checks that a rule's name is unique and readable, because judgements show it.
func checkName(rule tomlfile.Value, name string, taken map[string]bool) {
	switch {
	case name == "": // already reported
	case !printable(name):
		rule.In("name").Errorf("at most 100 printable characters are allowed")
	case taken[name]:
		rule.In("name").Errorf("another rule has the name %q", name)
	}
	taken[name] = true
}

func printable(name string) bool {
	return name != "" && len(name) <= 100 &&
		!strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

type verdict compilers.Verdict

func (v *verdict) Decode(at tomlfile.Value) {
	if at.Raw == nil {
		return
	}
	text := at.Text("text")
	var names []string
	for one := compilers.Unknown; one <= compilers.Unsupported; one++ {
		if one.String() == text {
			*v = verdict(one)
			return
		}
		names = append(names, one.String())
	}
	if text != "" {
		at.Errorf("unknown verdict %q: the verdicts are %s", text, strings.Join(names, ", "))
	}
}

// codes are 10, "INVALID_GRAPH" or "10 INVALID_GRAPH", or an array of such; -1 is a crash.
type codes []int

func (c *codes) Decode(v tomlfile.Value) {
	for _, one := range several(v) {
		switch raw := one.Raw.(type) {
		case int64:
			if raw < -1 || raw >= 1000 {
				one.Errorf("%d is not an error code", raw)
			}
			*c = append(*c, int(raw))
		case string:
			code, ok := codeByName(raw)
			if !ok {
				one.Errorf("unknown error code %q: the codes are %s", abbreviated(raw),
					strings.Join(compilers.CodeNames, ", "))
			}
			*c = append(*c, code)
		default:
			one.Errorf("%s, where an error code is required", tomlfile.Kind(raw))
		}
	}
}

// several returns the elements of an array, or the value itself if it is not an array.
func several(v tomlfile.Value) []tomlfile.Value {
	if _, ok := v.Raw.([]any); !ok && v.Raw != nil {
		return []tomlfile.Value{v}
	}
	all := v.Elements()
	if len(all) == 0 && v.Raw != nil {
		v.Errorf("empty")
	}
	return all
}
