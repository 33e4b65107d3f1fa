package compilers

import (
	"os"
	"syscall"
)

// openPlain opens a file for reading without following a link, and without waiting for somebody to write into a FIFO.
func openPlain(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
}

// statOf gives what the kernel says of a file.
func statOf(info os.FileInfo) *syscall.Stat_t { return info.Sys().(*syscall.Stat_t) }
