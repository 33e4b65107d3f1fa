//go:build !linux

package cache

import (
	"errors"
	"os"
)

func believableFS(*os.File) ([8]byte, bool) { return [8]byte{}, false }

func settle(*os.File) error { return errors.ErrUnsupported }
