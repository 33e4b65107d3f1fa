package epcached

import (
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
)

// page is a Markdown file as its readers see it: where its links go, and to which places in it one
// can link.
type page struct {
	links   []string
	anchors map[string]bool
}

var (
	fence   = regexp.MustCompile("^ {0,3}(```|~~~)")
	heading = regexp.MustCompile(`^ {0,3}#{1,6}\s+(.*?)\s*#*$`)
	code    = regexp.MustCompile("`+[^`]*`+")
	link    = regexp.MustCompile(`\]\(\s*<?([^)\s>]*)>?(?:\s+"[^"]*")?\s*\)`)
)

func readPage(text string) page {
	p := page{anchors: make(map[string]bool)}
	fenced := false
	for _, line := range strings.Split(text, "\n") {
		switch {
		case fence.MatchString(line):
			fenced = !fenced
		case fenced || strings.HasPrefix(line, "    "):
		default:
			if h := heading.FindStringSubmatch(line); h != nil {
				p.anchors[p.free(anchor(h[1]))] = true
			}
			for _, l := range link.FindAllStringSubmatch(code.ReplaceAllString(line, "`"), -1) {
				p.links = append(p.links, l[1])
			}
		}
	}
	return p
}

// anchor is what a heading is called in links, as GitHub makes it.
func anchor(heading string) string {
	heading = link.ReplaceAllString(heading, "]")
	var b strings.Builder
	for _, r := range strings.ToLower(heading) {
		switch {
		case r == ' ':
			b.WriteByte('-')
		case unicode.IsLetter(r) || unicode.IsDigit(r) || r == '-' || r == '_':
			b.WriteRune(r)
		}
	}
	return b.String()
}

// free numbers headings that are called alike.
func (p page) free(name string) string {
	for i, one := 0, name; ; {
		if !p.anchors[one] {
			return one
		}
		i++
		one = fmt.Sprintf("%s-%d", name, i)
	}
}

// pages reads all Markdown files of the tree. Fetched and built files are in directories that are
// left out.
func pages(t *testing.T) map[string]page {
	found := make(map[string]page)
	err := fs.WalkDir(os.DirFS("."), ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != "." && (strings.HasPrefix(d.Name(), ".") || name == "bin" ||
			name == "dist" || name == "report"):
			return fs.SkipDir
		case d.IsDir() || path.Ext(name) != ".md":
			return nil
		}
		text, err := os.ReadFile(name)
		found[name] = readPage(string(text))
		return err
	})
	require.NoError(t, err)
	return found
}

// broken returns what is wrong with a link of a page, "" if it leads somewhere or out of the
// project, and to which file it leads.
func broken(all map[string]page, from, to string) (file, why string) {
	if u, err := url.Parse(to); err != nil || u.Scheme != "" {
		if err != nil {
			return "", err.Error()
		}
		return "", ""
	}
	target, place, _ := strings.Cut(to, "#")
	file = from
	if target != "" {
		file = path.Join(path.Dir(from), target)
	}
	if _, err := os.Stat(file); err != nil || strings.HasPrefix(file, "../") {
		return file, "there is no such file"
	}
	if p, isPage := all[file]; place != "" && (!isPage || !p.anchors[place]) {
		return file, "there is no such heading"
	}
	return file, ""
}

// TestLinksLeadSomewhere follows every relative link and its anchor.
func TestLinksLeadSomewhere(t *testing.T) {
	all := pages(t)
	for from, p := range all {
		for _, to := range p.links {
			if _, why := broken(all, from, to); why != "" {
				t.Errorf("%s: link to %q: %s", from, to, why)
			}
		}
	}
}

// TestEveryPageIsReachable: README.md leads to each page.
func TestEveryPageIsReachable(t *testing.T) {
	all := pages(t)
	reached := map[string]bool{"README.md": true}
	for next := []string{"README.md"}; len(next) > 0; next = next[1:] {
		for _, to := range all[next[0]].links {
			if file, why := broken(all, next[0], to); why == "" && path.Ext(file) == ".md" &&
				!reached[file] {
				reached[file] = true
				next = append(next, file)
			}
		}
	}
	for name := range all {
		if strings.HasPrefix(name, "doc/") && !reached[name] {
			t.Errorf("%s: no link from README.md leads there, over whichever pages", name)
		}
	}
}

// TestPagesAreReadAsTheyAreShown holds the reader of the two tests above to what counts as a link
// and as a heading.
func TestPagesAreReadAsTheyAreShown(t *testing.T) {
	p := readPage("# `[[driver]]`: where a driver's version is read\n## A b\n## A " +
		"b\n[x](one.md#a), [y](<two.md>) `[z](no.md)`\n    [z](no.md)\n```\n# " +
		"no\n[z](no.md)\n```\n[w](three.md \"title\")")
	require.Equal(t, []string{"one.md#a", "two.md", "three.md"}, p.links)
	require.Equal(t,
		map[string]bool{"driver-where-a-drivers-version-is-read": true, "a-b": true, "a-b-1": true},
		p.anchors)
}

// The overview stays one page, and what it names exists.
func TestArchitectureIsOnePageOfNamesThatExist(t *testing.T) {
	text, err := os.ReadFile("doc/architecture.md")
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	require.LessOrEqual(t, len(lines), 120)
	named := regexp.MustCompile(
		"`((?:[a-z]+/)+[a-z_]+\\.go|(?:cache|cmd|store|dedupe|internal)/[a-z/]*[a-z])`")
	found := 0
	for i, line := range lines {
		require.LessOrEqual(t, len([]rune(line)), 100, "line %d", i+1)
		for _, name := range named.FindAllStringSubmatch(line, -1) {
			_, err := os.Stat(name[1])
			require.NoError(t, err, "line %d", i+1)
			found++
		}
	}
	require.Greater(t, found, 30)
	for _, p := range packages(t, "-deps", "./cmd/...") {
		name, ours := strings.CutPrefix(p.ImportPath, module)
		if !ours || slices.Contains(strings.Split(name, "/"), "internal") {
			continue
		}
		parent := path.Dir(name) // names its packages in its comment, except for the largest ones
		ok := strings.Contains(string(text), "`"+name+"`") ||
			!slices.Contains([]string{"cache", "store", "cmd", "."}, parent) &&
				strings.Contains(string(text), "`"+parent+"`")
		require.True(t, ok, "it does not name package %s", name)
	}
}

// generated is made from docstrings, so it is not counted.
const generated = "doc/python-api.md"

func TestDocumentsAreShort(t *testing.T) {
	names, err := fs.Glob(os.DirFS("."), "doc/*.md")
	require.NoError(t, err)
	total := 0
	for _, name := range names {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		if name != generated {
			total += strings.Count(string(text), "\n")
		}
	}
	require.LessOrEqual(t, total, 3000, "lines of doc/*.md: shorten a page for what is added")
}

// Tables and code blocks may be wider.
func TestPagesAreNarrow(t *testing.T) {
	for name := range pages(t) {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		fenced := false
		for i, line := range strings.Split(string(text), "\n") {
			fenced = fenced != fence.MatchString(line)
			if columns := len([]rune(line)); columns > 100 && !fenced &&
				!strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "    ") {
				t.Errorf("%s:%d: %d columns, at most 100", name, i+1, columns)
			}
		}
	}
}

// The rules for comments hold for prose too.
func TestDocumentsNameTheActor(t *testing.T) {
	for name := range pages(t) {
		if strings.HasPrefix(name, "testdata/") || strings.Contains(name, "/testdata/") {
			continue
		}
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		fenced, prose := false, []string{}
		for _, line := range strings.Split(string(text), "\n") {
			fenced = fenced != fence.MatchString(line)
			if !fenced && !strings.HasPrefix(line, "    ") && !heading.MatchString(line) {
				prose = append(prose, line)
			}
		}
		plain := code.ReplaceAllString(strings.Join(prose, "\n"), "`")
		for _, paragraph := range regexp.MustCompile(`\n\n|\n *(?:[-*|]|\d+\.) `).Split(plain, -1) {
			sentence := strings.Join(strings.Fields(paragraph), " ")
			for _, b := range banned {
				if found := b.pattern.FindString(sentence); found != "" {
					t.Errorf("%s: %q: %s", name, found, b.instead)
				}
			}
		}
	}
}

// Users search for a message as a program printed it.
func TestTroubleshootingHasMessagesOfThePrograms(t *testing.T) {
	others := []string{"EpcacheWarning", "why", "SIGSEGV", "GLIBC_", "Experimental function",
		"can't protect",
		// names and words of the system and ONNX Runtime
		"NO_SPACE", "gc", "check", "prefer_recompilation"}
	var all strings.Builder
	names, err := fs.Glob(os.DirFS("."), "testdata/messages/*.txt")
	require.NoError(t, err)
	for _, name := range names {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		all.Write(text)
	}
	text, err := os.ReadFile("doc/troubleshooting.md")
	require.NoError(t, err)
	found := 0
	for _, line := range strings.Split(string(text), "\n") {
		if cells := strings.Split(line, "|"); len(cells) == 5 {
			for _, message := range regexp.MustCompile("`([^`]+)`").
				FindAllStringSubmatch(cells[1], -1) {
				if found++; !slices.Contains(others, message[1]) {
					require.True(t, strings.Contains(all.String(), message[1]),
						"%q: not a message any more", message[1])
				}
			}
		}
	}
	require.Greater(t, found, 20)
}

var (
	testFunc  = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
	testName  = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w+`)
	testRun   = regexp.MustCompile(`go test (?:-\w+ )*-run '?([^' ]+)'? ([^\x60]*)`)
	benchmark = regexp.MustCompile("`B ([a-z/]+) (\\w+)`")
)

// Documents name tests as evidence: those that were renamed show nothing.
func TestNamesOfTestsInDocumentsExist(t *testing.T) {
	names := make(map[string][]string) // by directory
	all := make(map[string]bool)
	require.NoError(t, fs.WalkDir(os.DirFS("."), ".",
		func(name string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && name != "." && strings.HasPrefix(d.Name(), "."):
				return fs.SkipDir
			case !strings.HasSuffix(name, "_test.go"):
				return nil
			}
			text, err := os.ReadFile(name)
			for _, found := range testFunc.FindAllStringSubmatch(string(text), -1) {
				names[path.Dir(name)] = append(names[path.Dir(name)], found[1])
				all[found[1]] = true
			}
			return err
		}))
	documents, err := fs.Glob(os.DirFS("."), "doc/*.md")
	require.NoError(t, err)
	for _, name := range documents {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		for _, found := range testName.FindAllString(string(text), -1) {
			if !all[found] {
				t.Errorf("%s: %s does not exist", name, found)
			}
		}
		ran := testRun.FindAllStringSubmatch(string(text), -1)
		for _, found := range benchmark.FindAllStringSubmatch(string(text), -1) {
			ran = append(ran, []string{found[0], "Benchmark.*" + found[2], "./" + found[1]})
		}
		for _, found := range ran {
			for _, part := range strings.Split(found[1], `\|`) {
				pattern := regexp.MustCompile(part)
				if part != "-" && !slices.ContainsFunc(strings.Fields(found[2]),
					func(dir string) bool {
						return slices.ContainsFunc(names[path.Clean(dir)], pattern.MatchString)
					}) {
					t.Errorf("%s: %q matches no test in %s", name, part, found[2])
				}
			}
		}
	}
}
