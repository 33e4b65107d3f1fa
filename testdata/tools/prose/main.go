// Prose counts, per 1,000 words of Go comments, the habits of style that make comments hard to
// read, beside other codebases that are known to read well. It prints one column for this tree and
// one for each corpus that the module cache or the Go installation has.
//
// With -list it prints each match in this tree instead, as file:line, so that it can be rewritten.
//
//	go run ./testdata/tools/prose [-list] [DIR]
package main

import (
	"bufio"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"text/tabwriter"
	"unicode/utf8"
)

// A measure is a count of matches in the text of comments. Those with a goal bound it from above,
// or from below if atLeast is set.
type measure struct {
	name    string
	pattern *regexp.Regexp
	goal    float64
	atLeast bool
}

var measures = []measure{
	{"who, whoever, whose", regexp.MustCompile(`(?i)\b(who|whoever|whose|whom)\b`), 0.4, false},
	{"nobody, somebody", regexp.MustCompile(`(?i)\b(nobody|somebody)('s)?\b`), 0.6, false},
	{"sentences that begin with Who or What",
		regexp.MustCompile(`(?:^|[.!?:]\s+)(Who|Whoever|Whose|What|Whatever)\s[^?]*?[.!]`), 0,
		false},
	{"because, so that, therefore",
		regexp.MustCompile(`(?i)\b(because|so that|therefore)\b`), 1.5, true},
	{"anew, once more", regexp.MustCompile(`(?i)\b(anew|once more)\b`), 0, false},
}

// A comment is the text of a comment group, in one line.
type comment struct {
	at   string // file:line
	text string
}

// A text is the comments of a tree.
type text struct {
	comments []comment
	words    int
	long     int // lines of more than 100 columns outside generated code
}

func main() {
	list := flag.Bool("list", false, "print each match as file:line")
	flag.Parse()
	dir := "."
	if flag.NArg() > 0 {
		dir = flag.Arg(0)
	}
	do := compare
	if *list {
		do = printMatches
	}
	if err := do(dir); err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(1)
	}
}

func printMatches(dir string) error {
	t, err := read(dir)
	if err != nil {
		return err
	}
	for _, c := range t.comments {
		for _, m := range measures {
			if m.atLeast {
				continue
			}
			for _, found := range m.pattern.FindAllString(c.text, -1) {
				fmt.Printf("%s: %s\n", c.at, found)
			}
		}
	}
	return nil
}

func compare(dir string) error {
	names := []string{"this tree"}
	texts := make([]text, 1)
	var err error
	if texts[0], err = read(dir); err != nil {
		return err
	}
	for _, c := range corpora() {
		t, err := read(c.dir)
		if err != nil {
			return err
		}
		if t.words > 0 {
			names, texts = append(names, c.name), append(texts, t)
		}
	}

	w := tabwriter.NewWriter(os.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintf(w, "per 1,000 words of comments\tgoal\t%s\n", strings.Join(names, "\t"))
	for _, m := range measures {
		bound := "<="
		if m.atLeast {
			bound = ">="
		}
		fmt.Fprintf(w, "%s\t%s %.1f", m.name, bound, m.goal)
		for _, t := range texts {
			n := 0
			for _, c := range t.comments {
				n += len(m.pattern.FindAllString(c.text, -1))
			}
			fmt.Fprintf(w, "\t%.2f", 1000*float64(n)/float64(t.words))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprint(w, "lines over 100 columns\t<= 0")
	for _, t := range texts {
		fmt.Fprintf(w, "\t%d", t.long)
	}
	fmt.Fprint(w, "\nwords\t")
	for _, t := range texts {
		fmt.Fprintf(w, "\t%d", t.words)
	}
	fmt.Fprintln(w)
	return w.Flush()
}

// read returns the comments of all Go files below dir, but for generated ones and directories that
// the go command ignores.
func read(dir string) (text, error) {
	var t text
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != dir && (strings.HasPrefix(name, ".") || name == "vendor") {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		return t.add(path)
	})
	return t, err
}

func (t *text) add(path string) error {
	source, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, path, source, parser.ParseComments)
	if err != nil || ast.IsGenerated(file) {
		return nil // other trees have files that are broken on purpose
	}
	for _, group := range file.Comments {
		words := strings.Fields(group.Text())
		at := fmt.Sprintf("%s:%d", path, set.Position(group.Pos()).Line)
		t.comments = append(t.comments, comment{at, strings.Join(words, " ")})
		t.words += len(words)
	}
	lines := bufio.NewScanner(strings.NewReader(string(source)))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := strings.ReplaceAll(lines.Text(), "\t", "    ")
		if utf8.RuneCountInString(line) > 100 && !unsplit.MatchString(line) {
			t.long++
		}
	}
	return lines.Err()
}

// unsplit matches lines that Go cannot split: struct tags and URLs, as in language_test.go.
var unsplit = regexp.MustCompile("`[a-z]+:\"[^`]*`$|\"https://[^ ]+\"$")

type corpus struct{ name, dir string }

// corpora returns the trees to compare with: the newest version of each in the module cache.
func corpora() []corpus {
	var found []corpus
	cache := goEnv("GOMODCACHE")
	for _, c := range []corpus{
		{"age", "filippo.io/age@*"},
		{"bbolt", "go.etcd.io/bbolt@*"},
		{"raft-wal", "github.com/hashicorp/raft-wal@*"},
		{"restic", "github.com/restic/restic@*"},
	} {
		if dirs, _ := filepath.Glob(filepath.Join(cache, c.dir)); len(dirs) > 0 {
			found = append(found, corpus{c.name, dirs[len(dirs)-1]})
		}
	}
	if dir := filepath.Join(goEnv("GOROOT"), "src/cmd/go/internal/cache"); isDir(dir) {
		found = append(found, corpus{"go build cache", dir})
	}
	return found
}

func goEnv(name string) string {
	out, err := exec.Command("go", "env", name).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}
