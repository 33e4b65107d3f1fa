//go:build linux && (amd64 || arm64)

package main

import (
	"fmt"
	"os"
	"runtime"

	"github.com/epcached/epcached/compilers/dialogue"
)

// The main goroutine stays on the main thread: see prepare.
func init() { runtime.LockOSThread() }

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	if err := defaultSignals(); err != nil {
		fmt.Fprintln(os.Stderr, "epcached-ort:", err)
		return dialogue.ExitSetup
	}
	switch {
	case len(args) == 2 && args[0] == "prepare":
		status, err := prepare(args[1])
		if err != nil {
			fmt.Fprintln(os.Stderr, "epcached-ort: prepare:", err)
			return dialogue.ExitSetup
		}
		return status
	case len(args) == 1 && args[0] == "work":
		return work()
	}
	fmt.Fprintln(os.Stderr, "epcached-ort: this is epcached's worker, which epcached starts by itself; put it beside epcached, or name it in the configuration")
	return dialogue.ExitSetup
}
