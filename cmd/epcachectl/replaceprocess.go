package main

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// replaceProcess becomes another program, which inherits the files under their numbers. It returns only if it fails.
func replaceProcess(path string, argv []string, files []*os.File) error {
	for _, f := range files {
		if _, err := unix.FcntlInt(f.Fd(), unix.F_SETFD, 0); err != nil {
			return fmt.Errorf("pass the view on: %w", err)
		}
	}
	return syscall.Exec(path, argv, os.Environ())
}
