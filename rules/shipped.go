package rules

import (
	"embed"
	"path"
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
	entries, err := shippedFiles.ReadDir("shipped")
	if err != nil {
		return nil, err
	}
	set := &Set{eps: map[string]provider{}}
	for _, e := range entries {
		name := path.Join("shipped", e.Name())
		text, err := shippedFiles.ReadFile(name)
		if err != nil {
			return nil, err
		}
		next, err := Parse(name, text)
		if err != nil {
			return nil, err
		}
		set.append(next)
	}
	return set, nil
}
