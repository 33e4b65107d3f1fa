// Command typecheck finds out whether the module's packages are correct Go for another system: typecheck GOOS GOARCH. It compiles nothing, and so takes
// seconds where a build of everything, the standard library included, takes a minute.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: typecheck GOOS GOARCH")
		os.Exit(2)
	}
	if err := check(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintf(os.Stderr, "typecheck %s/%s: %v\n", os.Args[1], os.Args[2], err)
		os.Exit(1)
	}
}

// listed is a package as go list tells of it.
type listed struct {
	ImportPath, Dir string
	GoFiles         []string
	ImportMap       map[string]string // of what stands in a vendor folder
	Module          *struct{ Main bool }
}

// checker knows the packages so far, by their paths.
type checker struct {
	files  *token.FileSet
	goarch string
	known  map[string]*types.Package
}

func check(goos, goarch string) error {
	list := exec.Command("go", "list", "-deps", "-json=ImportPath,Dir,GoFiles,ImportMap,Module", "./...") // a package comes behind those that it imports
	list.Env, list.Stderr = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0"), os.Stderr
	out, err := list.Output()
	if err != nil {
		return err
	}
	c := checker{token.NewFileSet(), goarch, map[string]*types.Package{"unsafe": types.Unsafe}}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := c.check(p); err != nil {
			return err
		}
	}
}

// check takes others' packages for what they declare.
func (c *checker) check(p listed) error {
	if p.ImportPath == "unsafe" {
		return nil
	}
	var parsed []*ast.File
	for _, name := range p.GoFiles {
		f, err := parser.ParseFile(c.files, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		parsed = append(parsed, f)
	}
	ours := p.Module != nil && p.Module.Main
	config := types.Config{Sizes: types.SizesFor("gc", c.goarch), IgnoreFuncBodies: !ours, Importer: importer(func(path string) (*types.Package, error) {
		if mapped := p.ImportMap[path]; mapped != "" {
			path = mapped
		}
		return c.known[path], nil
	})}
	done, err := config.Check(p.ImportPath, c.files, parsed, nil)
	c.known[p.ImportPath] = done
	return err
}

type importer func(path string) (*types.Package, error)

func (i importer) Import(path string) (*types.Package, error) { return i(path) }
