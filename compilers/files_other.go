//go:build !linux

package compilers

import "os"

// linkCount is known on Linux only, where the daemon runs.
func linkCount(os.FileInfo) uint64 { return 1 }

// openPlain opens a file for reading.
func openPlain(path string) (*os.File, error) { return os.Open(path) }
