package epcached

import (
	"bytes"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// figures are what makes a package hard to read. Tests and generated code do not count.
type figures struct {
	files, lines int
	methods      int // of the type that has the most
	wide         int // functions with more than maxParameters, without the receiver
	circle       int // the largest set of files that all refer to each other, directly or not
}

// A package above one of these bounds is to be divided.
var bounds = figures{files: 45, lines: 5_000, methods: 60, wide: 0, circle: 15}

const (
	maxParameters   = 6
	maxCacheMethods = 40    // of cache.Cache, which every request passes
	maxCacheLines   = 3_000 // of package cache: a reader sees how a request is answered in minutes
)

func TestPackagesStaySmall(t *testing.T) {
	exports := make(map[string]string)
	for _, p := range packages(t, "-export", "-deps", "./...") {
		exports[p.ImportPath] = p.Export
	}
	for _, p := range packages(t) {
		name := strings.TrimPrefix(p.ImportPath, module)
		may := bounds
		if name == "cache" {
			may.methods, may.lines = maxCacheMethods, maxCacheLines
		}
		s := parse(t, p, exports)
		hold := func(what string, have, may int, which any) {
			if have > may {
				t.Errorf("package %s: %d %s, not at most %d: %v", name, have, what, may, which)
			}
		}
		typ, methods := s.mostMethods()
		wide, circle := s.wide(), s.circle()
		t.Logf("%-38s %3d files, %5d lines, %3d methods of %s, %d wide functions, a circle of %d "+
			"files",
			name, len(s.names), s.lines, methods, typ, len(wide), len(circle))
		hold("files", len(s.names), may.files, "")
		hold("lines", s.lines, may.lines, "")
		hold("methods of a type", methods, may.methods, typ)
		hold("functions with too many parameters", len(wide), may.wide, wide)
		hold("files that refer to each other", len(circle), may.circle, circle)
	}
}

// parsed is a package without its generated code.
type parsed struct {
	lines int
	names []string // of its files
	funcs []*ast.FuncDecl
	refer map[string]map[string]bool // file -> other files with declarations that it uses
}

func parse(t *testing.T, p listed, exports map[string]string) *parsed {
	s := &parsed{refer: make(map[string]map[string]bool)}
	fset, files := token.NewFileSet(), []*ast.File(nil)
	for _, name := range p.GoFiles {
		text, err := os.ReadFile(filepath.Join(p.Dir, name))
		require.NoError(t, err)
		f, err := parser.ParseFile(fset, name, text, parser.SkipObjectResolution)
		require.NoError(t, err)
		files = append(files, f)
		if strings.HasSuffix(name, ".pb.go") {
			continue
		}
		s.names, s.lines = append(s.names, name), s.lines+bytes.Count(text, []byte("\n"))
		s.refer[name] = make(map[string]bool)
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok {
				s.funcs = append(s.funcs, fn)
			}
		}
	}
	open := func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }
	info := types.Info{Uses: make(map[*ast.Ident]types.Object)}
	conf := types.Config{Importer: importer.ForCompiler(fset, "gc", open)}
	pkg, err := conf.Check(p.ImportPath, fset, files, &info)
	require.NoError(t, err)
	for id, used := range info.Uses {
		from, to := fset.File(id.Pos()).Name(), fset.File(used.Pos())
		if used.Pkg() == pkg && to != nil && s.refer[from] != nil && s.refer[to.Name()] != nil {
			s.refer[from][to.Name()] = true
		}
	}
	return s
}

// mostMethods returns the type that has the most methods, and how many.
func (s *parsed) mostMethods() (string, int) {
	count := make(map[string]int)
	for _, fn := range s.funcs {
		if fn.Recv == nil {
			continue
		}
		typ := fn.Recv.List[0].Type
		if star, ok := typ.(*ast.StarExpr); ok {
			typ = star.X
		}
		switch of := typ.(type) { // of a generic type
		case *ast.IndexExpr:
			typ = of.X
		case *ast.IndexListExpr:
			typ = of.X
		}
		count[typ.(*ast.Ident).Name]++
	}
	names := slices.Sorted(maps.Keys(count))
	if len(names) == 0 {
		return "no type", 0
	}
	typ := slices.MaxFunc(names, func(a, b string) int { return count[a] - count[b] })
	return typ, count[typ]
}

// wide returns the functions with too many parameters.
func (s *parsed) wide() (names []string) {
	for _, fn := range s.funcs {
		if fn.Type.Params.NumFields() > maxParameters {
			names = append(names, fn.Name.Name)
		}
	}
	return names
}

// circle returns the largest strongly connected component of the files.
func (s *parsed) circle() (largest []string) {
	reached := make(map[string]map[string]bool) // by each file
	for _, name := range s.names {
		seen, next := make(map[string]bool), []string{name}
		for len(next) > 0 {
			one := next[len(next)-1]
			next = next[:len(next)-1]
			for other := range s.refer[one] {
				if !seen[other] {
					seen[other] = true
					next = append(next, other)
				}
			}
		}
		reached[name] = seen
	}
	for _, name := range s.names {
		same := []string{name}
		for other := range reached[name] {
			if other != name && reached[other][name] {
				same = append(same, other)
			}
		}
		if slices.Sort(same); len(same) > len(largest) {
			largest = same
		}
	}
	return largest
}
