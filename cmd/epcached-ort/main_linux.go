//go:build linux && (amd64 || arm64)

package main

import (
	"fmt"
	"os"

	"github.com/epcached/epcached/compilers/dialogue"
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	switch {
	case len(args) == 2 && args[0] == "prepare":
		if err := prepare(args[1]); err != nil {
			fmt.Fprintln(os.Stderr, "epcached-ort: prepare:", err)
		}
		return dialogue.ExitSetup // prepare replaces the program, so it comes back only when it failed
	case len(args) == 1 && args[0] == "work":
		return work()
	}
	fmt.Fprintln(os.Stderr, "epcached-ort: this is epcached's worker, which epcached starts by itself; put it beside epcached, or name it in the configuration")
	return dialogue.ExitSetup
}
