//go:build !linux

package cache

import (
	"errors"
	"os"
)

func pathOf(*os.File) (string, error) { return "", errors.ErrUnsupported }

func openKept(string, uint32, bool) (*os.File, error) { return nil, errors.ErrUnsupported }
