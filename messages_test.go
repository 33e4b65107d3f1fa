package epcached

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// testdata/messages has the words that users of each program see: errors, hints, help, headings,
// events and log lines. The files are generated, so that a change of words is seen in review.

var updateMessages = flag.Bool("messages.update", false, "write testdata/messages/*.txt")

// text is a string that users see. Parts that are known only when the program runs are "{}".
type text struct {
	pos  token.Position
	kind string // "help", "usage", "log", or ""
	said string
}

// programOf names the golden file of a package.
func programOf(dir string) string {
	for _, of := range []struct{ under, program string }{
		{"cmd/epcachectl", "epcachectl"},
		{"cmd/epcached-ort", "epcached-ort"}, {"compilers/ort", "epcached-ort"},
		{"compilers/conformance", "epcached-ort"},
		{"clients/epcache", "go"},
	} {
		if dir == of.under || strings.HasPrefix(dir, of.under+"/") {
			return of.program
		}
	}
	return "epcached"
}

// silent are packages with strings that no user sees, because only tests use them.
var silent = []string{"cas/crashfs", "clients/conformance", "compilers/compilertest",
	"compilers/standin", "compilers/tinymodel", "dedupe/exact", "index/manifestpb", "unixsock/wire",
	"testdata", "clients/python", "clients/c"}

// goMessages returns the strings that users see, for each package.
func goMessages(t *testing.T) map[string][]text {
	found := make(map[string][]text)
	err := filepath.WalkDir(".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		skipped := slices.ContainsFunc(silent, func(dir string) bool { return name == dir })
		if entry.IsDir() && (skipped || name != "." && strings.HasPrefix(entry.Name(), ".")) {
			return fs.SkipDir
		}
		dir := path.Dir(filepath.ToSlash(name))
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") ||
			strings.HasSuffix(name, ".pb.go") {
			return nil
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Walk(collector{set: set, add: func(m text) { found[dir] = append(found[dir], m) }},
			file)
		return nil
	})
	require.NoError(t, err)
	return found
}

// collector visits a file, and adds each string that users see.
type collector struct {
	set     *token.FileSet
	add     func(text)
	kind    string
	visible bool // a string is shown here, even if it is a single word
}

// messageCalls are functions with first literals that are shown, whatever they are.
var messageCalls = regexp.MustCompile(`^(errors\.New|fmt\.Errorf|exit\.(Usagef|Missing|Hint)|` +
	`.*\.(WithHint|Line|Note|Warning|Hint|Ask)|apierr\.(New|OfContext)|term\.Counted)$`)

// unseen are functions with arguments that are no text for users.
var unseen = regexp.MustCompile(`^(regexp\..*|strings\.(Contains|ContainsAny|HasPrefix|HasSuffix|` +
	`Cut|CutPrefix|CutSuffix|TrimPrefix|TrimSuffix|Trim|TrimLeft|TrimRight|Index|LastIndex|Split|` +
	`SplitN|SplitSeq|Fields|Count|IndexAny|ReplaceAll)|time\.Parse|.*\.Format|exec\..*|panic|` +
	`fmt\.(Sscanf|Sscan)|.*\.Changed|.*\.MarkFlag.*)$`)

var (
	logCalls   = regexp.MustCompile(`(?i)^(.*\blog(ger)?|slog|.*\.log)\.(Debug|Info|Warn|Error)$`)
	flagCalls  = regexp.MustCompile(`^.*\b[fF]lags(\(\))?\.\w+$`)
	proseWords = regexp.MustCompile(`[A-Za-z%{}"')\]][,:;]? ["'(%{A-Za-z]`)
	words      = regexp.MustCompile(`[A-Za-z]{2,}`)
)

func (c collector) Visit(node ast.Node) ast.Visitor {
	inner := c
	inner.visible = false
	switch n := node.(type) {
	case *ast.ImportSpec:
		return nil
	case *ast.Field:
		return nil // neither types nor tags
	case *ast.KeyValueExpr:
		if key, is := n.Key.(*ast.Ident); is {
			switch key.Name {
			case "Short", "Long", "Example", "Use":
				inner.kind, inner.visible = "help", true
				c.string(n.Value, inner)
				return nil
			case "Text", "Hint":
				inner.visible = true
			}
			ast.Walk(inner, n.Value)
			return nil
		}
	case *ast.BasicLit, *ast.BinaryExpr:
		if e := n.(ast.Expr); isText(e) {
			c.string(e, c)
			return nil
		}
	case *ast.CallExpr:
		return c.call(n, inner)
	case *ast.CompositeLit:
		if table, is := n.Type.(*ast.ArrayType); is {
			// [][]string
			if elem, is := table.Elt.(*ast.ArrayType); is && name(elem.Elt) == "string" {
				inner.visible = true
				for _, row := range n.Elts {
					if row, is := row.(*ast.CompositeLit); is {
						for _, cell := range row.Elts {
							ast.Walk(inner, cell)
						}
					}
				}
				return nil
			}
		}
	}
	return inner
}

// call adds what a call shows.
func (c collector) call(n *ast.CallExpr, inner collector) ast.Visitor {
	name := name(n.Fun)
	switch {
	case unseen.MatchString(name):
		return nil
	case logCalls.MatchString(name) && len(n.Args) > 0:
		inner.kind, inner.visible = "log", true
		said := render(n.Args[0])
		var keys []string
		for i := 1; i < len(n.Args); i += 2 {
			keys = append(keys, strings.Trim(render(n.Args[i]), "{}"))
			if i+1 < len(n.Args) {
				ast.Walk(inner, n.Args[i+1])
			}
		}
		if len(keys) > 0 {
			said += " [" + strings.Join(keys, ", ") + "]"
		}
		c.add(text{c.set.Position(n.Pos()), "log", said})
		return nil
	case flagCalls.MatchString(name) && len(n.Args) > 2:
		inner.kind, inner.visible = "usage", true
		ast.Walk(inner, n.Args[len(n.Args)-1])
		return nil
	case messageCalls.MatchString(name):
		ast.Walk(inner, n.Fun)
		for i, arg := range n.Args {
			inner.visible = i < 3
			ast.Walk(inner, arg)
		}
		return nil
	}
	return inner
}

func (c collector) string(e ast.Expr, in collector) {
	said := render(e)
	plain := strings.ReplaceAll(said, "{}", "")
	switch {
	case !words.MatchString(plain):
	case in.visible, proseWords.MatchString(said) && strings.Contains(said, " "):
		c.add(text{c.set.Position(e.Pos()), in.kind, said})
	}
}

// name spells the function of a call, such as "fmt.Errorf" and "(...).WithHint".
func name(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return name(e.X) + "." + e.Sel.Name
	case *ast.CallExpr:
		return name(e.Fun) + "()"
	case *ast.IndexExpr:
		return name(e.X)
	}
	return "(...)"
}

// isText reports whether an expression is a string literal, or joins one to something.
func isText(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.BasicLit:
		return e.Kind == token.STRING
	case *ast.BinaryExpr:
		return e.Op == token.ADD && (isText(e.X) || isText(e.Y))
	case *ast.ParenExpr:
		return isText(e.X)
	}
	return false
}

func render(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if said, err := strconv.Unquote(e.Value); err == nil {
			return said
		}
	case *ast.BinaryExpr:
		if e.Op == token.ADD {
			return render(e.X) + render(e.Y)
		}
	case *ast.ParenExpr:
		return render(e.X)
	}
	return "{}"
}

// golden is the text of a file of testdata/messages.
func golden(packages map[string][]text) string {
	var b strings.Builder
	b.WriteString("Generated by `make messages`: the words that users of this program see.\n")
	for _, dir := range slices.Sorted(maps.Keys(packages)) {
		b.WriteString("\n# " + dir + "\n\n")
		for _, m := range packages[dir] {
			if m.kind != "" && m.kind != "help" {
				b.WriteString(m.kind + ": ")
			}
			said := strings.TrimSpace(m.said)
			b.WriteString(strings.ReplaceAll(said, "\n", "\n    ") + "\n")
		}
	}
	return strings.ReplaceAll(strings.ReplaceAll(b.String(), "    \n", "\n"), "\x00", "\\0")
}

// pythonMessages runs the collector of Python's strings, which needs Python's own parser.
func pythonMessages(t *testing.T) string {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	sources, err := filepath.Glob("clients/python/epcache/*.py")
	require.NoError(t, err)
	for _, source := range sources { // so that Go's cache of tests notices changes
		_, err := os.Stat(source)
		require.NoError(t, err)
	}
	out, err := exec.Command(python, "-S", "testdata/tools/messages.py",
		"clients/python/epcache").Output()
	require.NoError(t, err)
	return string(out)
}

func TestMessagesAreUpToDate(t *testing.T) {
	programs := make(map[string]map[string][]text)
	for dir, found := range goMessages(t) {
		program := programOf(dir)
		if programs[program] == nil {
			programs[program] = make(map[string][]text)
		}
		programs[program][dir] = found
	}
	want := make(map[string]string)
	for program, packages := range programs {
		want[program] = golden(packages)
	}
	want["python"] = pythonMessages(t)
	for program, text := range want {
		file := filepath.Join("testdata", "messages", program+".txt")
		if *updateMessages {
			require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
			continue
		}
		have, _ := os.ReadFile(file)
		if string(have) != text {
			t.Errorf("%s is out of date: run `make messages`, and commit it", file)
		}
	}
}

// decoded are words that a reader of a message has to decode, beside those that are banned in
// comments, and what to write instead.
var decoded = []struct {
	pattern *regexp.Regexp
	instead string
}{
	{regexp.MustCompile(`(?i)\b(room)\b`), "space, free space, or budget"},
	{regexp.MustCompile(`(?i)\b(goes|gone|is told|tells?|let go|meanwhile|likewise)\b`),
		"say what happens"},
	{regexp.MustCompile(`(?i)\bin(to)? force\b`), "in effect"},
	{regexp.MustCompile(`(?i)\bstands?\b`), "is"},
	{regexp.MustCompile(`(?i)\b(given out|by hand)\b`), "served; by request"},
	{regexp.MustCompile(`(?i)\b(everybody|anybody|who asks|whose)\b`), "name the user"},
	{regexp.MustCompile(`\bfolders?\b`), "directory"},
	{regexp.MustCompile(`\b(is|are|takes|does) no (?:regular|number|id|path|socket|amount)\b`),
		"is not a"},
	{regexp.MustCompile(`\bonce that is over\b|\bpays (least|most)\b`), "say what is compared"},
}

// meant are messages that may have such a word, and why.
var meant = map[string]string{
	"import sys; from epcache":      "a program, which only epcache's own child runs",
	"meanwhile={}":                  "the name of a parameter",
	"{model}, and {output}":         "the placeholder {folder} of configurations",
	"cannot remove a scratch":       "the key of a log record, which scripts may use",
	"This directory is a cache of ": "a line that the CACHEDIR.TAG specification asks for",
	"--embed cannot be used for a":  "an attribute of models, not a subject",
	"it cannot be used for groups":  "an attribute of models, not a subject",
	"nor those whose path":          "an attribute of builds, not a subject",
}

// Users understand a message without this project's own words.
func TestMessagesUsePlainWords(t *testing.T) {
	files, err := filepath.Glob("testdata/messages/*.txt")
	require.NoError(t, err)
	require.Len(t, files, 5)
	unused := maps.Clone(meant)
	for _, file := range files {
		content, err := os.ReadFile(file)
		require.NoError(t, err)
		for i, line := range strings.Split(string(content), "\n") {
			excused := false
			for part := range meant {
				if strings.Contains(line, part) {
					excused = true
					delete(unused, part)
				}
			}
			if excused {
				continue
			}
			for _, b := range append(slices.Clone(decoded), banned...) {
				if found := b.pattern.FindString(line); found != "" {
					t.Errorf("%s:%d: %q in %q: %s", file, i+1, found, line, b.instead)
				}
			}
		}
	}
	require.Empty(t, unused, "no message has these words any more")
}
