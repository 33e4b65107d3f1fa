//go:build !linux

package flock

import (
	"errors"
	"os"
)

// TryLock is not there.
func TryLock(*os.File) (bool, error) { return false, errors.ErrUnsupported }

// Share is not there.
func Share(*os.File) error { return errors.ErrUnsupported }
