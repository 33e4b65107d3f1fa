//go:build !linux

package cache

import (
	"errors"
	"io"
	"os"

	"github.com/epcached/epcached/cas"
)

func unwritable(*os.File) error { return errors.ErrUnsupported }

func unlinked(*os.File) (bool, error) { return false, errors.ErrUnsupported }

func stampSettled(*os.File) (cas.Stamp, error) { return cas.Stamp{}, errors.ErrUnsupported }

func copyExactly(io.ReaderAt, *os.File, string, int64) error { return errors.ErrUnsupported }

func fits(int64, int64) error { return errors.ErrUnsupported }
