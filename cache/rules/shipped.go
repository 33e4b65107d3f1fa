package rules

import (
	"embed"
	"io/fs"
	"sync"
)

//go:embed shipped/*.toml
var shippedFiles embed.FS

// Shipped gives the rules that are part of the program.
func Shipped() *Set { return shipped() }

var shipped = sync.OnceValue(func() *Set {
	set, err := readShipped()
	if err != nil {
		panic(err) // a mistake of ours, which no test run survives
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
