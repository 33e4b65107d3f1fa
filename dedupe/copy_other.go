//go:build !linux

package dedupe

import "os"

// copyInKernel copies nothing here: the caller does it.
func copyInKernel(*os.File, int64, *os.File, int64, int64) int64 { return 0 }
