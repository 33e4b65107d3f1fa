//go:build !linux

package main

import (
	"errors"
	"os"
)

func detach(string, []string, *os.File, *os.File) error { return errors.ErrUnsupported }

func starter() (*os.File, error) { return nil, errors.ErrUnsupported }

func putInPlace(*os.File, *os.File) error { return errors.ErrUnsupported }
