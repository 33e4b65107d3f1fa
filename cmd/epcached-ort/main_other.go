//go:build !linux || !(amd64 || arm64)

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "epcached-ort: works on Linux on amd64 and arm64 only")
	os.Exit(1)
}
