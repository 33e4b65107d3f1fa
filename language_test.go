package epcached

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// banned are habits that readers have to decode, and what to write instead.
var banned = []struct {
	pattern *regexp.Regexp
	instead string
}{
	{regexp.MustCompile(`(?:^|[.!?] )(Who|Whoever|Whose|What|Whatever) [^?]*?[.!]`),
		"name the actor instead of a relative clause as the subject"},
	{regexp.MustCompile(`(?i)\b(nobody|somebody|whoever)\b`), "name the process, user or caller"},
	{regexp.MustCompile(`(?i)\b(anew|once more)\b`), "again"},
	{regexp.MustCompile(`, for (?:it|they|there|who|what|nothing)\b`), "because"},
}

func TestCommentsNameTheActor(t *testing.T) {
	for _, name := range filesOf(t, ".go") {
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, nil, parser.ParseComments)
		require.NoError(t, err)
		if ast.IsGenerated(file) {
			continue
		}
		for _, group := range file.Comments {
			text := strings.Join(strings.Fields(group.Text()), " ")
			for _, b := range banned {
				if found := b.pattern.FindString(text); found != "" {
					t.Errorf("%s: %q: %s", set.Position(group.Pos()), found, b.instead)
				}
			}
		}
	}
}

// filesOf are the repository's files with that extension, without what its targets install.
func filesOf(t *testing.T, extension string) (names []string) {
	require.NoError(t, filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && name != "." && strings.HasPrefix(d.Name(), ".") {
			return fs.SkipDir
		}
		if strings.HasSuffix(name, extension) {
			names = append(names, name)
		}
		return err
	}))
	require.NotEmpty(t, names)
	return names
}

// unsplit matches lines of Go that may be longer: Go has no way to split a struct tag, and a URL in
// two halves can neither be searched for nor opened.
var unsplit = regexp.MustCompile("`[a-z]+:\"[^`]*`$|\"https://[^ ]+\"$")

// Lines have at most 100 columns, but for generated code.
func TestLinesAreNarrow(t *testing.T) {
	for _, name := range filesOf(t, ".go") {
		source, err := os.ReadFile(name)
		require.NoError(t, err)
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, source, parser.ParseComments)
		require.NoError(t, err)
		if ast.IsGenerated(file) {
			continue
		}
		for i, line := range strings.Split(string(source), "\n") {
			columns := utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    "))
			if columns > 100 && !unsplit.MatchString(line) {
				t.Errorf("%s:%d: %d columns, at most 100", name, i+1, columns)
			}
		}
	}
}

// unsplitText matches lines of other files that may be longer: TOML has no way to split a table in
// braces, a pattern or an address in two halves cannot be searched for, and packagers replace the
// line of a unit that starts the program.
var unsplitText = regexp.MustCompile(`= \{|\S{60}|"ov_compat_string"|^ExecStart=`)

// Configuration, rules, scripts, stories and C sources have at most 100 columns, too.
func TestScriptsAndConfigurationAreNarrow(t *testing.T) {
	names := []string{"Makefile", ".ci/run"}
	for _, extension := range []string{".toml", ".txtar", ".proto", ".service", ".socket", ".c",
		".h", ".spec"} {
		names = append(names, filesOf(t, extension)...)
	}
	for _, name := range filesOf(t, "") {
		if !strings.HasPrefix(name, "testdata/") { // bin/ has large files
			continue
		}
		if source, err := os.ReadFile(name); err == nil && bytes.HasPrefix(source, []byte("#!")) {
			names = append(names, name)
		}
	}
	for _, name := range names {
		source, err := os.ReadFile(name)
		require.NoError(t, err)
		for i, line := range strings.Split(string(source), "\n") {
			columns := utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    "))
			if columns > 100 && !unsplitText.MatchString(line) {
				t.Errorf("%s:%d: %d columns, at most 100", name, i+1, columns)
			}
		}
	}
}

// TestMessagesRepeatNoWord finds what a replacement over the sources left behind.
func TestMessagesRepeatNoWord(t *testing.T) {
	twice := regexp.MustCompile(`^[a-z]{2,}$`)
	for _, said := range goMessages(t) {
		for _, m := range said {
			words := strings.Fields(m.said)
			for i := range max(len(words)-1, 0) {
				if words[i] == words[i+1] && twice.MatchString(words[i]) {
					t.Errorf("%s: %q twice in %q", m.pos, words[i], m.said)
				}
			}
		}
	}
}

// A newcomer that searches for a term finds the package that implements it.
func TestPackagesNameTheTermsThatTheyImplement(t *testing.T) {
	for term, dir := range map[string]string{
		"eviction": "store/evict", "single-flight": "cache/jobs", "negative cache": "cache/failure",
		"tombstone": "index", "reservation": "store", "admission": "store", "quarantine": "store",
		"lease": "store/views", "retry": "cache/failure", "fallback": "clients/epcache",
	} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		require.NoError(t, err)
		var comment strings.Builder
		for _, name := range files {
			file, err := parser.ParseFile(token.NewFileSet(), name, nil,
				parser.ParseComments|parser.PackageClauseOnly)
			require.NoError(t, err)
			comment.WriteString(file.Doc.Text())
		}
		text := strings.Join(strings.Fields(comment.String()), " ")
		require.Contains(t, strings.ToLower(text), term, "the comment of package %s", dir)
	}
}

// riddles are beginnings of names that say nothing of the behaviour.
var riddles = regexp.MustCompile(
	`^Test(What|Who|Whoever|Whose|Nothing|Nobody|Somebody|It|That)([A-Z]|$)`)

func TestNamesOfTestsBeginWithTheirSubject(t *testing.T) {
	err := filepath.WalkDir(".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && name != "." && strings.HasPrefix(entry.Name(), ".") {
			return fs.SkipDir
		}
		if !strings.HasSuffix(name, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range file.Decls {
			if fn, is := d.(*ast.FuncDecl); is && riddles.MatchString(fn.Name.Name) {
				t.Errorf("%s: %s: begin with the subject: TestEvictionSkipsLeasedBuilds", name,
					fn.Name.Name)
			}
		}
		return nil
	})
	require.NoError(t, err)
}

// People read the protocol to write clients.
func TestProtocolUsesPlainWords(t *testing.T) {
	for _, name := range []string{"unixsock/wire/epcached.proto", "index/manifest.proto"} {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		var comment []string
		check := func() {
			joined := strings.Join(comment, " ")
			comment = nil
			for _, b := range banned {
				if found := b.pattern.FindString(joined); found != "" {
					t.Errorf("%s: %q: %s", name, found, b.instead)
				}
			}
		}
		for line := range strings.SplitSeq(string(text), "\n") {
			if code, said, is := strings.Cut(line, "// "); is {
				if strings.TrimSpace(code) != "" {
					check()
				}
				comment = append(comment, strings.TrimSpace(said))
				continue
			}
			check()
		}
	}
}

func TestPythonLinesAreNarrow(t *testing.T) {
	for _, name := range filesOf(t, ".py") {
		source, err := os.ReadFile(name)
		require.NoError(t, err)
		for i, line := range strings.Split(string(source), "\n") {
			if columns := utf8.RuneCountInString(line); columns > 100 {
				t.Errorf("%s:%d: %d columns, at most 100", name, i+1, columns)
			}
		}
	}
}
