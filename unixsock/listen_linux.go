package unixsock

import (
	"errors"
	"net"
	"os"
)

// Listen makes the socket at path with that mode.
func Listen(path string, mode os.FileMode) (net.Listener, error) { return nil, errors.ErrUnsupported }

// CheckDescriptor tells whether a descriptor that a client sent may be read.
func CheckDescriptor(f *os.File) error { return errors.ErrUnsupported }
