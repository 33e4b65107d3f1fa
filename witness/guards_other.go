//go:build !linux

package witness

import (
	"errors"
	"os"
)

// Guards there are none of here.
type Guards struct{}

// Guard there is none of here.
type Guard struct{}

// Idle is true.
func (*Guards) Idle() bool { return true }

// Lost is never closed.
func (*Guard) Lost() <-chan struct{} { return nil }

// Take guards nothing.
func (*Guards) Take([]*os.File) *Guard { return nil }

// Share does nothing.
func (*Guard) Share() *Guard { return nil }

// Release does nothing.
func (*Guard) Release() {}

// Stands is false.
func (*Guard) Stands() bool { return false }

// OpenAgain fails.
func OpenAgain(*os.File) (int, error) { return -1, errors.ErrUnsupported }
