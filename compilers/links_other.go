//go:build !linux

package compilers

import "os"

// linkCount is known on Linux only, where the daemon runs.
func linkCount(os.FileInfo) uint64 { return 1 }
