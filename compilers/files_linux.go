package compilers

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/epcached/epcached/epmodel"
)

// openPlain opens a file for reading. It follows no link, and does not block on a FIFO.
func openPlain(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
}

// openSource opens an output file of a worker, or a model, for epmodel.
func openSource(path string) (*os.File, epmodel.Source, error) {
	f, err := openPlain(path)
	if err != nil {
		return nil, nil, err
	}
	source, err := epmodel.FileSource(f)
	if err != nil { // a process that escaped may have changed it since it was listed
		return nil, nil, errors.Join(fmt.Errorf("%w: %w", ErrOutput, err), f.Close())
	}
	return f, source, nil
}

func statOf(info os.FileInfo) *syscall.Stat_t { return info.Sys().(*syscall.Stat_t) }
