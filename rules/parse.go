package rules

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/tomlfile"
)

// maxRules bounds the rules and reports of a set.
const maxRules = 1000

// maxFiles bounds the files of one Load.
const maxFiles = 100

// Parse reads one file of rules. Its name is for errors and judgements. The error is a tomlfile.Errors where the content is what is wrong.
func Parse(name string, text []byte) (*Set, error) {
	root, err := readDocument(name, text)
	if err != nil {
		return nil, err
	}
	set := &Set{eps: map[string]provider{}, sum: sha256.Sum256(append([]byte(name+"\x00"), text...))}
	eps := root.table("ep")
	root.done()
	for _, ep := range eps.keys() {
		if !printable(ep) {
			eps.wrong(eps.at(ep), "not the name of an EP")
		}
		set.eps[ep] = readProvider(name, ep, eps.table(ep))
	}
	if set.size() > maxRules {
		root.Add(&tomlfile.Error{File: name, Text: fmt.Sprintf("more than %d rules and reports", maxRules)})
	}
	if err := root.Err(); err != nil {
		return nil, err
	}
	return set, nil
}

// Load reads files, and the *.toml of folders in the order of their names. What comes first counts first. The error tells of every file that is wrong.
func Load(paths ...string) (*Set, error) {
	files, err := listFiles(paths)
	if err != nil {
		return nil, err
	}
	set := &Set{eps: map[string]provider{}}
	var wrong []error
	for _, file := range files {
		next, err := readFile(file)
		if err != nil {
			wrong = append(wrong, err)
			continue
		}
		set.append(next)
	}
	if set.size() > maxRules {
		wrong = append(wrong, fmt.Errorf("rules: more than %d rules and reports in %d files", maxRules, len(files)))
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
		for _, e := range entries { // editors leave hidden files beside those they change
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
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() { // to open a pipe would wait for somebody to write
		return nil, fmt.Errorf("rules: %q is not a regular file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("rules: %w", err)
	}
	defer f.Close() // read only: nothing can be lost
	text, err := io.ReadAll(io.LimitReader(f, tomlfile.MaxSize+1))
	if err != nil {
		return nil, fmt.Errorf("rules: %w", err)
	}
	return Parse(path, text)
}

// append puts another file's sections behind those that are there. The set is not yet anybody's.
func (s *Set) append(next *Set) {
	s.sum = joined(s.sum, next.sum, "append")
	for ep, p := range next.eps {
		above := s.eps[ep]
		s.eps[ep] = provider{replace: above.replace || p.replace, parts: slices.Concat(above.parts, p.parts)}
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

func readProvider(file, ep string, t *table) provider {
	p := provider{replace: t.flag("replace")}
	part := section{file: file}
	facts := slices.Clone(givenNames)
	for _, e := range t.tables("extract") {
		part.extracts = append(part.extracts, readExtract(e, &facts))
	}
	names := map[string]bool{}
	for _, r := range t.tables("rule") {
		part.rules = append(part.rules, readRule(r, facts, names))
	}
	clear(names)
	for _, r := range t.tables("report") {
		part.reports = append(part.reports, readReport(r, names))
	}
	t.done()
	p.parts = []section{part}
	return p
}

// readExtract adds the names of what it finds to facts.
func readExtract(t *table, facts *[]string) extract {
	e := extract{from: t.text("from"), as: t.text("as")}
	if e.from == "" {
		e.from = compatibilityString
	}
	if keys := t.text("json"); keys != "" {
		e.json = strings.Split(keys, ".")
	}
	e.regexp = t.pattern("regexp")
	t.done()
	if !slices.Contains(*facts, e.from) {
		t.wrong(t.at("from"), "unknown fact %q: there are %s", e.from, strings.Join(*facts, ", "))
	}
	_, hasPattern := t.values["regexp"]
	switch {
	case hasPattern == (e.as != ""):
		t.wrong(t.path, "either regexp, with named groups, or as is wanted")
	case e.regexp == nil && e.as == "":
		return e // a regexp that does not compile was told of
	case len(e.names()) == 0:
		t.wrong(t.at("regexp"), "no named group")
	}
	for _, name := range e.names() {
		switch {
		case !factName(name):
			t.wrong(t.path, "%q is no name for a fact: lower-case letters, digits and _", name)
		case slices.Contains(givenNames, name):
			t.wrong(t.path, "the fact %q is there already", name)
		case !slices.Contains(*facts, name):
			*facts = append(*facts, name)
		}
	}
	return e
}

func factName(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool { return r != '_' && (r < 'a' || r > 'z') && (r < '0' || r > '9') })
}

func readRule(t *table, facts []string, names map[string]bool) rule {
	r := rule{name: t.name(names)}
	when := t.table("when")
	for _, fact := range when.keys() {
		if !slices.Contains(facts, fact) {
			when.wrong(when.at(fact), "unknown fact: there are %s", strings.Join(facts, ", "))
			continue
		}
		r.conditions = append(r.conditions, readConditions(when, fact)...)
	}
	r.verdict = t.verdict()
	allowed := []string{"ep", "rule"}
	for _, fact := range facts {
		allowed = append(allowed, buildSide+"."+fact, runtimeSide+"."+fact)
	}
	r.reason = t.template("reason", true, allowed)
	t.done()
	return r
}

// name reads the name of a rule; people read it in judgements, so it names one.
func (t *table) name(taken map[string]bool) string {
	name := t.required("name")
	switch {
	case name == "":
	case !printable(name):
		t.wrong(t.at("name"), "at most 100 printable characters are wanted")
	case taken[name]:
		t.wrong(t.at("name"), "another rule has the name %q", name)
	}
	taken[name] = true
	return name
}

func printable(name string) bool {
	return name != "" && len(name) <= 100 && !strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

func (t *table) verdict() compilers.Verdict {
	text := t.required("verdict")
	var names []string
	for v := compilers.Unknown; v <= compilers.Unsupported; v++ {
		if v.String() == text {
			return v
		}
		names = append(names, v.String())
	}
	if text != "" {
		t.wrong(t.at("verdict"), "unknown verdict %q: there are %s", text, strings.Join(names, ", "))
	}
	return compilers.Unknown
}

func (t *table) template(key string, required bool, allowed []string) template {
	text := ""
	if required {
		text = t.required(key)
	} else {
		text = t.text(key)
	}
	parsed, err := parseTemplate(text, allowed)
	if err != nil {
		t.wrong(t.at(key), "%v", err)
	}
	return parsed
}

func readReport(t *table, names map[string]bool) report {
	r := report{name: t.name(names)}
	paths, codes := t.list("code")
	for i, v := range codes {
		if code, ok := t.code(paths[i], v); ok {
			r.codes = append(r.codes, code)
		}
	}
	r.text = t.pattern("text")
	r.class = t.required("class")
	if r.class != "" && !slices.Contains([]string{Stale, NotStale, Unclear}, r.class) {
		t.wrong(t.at("class"), "unknown class %q: there are %s, %s, %s", r.class, Stale, NotStale, Unclear)
	}
	allowed := []string{"code", "ep"}
	r.reason = t.template("reason", true, allowed)
	r.hint = t.template("hint", false, allowed)
	t.done()
	return r
}

// code reads 10, "INVALID_GRAPH" or "10 INVALID_GRAPH"; -1 is a crash.
func (t *table) code(path []string, v any) (int, bool) {
	switch v := v.(type) {
	case int64:
		if v >= -1 && v < 1000 {
			return int(v), true
		}
		t.wrong(path, "%d is no error code", v)
	case string:
		if code, ok := codeByName(v); ok {
			return code, true
		}
		t.wrong(path, "unknown error code %q: there are %s", shown(v), codeList())
	default:
		t.wrong(path, "%s, where an error code is wanted", tomlfile.Kind(v))
	}
	return 0, false
}
