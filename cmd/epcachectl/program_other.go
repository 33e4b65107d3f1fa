//go:build !unix

package main

import (
	"errors"
	"os"
)

// replaceProcess answers errors.ErrUnsupported: there is no descriptor to pass on here.
func replaceProcess(string, []string, []*os.File) error { return errors.ErrUnsupported }
